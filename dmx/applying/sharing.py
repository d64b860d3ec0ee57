"""Scales that several layers, or all rows of a weight, have in common, as runtimes keep them.

vLLM, SGLang and TensorRT-LLM run the layers of a fused group (q/k/v, gate/up) as one product, with one
global scale for its NVFP4 weights: of several they take the largest, and the other layers' weights are wrong.
ModelOpt's FP8 has one scale for a whole weight, and one for a fused group likewise (`per_tensor`).
An assignment that says `weight_amax` is quantized with the shared scales wherever it is applied, rounded,
learned and exported.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from dmx.applying.apply import is_applied
from dmx.applying.stored import StoredWeight, stored_weights
from dmx.assignment.assignment import Assignment
from dmx.errors import AssignmentError, ModelError
from dmx.models.linears import fused_group, linear_layers
from dmx.models.sharding import whole
from dmx.transforms.stage import Transform, transformed


def sharing_groups(assignment: Assignment, *, per_tensor: bool = False) -> dict[str, list[str]]:
    """fused group -> its layers whose weights have one scale in common: in nvfp4, of groups with several such
    layers; per_tensor: also in fp8, whose rows then have one, of any group."""
    groups: dict[str, list[str]] = {}
    by_row = []
    for layer, block_format in assignment.block_formats("weight").items():
        if block_format.scale.global_bits:
            groups.setdefault(fused_group(layer), []).append(layer)
        elif per_tensor and not block_format.block_size:
            groups.setdefault(fused_group(layer), []).append(layer)
            by_row.append(fused_group(layer))
    return {group: layers for group, layers in groups.items() if len(layers) > 1 or group in by_row}


def shares_scales(assignment: Assignment, *, per_tensor: bool = False) -> bool:
    """Whether the layers of each of the `sharing_groups` have one scale, in the weights as they are stored or
    will be rounded; AssignmentError where the file of the weights is missing or damaged."""
    stored = stored_weights(assignment)
    for layers in sharing_groups(assignment, per_tensor=per_tensor).values():
        if stored:
            scales = {scale for layer in layers for scale in _scales_of(stored[layer])}
            if len(scales) > 1:
                return False
        else:
            stated = [assignment.amax_of_weight(layer) for layer in layers]
            if stated[0] is None or len(set(stated)) > 1:
                return False
    return True


def _scales_of(stored: StoredWeight) -> set[float]:
    """Those of a whole weight: its global one, or those of its rows that are not zero."""
    scales = stored.scales[stored.scales > 0] if stored.inv_global is None else stored.inv_global
    return set(scales.flatten().tolist())


def share_scales(
    model: nn.Module, assignment: Assignment, *, per_tensor: bool = False
) -> Assignment:
    """The assignment with one global scale for the NVFP4 weights of each fused group, in `weight_amax`.

    Args:
        model: that the assignment was made for, without it applied; it is left as it was.
        per_tensor: FP8 weights have one scale instead of one a row, a fused group together.

    Returns:
        The same assignment where nothing is to share, or is shared already.

    Raises:
        AssignmentError: it is for another model, or its weights are stored with scales of their own.
        ModelError: an assignment is applied.
    """
    if shares_scales(assignment, per_tensor=per_tensor):
        return assignment
    groups = sharing_groups(assignment, per_tensor=per_tensor)
    if stored_weights(assignment):
        raise AssignmentError(
            f"the assignment's weights are stored ({(assignment.weights or {}).get('name')}) with scales of their "
            f"own, first of {next(iter(groups))}; others would round them again. Share "
            "the scales before the weights are made: dmx.share_scales(model, assignment), or "
            "search.target=vllm."
        )
    layers = [layer for group in groups.values() for layer in group]
    own = weight_amax(model, assignment, layers)
    shared = {
        layer: max(own[member] for member in group) for group in groups.values() for layer in group
    }
    return replace(assignment, weight_amax={**(assignment.weight_amax or {}), **shared})


def state_scales_of_experts(model: nn.Module, assignment: Assignment) -> Assignment:
    """The assignment with the one global scale of experts that it names as one, in NVFP4, in `weight_amax`: said expert
    by expert, as files are, they then round as together.

    Raises:
        AssignmentError: it is for another model. ModelError: an assignment is applied.
    """
    formats, stated = assignment.block_formats("weight"), assignment.weight_amax or {}
    layers = [
        layer
        for layer in assignment.experts or {}
        if layer in formats and formats[layer].scale.global_bits and layer not in stated
    ]
    if not layers:
        return assignment
    return replace(assignment, weight_amax={**stated, **weight_amax(model, assignment, layers)})


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
    with (
        assignment.linear_experts(model),
        transformed(model, Transform.of(assignment), assignment.transformed),
    ):
        linears = linear_layers(model)
        weights = ((layer, whole(linears[layer].weight)) for layer in layers)
        return {layer: float(torch.where(w.isfinite(), w.abs(), 0).amax()) for layer, w in weights}
