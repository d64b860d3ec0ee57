"""Quantized linear layers, and putting them into a model and taking them out again.

`QuantLinear` holds the very Parameters of the layer it replaces, under the same names, so that
state dicts, optimizers and tied weights do not notice. Weights are quantized in the forward pass.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dmx.assignment import Assignment
from dmx.budget import linear_layers
from dmx.errors import ModelError
from dmx.models import check_searchable
from dmx.numerics.mx import INPUT_DTYPES
from dmx.quantizers import BlockQuantizer, Quantizer


class Safety(Protocol):
    """A run-time guard around the quantizers of a model, for example `mor.SafetyNet`."""

    def guard(self, quantizer: Quantizer, layer_name: str, operand: str) -> Quantizer: ...


class QuantLinear(nn.Linear):
    """`F.linear(input_quantizer(x), weight_quantizer(weight), bias)`."""

    weight_quantizer: Quantizer | None
    input_quantizer: Quantizer | None
    cache_weights: bool
    _cached: tuple[int, int, Tensor] | None

    @classmethod
    def wrap(
        cls,
        linear: nn.Linear,
        weight_quantizer: Quantizer | None,
        input_quantizer: Quantizer | None,
        *,
        cache_weights: bool = False,
    ) -> "QuantLinear":
        """A quantized layer around the Parameters of `linear`; None leaves an operand as it is."""
        layer = adopt(cls, linear)
        layer.weight_quantizer = weight_quantizer
        layer.input_quantizer = input_quantizer
        layer.cache_weights = cache_weights
        layer._cached = None
        return layer

    def quantized_weight(self) -> Tensor:
        """The weight that the product sees; (out_features, in_features), dtype of the weight."""
        if self.weight_quantizer is None:
            return self.weight
        if not self.cache_weights or (torch.is_grad_enabled() and self.weight.requires_grad):
            return self.weight_quantizer(self.weight)
        key = (self.weight.data_ptr(), self.weight._version)
        if self._cached is None or self._cached[:2] != key:
            # A tensor made in inference mode could not serve a later pass with gradients.
            with torch.inference_mode(False), torch.no_grad():
                self._cached = (*key, self.weight_quantizer(self.weight.detach()))
        return self._cached[2]

    def forward(self, x: Tensor) -> Tensor:
        if self.input_quantizer is not None:
            x = self.input_quantizer(x)
        return F.linear(x, self.quantized_weight(), self.bias)

    def extra_repr(self) -> str:
        names = [
            f"{operand}={quantizer.block_format if quantizer is not None else 'full'}"
            for operand, quantizer in (
                ("weight", self.weight_quantizer),
                ("input", self.input_quantizer),
            )
        ]
        return ", ".join([super().extra_repr(), *names])


_Linear = TypeVar("_Linear", bound=nn.Linear)


def adopt(cls: type[_Linear], linear: nn.Linear) -> _Linear:
    """An instance of `cls` with the sizes, Parameters, hooks and mode of `linear`; copies nothing."""
    layer = cls.__new__(cls)
    nn.Module.__init__(layer)
    layer.in_features, layer.out_features = linear.in_features, linear.out_features
    layer.weight = linear.weight
    layer.register_parameter("bias", linear.bias)
    for hooks in ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs",
                  "_forward_pre_hooks_with_kwargs"):  # fmt: skip
        setattr(layer, hooks, getattr(linear, hooks))
    layer.training = linear.training
    return layer


def replace_layers(
    model: nn.Module, make: Callable[[str, nn.Linear], nn.Linear | None]
) -> dict[str, nn.Linear]:
    """Replace every linear layer for which `make(name, layer)` gives another; a module that stands
    under several names is replaced once and under all of them.

    Returns:
        name -> the original module, for `put_back`.
    """
    linears = [
        (name, module)
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.Linear)
    ]
    made: dict[int, nn.Linear | None] = {}
    for name, module in linears:
        if id(module) not in made:
            made[id(module)] = make(name, module)
    # Only now, when nothing can fail any more, is the model touched.
    originals = {name: module for name, module in linears if made[id(module)] is not None}
    for name, module in originals.items():
        replacement = made[id(module)]
        assert replacement is not None
        set_module(model, name, replacement)
    return originals


def set_module(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)


def put_back(model: nn.Module, originals: dict[str, nn.Linear]) -> None:
    for name, module in originals.items():
        module.train(model.get_submodule(name).training)
        set_module(model, name, module)


_ORIGINALS = "_dmx_originals"


def is_applied(model: nn.Module) -> bool:
    return _ORIGINALS in model.__dict__


def apply(
    model: nn.Module,
    assignment: Assignment,
    *,
    weights: bool = True,
    inputs: bool = True,
    safety: Safety | None = None,
    cache_weights: bool = False,
) -> nn.Module:
    """Quantize the layers of a model as an assignment says, in place.

    Args:
        weights, inputs: which operands are quantized; at least one.
        safety: guards every quantizer at run time.
        cache_weights: keep quantized weights between forward passes: faster, one more copy.

    Returns:
        The model.

    Raises:
        ModelError: already applied, quantized otherwise, a PEFT model, float64, or neither operand.
        AssignmentError: the assignment is for another model.
    """
    if is_applied(model):
        raise ModelError(
            "an assignment is already applied to this model; call dmx.restore(model) first"
        )
    if not (weights or inputs):
        raise ModelError("weights=False and inputs=False would quantize nothing; set one of them")
    if assignment.transform is not None or assignment.rounding is not None:
        needs = assignment.transform or assignment.rounding
        raise ModelError(
            f"the assignment needs {needs}, which this version cannot apply; "
            "search again without a transform and with nearest rounding"
        )
    check_searchable(model, allow_unsearched=True)
    assignment.check(model)

    def quantizer(name: str, operand: str) -> Quantizer | None:
        of = assignment.block_format if operand == "weight" else assignment.input_format
        block_format = of(name)
        if block_format.element is None:
            return None
        plain: Quantizer = BlockQuantizer(block_format, assignment.scale_rule)
        return plain if safety is None else safety.guard(plain, name, operand)

    def make(name: str, linear: nn.Linear) -> QuantLinear | None:
        if name not in assignment.formats:
            return None
        if linear.weight.dtype not in INPUT_DTYPES:
            raise ModelError(
                f"{name} is {str(linear.weight.dtype).removeprefix('torch.')}; formats are defined "
                "on float32, bfloat16 and float16. Convert the model first: model.float()"
            )
        return QuantLinear.wrap(
            linear,
            quantizer(name, "weight") if weights else None,
            quantizer(name, "input") if inputs else None,
            cache_weights=cache_weights,
        )

    object.__setattr__(model, _ORIGINALS, replace_layers(model, make))
    if hasattr(model, "save_pretrained"):
        # A checkpoint of an applied model would hold the unquantized weights under a name that
        # promises otherwise.
        object.__setattr__(model, "save_pretrained", _refuse_to_save)
    return model


def _refuse_to_save(*args: Any, **kwargs: Any) -> None:
    raise ModelError(
        "this model has an assignment applied: its state dict still holds the full-precision "
        "weights. Call dmx.restore(model) first to save those, or dmx.export to save quantized ones."
    )


def restore(model: nn.Module) -> nn.Module:
    """Put the original layers back; ModelError if no assignment is applied."""
    if not is_applied(model):
        raise ModelError("no assignment is applied to this model; nothing to restore")
    put_back(model, model.__dict__.pop(_ORIGINALS))
    model.__dict__.pop("save_pretrained", None)
    return model


def quantized_layers(model: nn.Module) -> dict[str, QuantLinear]:
    return {n: m for n, m in linear_layers(model).items() if isinstance(m, QuantLinear)}
