"""`MorLinear`: a linear layer whose six operands are FP8 where that is good enough.

    forward       out         (T, O) = input (T, I)        @ weight (O, I).T
    grad_input    grad_input  (T, I) = grad_output (T, O)  @ weight_transposed (I, O).T
    grad_weight   grad_weight (O, I) = grad_output_transposed (O, T) @ input_transposed (I, T).T

How a product is made stands in `mor.products`. For torch.compile the passes are custom operators
(`mor::linear_forward`, `mor::linear_backward`), opaque to it; eager passes call the same functions
through an autograd function. Under activation checkpointing the second forward decides alike and
counts nothing. Decisions and counters advance in training mode only.

Source: MoR, arXiv 2512.22804. `refresh_every` is ours.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from mor._base import adopt, check_input
from mor.config import FORMATS, MorConfig, MorError, partials
from mor.products import general_product, is_tensor_path, tensor_backward, tensor_forward
from mor.state import LayerState, state_of

_NOTHING = nullcontext()


class MorLinear(nn.Linear):
    """`nn.Linear` with MoR in its three products; same Parameters and state_dict keys."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        config: MorConfig,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self._set_config(config)

    @classmethod
    def wrap(cls, linear: nn.Linear, config: MorConfig) -> "MorLinear":
        """A MorLinear around the very Parameters of `linear`."""
        layer = adopt(cls, linear)
        layer._set_config(config)
        return layer

    def _set_config(self, config: MorConfig) -> None:
        self.config = config
        self.state = LayerState(config)
        self.handle = self.state.handle

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Copies and unpickled layers decide and count for themselves.
        super().__setstate__(state)
        self._set_config(self.config)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features).

        Raises:
            TypeError: x is not fp32, bf16 or fp16, or x and weight differ outside autocast.
            MorError: products=real on a device without FP8 products.
        """
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(dtype), weight.to(dtype)
            bias = bias if bias is None else bias.to(dtype)
        check_input(x)
        if x.dtype != weight.dtype:
            raise TypeError(
                f"x is {x.dtype}, weight is {weight.dtype}; cast one of them or use torch.autocast"
            )
        matrix = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
        if x.shape[-1] != self.in_features:
            raise ValueError(
                f"x has {x.shape[-1]} features in its last axis, the layer takes {self.in_features}"
            )
        if torch.compiler.is_compiling():
            out = torch.ops.mor.linear_forward(matrix, weight, self.handle, self.training)[0]
        else:
            out = _EagerLinear.apply(matrix, weight, self.handle, self.training)
        out = out if x.ndim == 2 else out.reshape(*x.shape[:-1], self.out_features)
        return out if bias is None else out + bias

    def extra_repr(self) -> str:
        c = self.config
        return f"{super().extra_repr()}, policy={c.policy}, partition={c.partition}"


def _without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    device = x.device.type
    # The context costs as much host time as a launch.
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else _NOTHING


def _forward(
    x: Tensor, weight: Tensor, handle: int, training: bool
) -> tuple[Tensor, Tensor, list[int]]:
    """x (T, I) @ weight (O, I).T; also `fp8.amax` of both and what the backward pass must know: indices
    of the formats of input and weight, whether it decides anew, whether it counts."""
    state = state_of(handle)
    # Inside the autograd engine a forward pass is a recomputation: same decisions, no counting.
    counting = training and torch._C._current_graph_task_id() == -1
    every = state.config.refresh_every
    if counting:
        state.is_deciding = state.passes % every == 0
        state.passes += 1
    deciding = every == 1 or (counting and state.is_deciding)
    with _without_autocast(x):
        if is_tensor_path(state.config):
            out, largest, formats = tensor_forward(x, weight, state, deciding, counting)
        else:
            operands = {"input": x, "weight": weight}
            out = general_product("forward", operands, state, deciding, counting)
            largest = x.new_zeros(2, partials(x.device), dtype=torch.float32)
            formats = ["bf16", "bf16"]
    meta = [*map(FORMATS.index, formats), int(every == 1 or state.is_deciding), int(training)]
    return out, largest, meta


@torch.library.custom_op("mor::linear_forward", mutates_args=())
def linear_forward(
    x: Tensor, weight: Tensor, handle: int, training: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`_forward`; its meta as a uint8 tensor on the CPU."""
    out, largest, meta = _forward(x, weight, handle, training)
    return out, largest, torch.tensor(meta, dtype=torch.uint8)


@linear_forward.register_fake
def _(x: Tensor, weight: Tensor, handle: int, training: bool) -> tuple[Tensor, Tensor, Tensor]:
    out = x.new_empty(x.shape[0], weight.shape[0])
    largest = x.new_empty(2, partials(x.device), dtype=torch.float32)
    return out, largest, torch.empty(4, dtype=torch.uint8, device="cpu")


def _linear_gradients(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    largest: Tensor,
    meta: list[int],
    handle: int,
    need_input: bool,
    need_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients by x and weight; None for one that is not needed. meta: of `_forward`."""
    state = state_of(handle)
    formats, (deciding, counting) = [FORMATS[i] for i in meta[:2]], map(bool, meta[2:])
    with _without_autocast(grad):
        if is_tensor_path(state.config):
            by_input, by_weight = tensor_backward(
                grad,
                x,
                weight,
                largest,
                formats,
                state,
                deciding,
                counting,
                need_input,
                need_weight,
            )
        else:
            by_input = by_weight = None
            if need_input:
                operands = {"grad_output": grad, "weight_transposed": weight.t()}
                by_input = general_product("grad_input", operands, state, deciding, counting)
            if need_weight:
                operands = {"grad_output_transposed": grad.t(), "input_transposed": x.t()}
                by_weight = general_product("grad_weight", operands, state, deciding, counting)
    return by_input, by_weight


@torch.library.custom_op("mor::linear_backward", mutates_args=())
def linear_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    largest: Tensor,
    meta: Tensor,
    handle: int,
    need_input: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients by x and weight; one that is not needed is empty."""
    by_input, by_weight = _linear_gradients(
        grad, x, weight, largest, meta.tolist(), handle, need_input, need_weight
    )
    return (
        grad.new_empty(0) if by_input is None else by_input,
        grad.new_empty(0) if by_weight is None else by_weight,
    )


@linear_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    largest: Tensor,
    meta: Tensor,
    handle: int,
    need_input: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor]:
    by_input = grad.new_empty(x.shape) if need_input else grad.new_empty(0)
    return by_input, grad.new_empty(weight.shape) if need_weight else grad.new_empty(0)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, ctx.handle, _ = inputs
    _, largest, meta = output
    ctx.save_for_backward(x, weight, largest, meta)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return None, None, None, None
    x, weight, largest, meta = ctx.saved_tensors
    need_input, need_weight = ctx.needs_input_grad[:2]
    by_input, by_weight = torch.ops.mor.linear_backward(
        grad, x, weight, largest, meta, ctx.handle, need_input, need_weight
    )
    return by_input if need_input else None, by_weight if need_weight else None, None, None


linear_forward.register_autograd(_backward, setup_context=_setup_context)


class _EagerLinear(torch.autograd.Function):
    """The operators without their dispatch, which takes longer than the kernels of a small layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, handle: int, training: bool) -> Tensor:
        out, largest, ctx.meta = _forward(x, weight, handle, training)
        ctx.handle = handle
        ctx.save_for_backward(x, weight, largest)
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        if grads[0] is None:
            return None, None, None, None
        if torch.is_grad_enabled():
            raise MorError(
                "MorLinear has no second derivatives (create_graph=True): its casts have none. "
                "Take them without MoR: mor.restore_linears(model)."
            )
        x, weight, largest = ctx.saved_tensors
        need_input, need_weight = ctx.needs_input_grad[:2]
        return (
            *_linear_gradients(
                grads[0], x, weight, largest, ctx.meta, ctx.handle, need_input, need_weight
            ),
            None,
            None,
        )
