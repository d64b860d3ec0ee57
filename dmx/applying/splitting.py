"""An assignment whose experts are named one by one, with its stored weights."""

from collections.abc import Mapping

from torch import nn

from dmx.applying.stored import StoredWeight, sample_of, stored_weights, to_bytes
from dmx.assignment.assignment import Assignment
from dmx.assignment.experts import split_experts
from dmx.models.experts import expert_layers
from dmx.models.linears import linear_layers
from dmx.transforms.stage import Transform, transformed


def split_assignment(assignment: Assignment) -> Assignment:
    """`split_experts`, and the same of the weights that the assignment stores.

    What was rounded cannot be told from the parts: check the whole beforehand (`StoredWeight.check`).

    Raises:
        AssignmentError: the file of the weights is missing or damaged.
    """
    split, stored = split_experts(assignment), stored_weights(assignment)
    if split is assignment or not stored:
        return split
    parts: dict[str, StoredWeight] = {}
    for layer, weight in stored.items():
        count = (assignment.experts or {}).get(layer)
        names = [layer] if count is None else expert_layers(layer, count)
        each = [weight] if count is None else weight.split(len(names))
        parts |= dict(zip(names, each, strict=True))
    assert assignment.weights is not None
    facts = {k: v for k, v in assignment.weights.items() if k not in ("file", "sha256")}
    return split.with_artifact("weights", to_bytes(parts, "split"), facts)


def joined_weights(
    model: nn.Module, assignment: Assignment, parts: Mapping[str, StoredWeight]
) -> dict[str, StoredWeight]:
    """Stored weights of an assignment's layers, from those of the layers that `split_assignment` names.

    Args:
        model: that was rounded, without the assignment applied.
    """
    joined = {layer: weight for layer, weight in parts.items() if layer in assignment.formats}
    with (
        assignment.linear_experts(model),
        transformed(model, Transform.of(assignment), assignment.transformed),
    ):
        linears = linear_layers(model)
        for layer, count in (assignment.experts or {}).items():
            if layer in assignment.quantized:
                each = [parts[name] for name in expert_layers(layer, count)]
                joined[layer] = StoredWeight.join(each, sample_of(linears[layer].weight))
    return {layer: joined[layer] for layer in assignment.formats if layer in joined}
