"""`MorLinear`: a linear layer whose six operands are FP8 where that is good enough.

    forward       out         (T, O) = input (T, I)        @ weight (O, I).T
    grad_input    grad_input  (T, I) = grad_output (T, O)  @ weight_transposed (I, O).T
    grad_weight   grad_weight (O, I) = grad_output_transposed (O, T) @ input_transposed (I, T).T

A product runs in FP8 only if both operands were accepted; otherwise both enter in BF16, the
accepted one as its dequantized value. Two paths:

Tensor path (policy and partition tensor): the host must know the decision to choose the product.
A pass (forward, backward) waits for the device at most once: all its errors travel in one copy,
and while they travel the product that the last decision would choose is already running; it is
thrown away where the decision turns out otherwise. Between refreshes nothing waits. On Hopper and
newer accepted operands really go through `torch._scaled_mm`. An operand and its transpose share
scale and decision, so the backward pass takes those of input and weight over from the forward.

General path (blocks, rows, columns): no hardware form, emulated with the values that the policy
gives: one computation whether a product counts as FP8 or BF16, so nothing waits.

For torch.compile both are custom operators (`mor::linear_forward`, `mor::linear_backward`), opaque
to it; eager passes call the same functions through an autograd function.
Under activation checkpointing the second forward decides alike and counts nothing. Decisions and
counters advance in training mode only.

Source: MoR, arXiv 2512.22804. Speculation, `refresh_every` and the sharing are ours.
"""

import fnmatch
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from mor import fp8
from mor._base import adopt, check_input, put_back, replace_layers
from mor.config import BF16_INDEX, FORMATS, Metric, MorConfig, MorError, partials
from mor.fp8 import Fp8
from mor.partition import parse_partition
from mor.policy import quantize, round_to_bf16, signed_threshold
from mor.statistics import LayerState, layer_states, state_of

# Layout of the small CPU tensor that a forward pass hands to its backward pass.
_INPUT, _WEIGHT, _DECIDING, _COUNTING = range(4)
_ORIGINALS = "_mor_originals"
_NOTHING = nullcontext()
FAST_ACCUMULATION = {"forward": True, "grad_input": False, "grad_weight": False}
"""As torchao's float8 training: gradients keep full accumulation."""


class MorLinear(nn.Linear):
    """`nn.Linear` with MoR in its three products; same Parameters and state_dict keys."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, config: MorConfig,
        device: Any = None, dtype: Any = None,
    ) -> None:  # fmt: skip
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


# ---------------------------------------------------------------- the tensor path


def _is_tensor_path(config: MorConfig) -> bool:
    return config.policy == "tensor" and config.partition == "tensor"


def _uses_hardware(config: MorConfig, device: torch.device) -> bool:
    available = fp8.has_fp8_products(device)
    if config.products == "real" and not available:
        raise MorError(
            f"mor.products=real, but {device.type} has no FP8 matrix products (compute capability "
            "8.9 or higher). Set mor.products=auto or emulated."
        )
    return available and config.products != "emulated"


class _Trials:
    """One or two operands with their casts to every FP8 format of the ladder, errors still on the
    device."""

    def __init__(
        self, operands: list[Tensor], state: LayerState, held: list[str | None], *,
        turned: bool = False,
    ) -> None:  # fmt: skip
        """held: the decisions to keep; None decides anew. turned: casts of the transposes, too."""
        config = state.config
        self.operands, self.config, self.held = operands, config, held
        self.largest = fp8.amax(*operands)
        self.casts: list[dict[str, fp8.Cast]] = [{} for _ in operands]
        self.errors: Tensor | None = None
        """(n_formats * n,) float64, on the device, or on the host once `arrival` is over."""
        self.arrival: torch.cuda.Event | None = None
        if None in held:
            n, names = len(operands), config.fp8_formats
            memory: list[Tensor | None] = [None] * len(names)
            if operands[0].is_cuda and config.metric == "relative_error" and names:
                # One layer's passes wait for their errors before the next begins: it is free.
                self.errors, self.arrival = state.landing(n * len(names))
                memory = [self.errors] if len(names) == 1 else [*self.errors.split(n)]
            errors = [
                self._cast(name, range(n), turned, config.metric, room)
                for name, room in zip(names, memory, strict=True)
            ]
            if self.arrival is not None:
                self.arrival.record()
            elif errors:
                self.errors = torch.cat([e for e in errors if e is not None])
        else:
            for name in sorted({name for name in held if name and name != "bf16"}):
                which = [i for i, own in enumerate(held) if own == name]
                self._cast(name, which, turned, None, None)

    def _cast(
        self, format: str, which: Sequence[int], turned: bool, metric: Metric | None,
        landing: Tensor | None,
    ) -> Tensor | None:  # fmt: skip
        largest = self.largest
        if len(which) < len(self.operands):
            largest = largest[which[0] : which[0] + 1]
        operands = [self.operands[i] for i in which]
        casts, errors = fp8.cast(
            operands, largest, format, turned=turned, metric=metric, landing=landing
        )
        for i, cast in zip(which, casts, strict=True):
            self.casts[i][format] = cast
        return errors

    def wait(self) -> list[float]:
        """The errors, on the host; the pass's one wait. None are measured: no wait, no errors."""
        if self.errors is None:
            return []
        if self.arrival is not None:
            self.arrival.synchronize()
        found: list[float] = self.errors.tolist()
        return found

    def decide(self, errors: list[float]) -> tuple[list[str], list[float | None]]:
        """Of each operand the first format whose error is below its threshold, and the error of the
        ladder's first format; errors of all formats and operands, none = all are held."""
        if not errors:
            return [name or "bf16" for name in self.held], [None] * len(self.held)
        n, config = len(self.operands), self.config
        formats = []
        for i in range(n):
            passing = (
                name
                for name, error in zip(config.fp8_formats, errors[i::n], strict=True)
                if error < signed_threshold(config, name)
            )
            formats.append(next(passing, "bf16"))
        return formats, list(errors[:n])


class _Operand:
    """One side of a product: FP8, or values that enter in BF16."""

    def __init__(
        self, x: Tensor, largest: Tensor, row: int, format: str, *, cast: Fp8 | None,
        turned: bool = False,
    ) -> None:  # fmt: skip
        """row: of largest, `fp8.amax(x)`. cast: codes in the product's orientation, where made."""
        self.x, self.largest, self.row = x, largest, row
        self.format, self.cast, self.turned = format, cast, turned

    def fp8(self) -> Fp8:
        """Codes in the product's orientation, contiguous."""
        if self.cast is None:
            largest = self.largest[self.row : self.row + 1]
            casts, _ = fp8.cast(
                [self.x], largest, self.format, plain=not self.turned, turned=self.turned
            )
            self.cast = casts[0].turned if self.turned else casts[0].plain
            assert self.cast is not None
        return self.cast

    def dense(self) -> Tensor:
        """Values in BF16: dequantized if accepted."""
        if self.format != "bf16":
            return self.fp8().dequantize(torch.bfloat16)
        values = self.x.to(torch.bfloat16)
        return values.t() if self.turned else values

    @property
    def rows(self) -> int:
        return self.x.shape[1] if self.turned else self.x.shape[0]


def _multiply(
    product: str, a: _Operand, b: _Operand, config: MorConfig, dtype: torch.dtype
) -> tuple[Tensor, str]:
    """a @ b.T and how it was executed."""
    if "bf16" in (a.format, b.format):
        return fp8.bf16_product(a.dense(), b.dense(), dtype), "bf16"
    columns = a.x.shape[0] if a.turned else a.x.shape[1]
    real = _uses_hardware(config, a.x.device) and fp8.fits_hardware(
        a.format, b.format, a.rows, b.rows, columns
    )
    if not real:
        return fp8.emulated_product(a.fp8(), b.fp8(), dtype), "fp8_emulated"
    fast = FAST_ACCUMULATION[product]
    return fp8.real_product(a.fp8(), b.fp8(), dtype, fast_accumulation=fast), "fp8"


def _tensor_forward(
    x: Tensor, weight: Tensor, state: LayerState, deciding: bool, counting: bool
) -> tuple[Tensor, Tensor, list[str]]:
    config, names = state.config, ("input", "weight")
    held = [None if deciding else state.formats.get(name) for name in names]
    trials = _Trials([x, weight], state, held)

    def product(formats: list[str]) -> tuple[Tensor, str]:
        a, b = (
            _Operand(y, trials.largest, i, name, cast=_plain(casts, name))
            for i, (y, casts, name) in enumerate(
                zip(trials.operands, trials.casts, formats, strict=True)
            )
        )
        return _multiply("forward", a, b, config, x.dtype)

    likely = [held[i] or state.formats.get(name, config.formats[0]) for i, name in enumerate(names)]
    out, execution = product(likely)
    formats, errors = trials.decide(trials.wait())
    if formats != likely:
        out, execution = product(formats)
    if counting:
        for i, name in enumerate(names):
            state.formats[name] = formats[i]
            _count(state, name, trials.operands[i], formats[i], errors[i])
        state.count_product("forward", execution)
    return out, trials.largest, formats


def _plain(casts: dict[str, fp8.Cast], format: str) -> Fp8 | None:
    return casts[format].plain if format in casts else None


def _count(state: LayerState, operand: str, x: Tensor, format: str, error: float | None) -> None:
    # The column of relative errors stays empty under another metric.
    is_measured = error is not None and state.config.metric == "relative_error"
    finite = error != float("inf")
    state.count_operand(operand, format, x.numel(), error if is_measured else None, finite)


def _tensor_backward(
    grad: Tensor, x: Tensor, weight: Tensor, largest: Tensor, meta: list[int], state: LayerState,
    need_input: bool, need_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    config, counting = state.config, bool(meta[_COUNTING])
    input_format, weight_format = FORMATS[meta[_INPUT]], FORMATS[meta[_WEIGHT]]
    held = None if meta[_DECIDING] else state.formats.get("grad_output")
    trials = _Trials([grad], state, [held], turned=need_input and need_weight)
    likely = held or state.formats.get("grad_output", config.formats[0])
    turned: list[fp8.Cast | None] = [None, None]
    both_needed = need_input and need_weight and likely != "bf16"
    if both_needed and input_format == weight_format != "bf16":
        turned[:], _ = fp8.cast([x, weight], largest, input_format, plain=False, turned=True)
    turned_input, turned_weight = (
        _Operand(y, largest, i, name, cast=cast.turned if cast else None, turned=True)
        for i, (y, name, cast) in enumerate(
            zip((x, weight), (input_format, weight_format), turned, strict=True)
        )
    )

    def grad_input(format: str) -> tuple[Tensor, str]:
        cast = _plain(trials.casts[0], format)
        a = _Operand(grad, trials.largest, 0, format, cast=cast)
        return _multiply("grad_input", a, turned_weight, config, grad.dtype)

    def grad_weight(format: str) -> tuple[Tensor, str]:
        found = trials.casts[0].get(format)
        cast = found.turned if found else None
        a = _Operand(grad, trials.largest, 0, format, cast=cast, turned=True)
        return _multiply("grad_weight", a, turned_input, config, grad.dtype)

    # One of the two runs while the errors travel.
    first = grad_input if need_input else grad_weight
    result = first(likely)
    (format,), (error,) = trials.decide(trials.wait())
    if format != likely:
        result = first(format)
    by_input = result if need_input else None
    by_weight = (grad_weight(format) if need_input else result) if need_weight else None
    if counting:
        state.formats["grad_output"] = format
        if by_input is not None:
            _count(state, "grad_output", grad, format, error)
            _count(state, "weight_transposed", weight, weight_format, None)
            state.count_product("grad_input", by_input[1])
        if by_weight is not None:
            _count(state, "grad_output_transposed", grad, format, error)
            _count(state, "input_transposed", x, input_format, None)
            state.count_product("grad_weight", by_weight[1])
    return by_input[0] if by_input else None, by_weight[0] if by_weight else None


# ---------------------------------------------------------------- the general path


def _general_product(
    product: str, operands: dict[str, Tensor], state: LayerState, deciding: bool, counting: bool
) -> Tensor:
    """Product of (M, K) and (N, K), each as the policy gives it; dtype of the first."""
    results = {}
    for name, x in operands.items():
        frozen = None if deciding else state.frozen.get(name)
        if frozen is not None and frozen.ndim and frozen.shape != _grid(x, state.config):
            frozen = None  # another number of tokens: the blocks are others
        results[name] = x, quantize(x, state.config, frozen=frozen), frozen is None
        if counting:
            state.frozen[name] = results[name][1].decision
    if counting:
        state.count_on_device(product, results)
    left, right = (result for _, result, _ in results.values())
    a, b = left.values, right.values
    if state.config.policy == "tensor" and a.dtype != torch.bfloat16:
        enters_bf16 = (left.decision == BF16_INDEX) | (right.decision == BF16_INDEX)
        a, b = (torch.where(enters_bf16, round_to_bf16(v), v) for v in (a, b))
    return a @ b.t()


def _grid(x: Tensor, config: MorConfig) -> torch.Size:
    rows, columns = parse_partition(config.partition).of(x)
    return torch.Size((-(-x.shape[0] // rows), -(-x.shape[1] // columns)))


# ---------------------------------------------------------------- the operators


def _without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    device = x.device.type
    # The context costs as much host time as a launch.
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else _NOTHING


def _forward(
    x: Tensor, weight: Tensor, handle: int, training: bool
) -> tuple[Tensor, Tensor, list[int]]:
    """x (T, I) @ weight (O, I).T; also `fp8.amax` of both and the pass's meta."""
    state = state_of(handle)
    # Inside the autograd engine a forward pass is a recomputation: same decisions, no counting.
    counting = training and torch._C._current_graph_task_id() == -1
    every = state.config.refresh_every
    if counting:
        state.is_deciding = state.passes % every == 0
        state.passes += 1
    deciding = every == 1 or (counting and state.is_deciding)
    with _without_autocast(x):
        if _is_tensor_path(state.config):
            out, largest, formats = _tensor_forward(x, weight, state, deciding, counting)
        else:
            operands = {"input": x, "weight": weight}
            out = _general_product("forward", operands, state, deciding, counting)
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
    grad: Tensor, x: Tensor, weight: Tensor, largest: Tensor, flags: list[int], handle: int,
    need_input: bool, need_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients by x and weight; None for one that is not needed."""
    state = state_of(handle)
    with _without_autocast(grad):
        if _is_tensor_path(state.config):
            by_input, by_weight = _tensor_backward(
                grad, x, weight, largest, flags, state, need_input, need_weight
            )
        else:
            deciding, counting = bool(flags[_DECIDING]), bool(flags[_COUNTING])
            by_input = by_weight = None
            if need_input:
                operands = {"grad_output": grad, "weight_transposed": weight.t()}
                by_input = _general_product("grad_input", operands, state, deciding, counting)
            if need_weight:
                operands = {"grad_output_transposed": grad.t(), "input_transposed": x.t()}
                by_weight = _general_product("grad_weight", operands, state, deciding, counting)
    return by_input, by_weight


@torch.library.custom_op("mor::linear_backward", mutates_args=())
def linear_backward(
    grad: Tensor, x: Tensor, weight: Tensor, largest: Tensor, meta: Tensor, handle: int,
    need_input: bool, need_weight: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
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
    grad: Tensor, x: Tensor, weight: Tensor, largest: Tensor, meta: Tensor, handle: int,
    need_input: bool, need_weight: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
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
        x, weight, largest = ctx.saved_tensors
        need_input, need_weight = ctx.needs_input_grad[:2]
        return (
            *_linear_gradients(
                grads[0], x, weight, largest, ctx.meta, ctx.handle, need_input, need_weight
            ),
            None,
            None,
        )


# ---------------------------------------------------------------- into a model and out again


def swap_linears(
    model: nn.Module,
    config: MorConfig,
    *,
    include: Iterable[str] | None = None,
    exclude: Iterable[str] = (),
) -> nn.Module:
    """Replace linear layers by `MorLinear` around the same Parameters, in place.

    Args:
        include: globs of layer names; None = all but the output embedding, which the paper
            leaves in BF16.
        exclude: globs of layer names to leave alone.

    Returns:
        The model.

    Raises:
        MorError: a pattern matches no linear layer, nothing is left, or the model has MoR already.
    """
    linears = {n: m for n, m in model.named_modules(remove_duplicate=False) if type(m) is nn.Linear}
    if _ORIGINALS in model.__dict__ or any(isinstance(m, MorLinear) for m in model.modules()):
        raise MorError(
            "the model has MorLinear layers already; call mor.restore_linears(model) first"
        )
    if include is None:
        head = getattr(model, "get_output_embeddings", lambda: None)()
        chosen = {n for n, m in linears.items() if m is not head}
    else:
        chosen = _matching(linears, include, "include")
    chosen -= _matching(linears, exclude, "exclude")
    if not chosen:
        raise MorError(
            f"include={include!r} and exclude={exclude!r} leave no linear layer of "
            f"{len(linears)}; loosen them"
        )

    def make(name: str, linear: nn.Linear) -> nn.Linear | None:
        return MorLinear.wrap(linear, config) if name in chosen else None

    object.__setattr__(model, _ORIGINALS, replace_layers(model, make))
    return model


def _matching(linears: dict[str, nn.Linear], patterns: Iterable[str], setting: str) -> set[str]:
    if isinstance(patterns, str):
        patterns = (patterns,)
    found: set[str] = set()
    for pattern in patterns:
        names = fnmatch.filter(linears, pattern)
        if not names:
            raise MorError(
                f"{setting}={pattern!r} matches no linear layer. Layers: "
                f"{', '.join(list(linears)[:8])}{', ...' if len(linears) > 8 else ''}."
            )
        found.update(names)
    return found


def restore_linears(model: nn.Module) -> nn.Module:
    """Put the nn.Linear layers back; they hold the trained Parameters.

    Raises:
        MorError: `swap_linears` was not called on this model.
    """
    if _ORIGINALS not in model.__dict__:
        raise MorError("mor.swap_linears was not called on this model; nothing to restore")
    put_back(model, model.__dict__.pop(_ORIGINALS))
    return model


def decision_state(model: nn.Module) -> dict[str, Any]:
    """What a resumed run needs to decide as this one would: held decisions, passes, counters."""
    return {
        name: {
            "passes": s.passes,
            "is_deciding": s.is_deciding,
            "formats": dict(s.formats),
            "frozen": {k: v.cpu() for k, v in s.frozen.items()},
            "host": torch.from_numpy(s.host.copy()),
            "device": None if s.device is None else s.device.cpu(),
        }
        for name, s in layer_states(model).items()
    }


def load_decision_state(model: nn.Module, saved: dict[str, Any]) -> None:
    """Inverse of `decision_state`.

    Raises:
        MorError: the layers are others.
    """
    states = layer_states(model)
    if set(states) != set(saved):
        different = sorted(set(states) ^ set(saved))[:4]
        raise MorError(f"the saved decisions are for other layers, for example {different}")
    for name, module in model.named_modules():
        if name not in states:
            continue
        state, entry = states[name], saved[name]
        device = next(module.parameters()).device
        state.passes, state.is_deciding = entry["passes"], entry["is_deciding"]
        state.formats = dict(entry["formats"])
        state.frozen = {k: v.to(device) for k, v in entry["frozen"].items()}
        state.host[:] = entry["host"].numpy()
        state.device = None if entry["device"] is None else entry["device"].to(device)


__all__ = [
    "MorLinear",
    "decision_state",
    "load_decision_state",
    "restore_linears",
    "swap_linears",
]
