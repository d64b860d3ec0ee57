"""What an assignment must know of inputs before they are quantized."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import Tensor, nn

from dmx.applying.apply import is_applied
from dmx.assignment.assignment import Assignment
from dmx.data.batches import list_batches
from dmx.errors import ModelError
from dmx.models.linears import plain_model
from dmx.models.memory import MicroBatch
from dmx.models.ranges import input_amax
from dmx.models.searchable import check_held
from dmx.transforms.stage import Transform, transformed


def needs_calibration(assignment: Assignment) -> bool:
    """Whether inputs have a format with one global scale for all tensors that was not measured."""
    formats = assignment.block_formats("input")
    needed = {name for name, f in formats.items() if f.needs_input_amax}
    return bool(needed - set(assignment.input_amax or {}))


def calibrated_layers(assignment: Assignment, *, static: bool = False) -> list[str]:
    """Layers whose inputs have a scale for all tensors: those in nvfp4, and static: those in fp8, too."""
    formats = assignment.block_formats("input")
    return [n for n, f in formats.items() if f.needs_input_amax or (static and not f.is_mx)]


def calibrate_inputs(
    model: nn.Module,
    assignment: Assignment,
    batches: Iterable[Tensor],
    *,
    static: bool = False,
) -> Assignment:
    """The assignment with `input_amax`: the largest magnitudes of the inputs that nvfp4 quantizes.

    They are measured on the full-precision model, under the assignment's transform, on the first 16 batches;
    larger values are clamped in use. A search measures them itself.

    Args:
        model: that the assignment was made for, without it applied; it is left as it was.
        batches: int64 token ids (batch, length), all of one shape, as for `search`.
        static: those of fp8, too, which then have one scale for all tokens instead of one each.

    Returns:
        The same assignment where no input needs it.

    Raises:
        AssignmentError: it is for another model. ModelError: an assignment is applied. DataError: the batches.
    """
    model = plain_model(model)
    if is_applied(model):
        raise ModelError(
            "an assignment is already applied to this model; call dmx.restore(model) first"
        )
    check_held(model)
    assignment.check(model)
    layers = calibrated_layers(assignment, static=static)
    if not layers:
        return assignment
    listed = list_batches(batches, model)
    with assignment.linear_experts(model):
        return with_ranges(model, replace(assignment, input_amax=None), layers, listed)


def with_ranges(
    model: nn.Module,
    assignment: Assignment,
    layers: Iterable[str],
    batches: Sequence[Tensor],
    micro: MicroBatch | None = None,
) -> Assignment:
    """The assignment with `input_amax` of these layers, too, measured under its transform, on the rows of all processes. Those
    that it has stay; the same assignment where it has all.

    Args:
        model: not quantized, experts as the assignment has them.
        batches, micro: as `dmx.models.ranges.input_amax` takes them.
    """
    known = assignment.input_amax or {}
    missing = [name for name in layers if name not in known]
    if not missing:
        return assignment
    with transformed(model, Transform.of(assignment), assignment.transformed):
        seen = input_amax(model, missing, batches, micro)
    return replace(assignment, input_amax={**known, **seen})
