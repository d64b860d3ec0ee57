"""Assignments that name the experts of a block as one, said expert by expert, as files hold them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from dmx.assignment.assignment import Assignment
from dmx.errors import AssignmentError
from dmx.models.experts import expert_layers

_T = TypeVar("_T")


def split_experts(assignment: Assignment) -> Assignment:
    """The same choice with a name for each projection of each expert, `...experts.7.gate_proj`.

    Every expert has the formats, the input's range and the weight's largest magnitude of the layer that it was
    part of. Stages that name tensors (`weights`, `transform`) stay as they are said: they are for the caller to split.

    Returns:
        The same assignment where it names no experts as one.

    Raises:
        AssignmentError: a transform that names inputs.
    """
    if not assignment.experts:
        return assignment
    if (name := (assignment.transform or {}).get("name")) in ("hadamard_selected", "learned"):
        raise AssignmentError(
            f"transform {name} names the inputs of experts as one (first {next(iter(assignment.experts))}), and cannot "
            "be said expert by expert, as files and gptq need it. Search again with search.experts=each, or with "
            "search.transform=hadamard_block or none."
        )
    parts = {layer: expert_layers(layer, count) for layer, count in assignment.experts.items()}

    def each(of: Mapping[str, _T]) -> dict[str, _T]:
        return {name: value for layer, value in of.items() for name in parts.get(layer, (layer,))}

    shapes = {
        name: (shape[0] // len(parts[layer]), shape[1]) if layer in parts else shape
        for layer, shape in assignment.shapes.items()
        for name in parts.get(layer, (layer,))
    }
    split = replace(
        assignment,
        formats=each(assignment.formats),
        shapes=shapes,
        input_formats=assignment.input_formats and each(assignment.input_formats),
        input_amax=assignment.input_amax and each(assignment.input_amax),
        weight_amax=assignment.weight_amax and each(assignment.weight_amax),
        unquantized=tuple(each(dict.fromkeys(assignment.unquantized))),
        experts=None,
    )
    if assignment.search.weighting != "elements" or assignment.search.shared_weights:
        return split
    # Files hold a global scale of nvfp4 for each projection of each expert.
    return replace(split, bits={**assignment.bits, **split.average_bits()})
