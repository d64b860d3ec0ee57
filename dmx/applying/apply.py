"""An assignment put into a model, and taken out again."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import nn

from dmx.applying.linear import QuantLinear
from dmx.applying.quantizers import BlockQuantizer, Quantizer
from dmx.applying.stored import check_amax, stored_weights
from dmx.assignment.assignment import Assignment
from dmx.errors import ModelError
from dmx.formats import BlockFormat, Operand
from dmx.models import check_searchable
from dmx.models.experts import install_experts
from dmx.models.linears import plain_model
from dmx.models.searchable import check_held
from dmx.models.sharding import is_sharded, whole
from dmx.models.swap import put_back, replace_layers
from dmx.numerics.mx import INPUT_DTYPES
from dmx.transforms.stage import Transform


def block_quantizer(
    assignment: Assignment, layer: str, operand: Operand, block_format: BlockFormat
) -> BlockQuantizer:
    """What quantizes an operand of a layer to its block format, by the assignment's rule.

    Raises:
        AssignmentError: of an input, what calibration must measure of it is missing.
    """
    of = assignment.amax_of_input if operand == "input" else assignment.amax_of_weight
    amax = of(layer)
    return BlockQuantizer(block_format, assignment.rule(operand, block_format), amax)


class Safety(Protocol):
    """A run-time guard around the quantizers of a model, for example `mor.SafetyNet`."""

    def guard(self, quantizer: Quantizer, layer_name: str, operand: str) -> Quantizer:
        """What is called in place of `quantizer` on the weight or the input of a layer."""
        ...


_ORIGINALS = "_dmx_originals"
_UNDO_TRANSFORM = "_dmx_undo_transform"
_UNDO_EXPERTS = "_dmx_undo_experts"


def is_applied(model: nn.Module) -> bool:
    """Whether an assignment is in the model."""
    return _ORIGINALS in plain_model(model).__dict__


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
        cache_weights: keep quantized weights between forward passes: faster, one more copy; not of a sharded model.

    Returns:
        The model.

    Raises:
        ModelError: already applied, quantized otherwise, a PEFT model, sharded, float64, or neither operand.
        AssignmentError: the assignment is for another model, its weights are of another model, or
            inputs are quantized to nvfp4 and their range was not measured.
    """
    wrapped, model = model, plain_model(model)
    if is_applied(model):
        raise ModelError(
            "an assignment is already applied to this model; call dmx.restore(model) first"
        )
    if not (weights or inputs):
        raise ModelError("weights=False and inputs=False would quantize nothing; set one of them")
    check_searchable(model, allow_unsearched=True)
    check_held(model)
    assignment.check(model)
    undo_experts = install_experts(model, assignment.experts_form(model))
    try:
        _apply(model, assignment, weights, inputs, safety, cache_weights)
    except BaseException:
        undo_experts()
        raise
    object.__setattr__(model, _UNDO_EXPERTS, undo_experts)
    if hasattr(model, "save_pretrained"):
        # A checkpoint of an applied model would hold the unquantized weights under a name that
        # promises otherwise.
        object.__setattr__(model, "save_pretrained", _refuse_to_save)
    return wrapped


def _apply(
    model: nn.Module,
    assignment: Assignment,
    weights: bool,
    inputs: bool,
    safety: Safety | None,
    cache_weights: bool,
) -> None:
    """`apply` to a model that was checked and has all layers that the assignment names."""
    transform = Transform.of(assignment)
    stored = stored_weights(assignment) if weights else {}
    if inputs:
        for name in assignment.formats:
            assignment.amax_of_input(name)

    def quantizer(name: str, operand: Operand) -> Quantizer | None:
        block_format = assignment.format_of(operand, name)
        if not isinstance(block_format, BlockFormat):
            return None
        plain: Quantizer = block_quantizer(assignment, name, operand, block_format)
        if operand == "weight":
            plain = stored.get(name, plain)
        return plain if safety is None else safety.guard(plain, name, operand)

    def make(name: str, linear: nn.Linear) -> QuantLinear | None:
        if name not in assignment.formats:
            return None
        if linear.weight.dtype not in INPUT_DTYPES:
            raise ModelError(
                f"{name} is {str(linear.weight.dtype).removeprefix('torch.')}; formats are defined "
                "on float32, bfloat16 and float16. Convert the model first: model.float()"
            )
        if name in stored:
            stored[name].check(linear.weight, name)
        elif weights and (stated := assignment.amax_of_weight(name)) is not None:
            check_amax(whole(linear.weight), stated, name)
        return QuantLinear.wrap(
            linear,
            quantizer(name, "weight") if weights else None,
            quantizer(name, "input") if inputs else None,
            cache_weights=cache_weights and not is_sharded(model),
        )

    undo = transform.install(model, assignment.transformed)
    try:
        originals = replace_layers(model, make)
    except BaseException:
        undo()
        raise
    object.__setattr__(model, _ORIGINALS, originals)
    object.__setattr__(model, _UNDO_TRANSFORM, undo)


def _refuse_to_save(*args: Any, **kwargs: Any) -> None:
    raise ModelError(
        "this model has an assignment applied: its state dict still holds the full-precision "
        "weights. Call dmx.restore(model) first to save those, or dmx.export to save quantized ones."
    )


def restore(model: nn.Module) -> nn.Module:
    """Put the original layers back; ModelError if no assignment is applied."""
    wrapped, model = model, plain_model(model)
    if not is_applied(model):
        raise ModelError("no assignment is applied to this model; nothing to restore")
    put_back(model, model.__dict__.pop(_ORIGINALS))
    model.__dict__.pop(_UNDO_TRANSFORM)()
    model.__dict__.pop(_UNDO_EXPERTS)()
    model.__dict__.pop("save_pretrained", None)
    return wrapped


@contextmanager
def applied(
    model: nn.Module,
    assignment: Assignment | None,
    *,
    inputs: bool = True,
    safety: Safety | None = None,
    cache_weights: bool = False,
) -> Iterator[None]:
    """The model under an assignment inside, its original layers again after, also after an exception.

    Args:
        assignment: None changes nothing. The others, and errors: see `apply`.
    """
    if assignment is None:
        yield
        return
    apply(model, assignment, inputs=inputs, safety=safety, cache_weights=cache_weights)
    try:
        yield
    finally:
        restore(model)
