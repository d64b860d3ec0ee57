"""A peer's answer, checked: formats as an `Assignment`, weights as values of its formats."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from dmx.assignment.assignment import Assignment, make_assignment
from dmx.assignment.budget import Budget
from dmx.assignment.facts import SearchFacts
from dmx.assignment.space import SearchSpace
from dmx.errors import RunError
from dmx.formats import get_block_format
from dmx.models.experts import form_of, linear_experts
from dmx.models.linears import linear_layers
from dmx.numerics import fake_quant

from .protocol import ANSWER, Answer, layer_bits

RULES = ("floor", "even", "rceil", "ceil")
"""In which weights of a peer may be values of their formats."""
SLACK = 1e-6
"""Element bits: two counts of one average differ by the rounding of floats alone."""


def assignment_of(
    answer: Answer, space: SearchSpace, model: nn.Module, limit: float, **facts: Any
) -> Assignment:
    """The formats that a peer chose.

    Args:
        facts: of the search.

    Raises:
        RunError: layers are missing or unknown, have other formats than the candidates, a unit is split, or the
            average is over the limit: what a peer was not asked for is not measured beside the rest.
    """
    layers = {layer for unit in space.units for layer in unit.layers}
    if wrong := sorted(layers ^ set(answer.formats)):
        raise RunError(f"the answer lacks or adds {len(wrong)} layers, first {wrong[0]}")
    try:
        choice = space.choice_of(answer.formats)
    except ValueError as error:
        raise RunError(f"the answer is none of the space: {error}") from error
    average = space.average(choice, "element_bits")
    again = layer_bits(answer.formats, space.own_elements)
    if abs(again - average) > SLACK:
        raise RunError(f"two counts of the bits differ: {average} and {again}")
    if average > limit + SLACK:
        raise RunError(f"the answer has {average:.4f} element_bits, over the budget of {limit:g}")
    search = SearchFacts(
        name="imported",
        family=tuple(f.name for f in space.formats),
        seconds=answer.seconds,
        **facts,
    )
    with linear_experts(model, form_of(model, answer.formats)):
        return make_assignment(space, choice, model, budget=Budget(limit), search=search)


def weight_rule(weights: Mapping[str, Tensor], formats: Mapping[str, str]) -> str:
    """The scale rule under which quantizing these weights (layer -> weight) again changes nothing.

    Raises:
        RunError: there is none: they are no values of their formats.
    """
    worst = {}
    for rule in RULES:
        changed = [n for n, w in weights.items() if not _is_of(w, formats[n], rule)]
        if not changed:
            return rule
        worst[rule] = f"{rule}: {len(changed)}, first {changed[0]}"
    raise RunError(
        f"weights are no values of their formats under any rule; layers that change: {'; '.join(worst.values())}"
    )


def _is_of(weight: Tensor, block_format: str, rule: str) -> bool:
    again = fake_quant(weight.float(), get_block_format(block_format), scale_rule=rule)
    return torch.equal(again, weight.float())


def check_readable(model: nn.Module, layers: Sequence[str], *, biases: bool) -> None:
    """Refuse layers whose finished weights could not be read.

    Args:
        biases: whether the file holds them, or they stay as they are.

    Raises:
        RunError: there are such; names the first.
    """
    linear = linear_layers(model)
    if experts := [name for name in layers if name not in linear]:
        raise RunError(
            f"{len(experts)} layers are experts in one tensor, first {experts[0]}: finished weights are read of linear layers "
            "alone. Ask for formats alone."
        )
    if biased := [name for name in layers if not biases and linear[name].bias is not None]:
        raise RunError(
            f"{len(biased)} layers have a bias, first {biased[0]}: this tool changes biases when it rotates, and they cannot be "
            "read. Ask for its formats alone."
        )


def finished_weights(path: Path, layers: Sequence[str]) -> dict[str, Tensor]:
    """layer -> weight of a peer's file.

    Raises:
        RunError: it cannot be read, or holds other tensors than these layers' weights.
    """
    try:
        held = load_file(str(path))
    except (OSError, SafetensorError) as error:
        raise damaged(path) from error
    if wrong := sorted({f"{n}.weight" for n in layers} ^ set(held)):
        raise RunError(f"{path} lacks or adds {len(wrong)} tensors, first {wrong[0]}")
    return {n: held[f"{n}.weight"] for n in layers}


def damaged(path: Path) -> RunError:
    """The error of a file beside an answer, with the way out."""
    return RunError(
        f"{path} is missing or damaged: delete {ANSWER} beside it, and what a cell answered is made again"
    )


def with_rules(assignment: Assignment, weight: str, inputs: str) -> Assignment:
    """The assignment with one scale rule for weights and one for inputs."""
    return replace(assignment.with_rule("weight", weight).with_rule("input", inputs), weights=None)
