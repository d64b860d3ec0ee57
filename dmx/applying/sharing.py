"""Scales that several layers, or all rows of a weight, have in common, as runtimes keep them.

vLLM, SGLang and TensorRT-LLM run the layers of a fused group (q/k/v, gate/up) as one product, with one
global scale for its NVFP4 weights: of several they take the largest, and the other layers' weights are wrong.
An assignment that says `weight_amax` is quantized with the shared scales wherever it is applied, rounded,
learned and exported.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from dmx.applying.apply import is_applied
from dmx.applying.stored import stored_weights
from dmx.assignment.assignment import Assignment
from dmx.errors import AssignmentError, ModelError
from dmx.models.linears import fused_group, linear_layers
from dmx.transforms.stage import Transform, transformed


def sharing_groups(assignment: Assignment) -> dict[str, list[str]]:
    """fused group -> its layers in a format with a global scale, of groups with several such layers."""
    groups: dict[str, list[str]] = {}
    for layer, block_format in assignment.block_formats("weight").items():
        if block_format.scale.global_bits:
            groups.setdefault(fused_group(layer), []).append(layer)
    return {group: layers for group, layers in groups.items() if len(layers) > 1}


def shares_scales(assignment: Assignment) -> bool:
    """Whether the layers of each fused group have one global scale, in the weights as they are stored or will
    be rounded; AssignmentError where the file of the weights is missing or damaged."""
    stored = stored_weights(assignment)
    for layers in sharing_groups(assignment).values():
        if stored:
            scales = [stored[layer].inv_global for layer in layers]
            assert all(scale is not None for scale in scales)
            if len({float(scale) for scale in scales if scale is not None}) > 1:
                return False
        else:
            stated = [assignment.amax_of_weight(layer) for layer in layers]
            if stated[0] is None or len(set(stated)) > 1:
                return False
    return True


def share_scales(model: nn.Module, assignment: Assignment) -> Assignment:
    """The assignment with one global scale for the NVFP4 weights of each fused group, in `weight_amax`.

    Args:
        model: that the assignment was made for, without it applied; it is left as it was.

    Returns:
        The same assignment where nothing is to share, or is shared already.

    Raises:
        AssignmentError: it is for another model, or its weights are stored with scales of their own.
        ModelError: an assignment is applied.
    """
    if shares_scales(assignment):
        return assignment
    groups = sharing_groups(assignment)
    if stored_weights(assignment):
        raise AssignmentError(
            f"the assignment's weights are stored ({(assignment.weights or {}).get('name')}) with a global "
            f"scale for each layer, first of {next(iter(groups))}; another one would round them again. Share "
            "the scales before the weights are made: dmx.share_scales(model, assignment), or "
            "search.target=vllm."
        )
    layers = [layer for group in groups.values() for layer in group]
    own = weight_amax(model, assignment, layers)
    shared = {
        layer: max(own[member] for member in group) for group in groups.values() for layer in group
    }
    return replace(assignment, weight_amax={**(assignment.weight_amax or {}), **shared})


@torch.no_grad()
def weight_amax(model: nn.Module, assignment: Assignment, layers: list[str]) -> Mapping[str, float]:
    """layer -> largest finite magnitude of its weight, under the assignment's transform.

    Raises:
        AssignmentError: it is for another model. ModelError: an assignment is applied.
    """
    if is_applied(model):
        raise ModelError(
            "an assignment is already applied to this model; call dmx.restore(model) first"
        )
    assignment.check(model)
    with transformed(model, Transform.of(assignment), assignment.transformed):
        linears = linear_layers(model)
        weights = {layer: linears[layer].weight.detach() for layer in layers}
        return {
            layer: float(torch.where(w.isfinite(), w.abs(), 0).amax())
            for layer, w in weights.items()
        }
