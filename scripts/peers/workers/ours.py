"""Our own searches and stages of weights, in a process of their own like every peer's: time and memory are then measured
alike."""

import math
from typing import Any

import torch

from dmx.applying.stored import stored_weights
from dmx.assignment.assignment import Assignment, make_assignment
from dmx.assignment.budget import Budget
from dmx.assignment.rules import ScaleRulesConfig
from dmx.formats import BF16
from dmx.searching import SearchConfig, search, search_space
from dmx.searching.config import DescentConfig, PolishConfig
from dmx.transforms.block import hadamard_block
from dmx.weights.gptq import gptq
from dmx.weights.learn_config import LearnConfig
from dmx.weights.learned import learn_weights

from ..tools import LEARN_INPUTS, RULE
from .common import Cell, main

EXACT: dict[str, Any] = {
    "penalty": "exact",
    "gradient_scale": "elements",
    "lr": 3.0,
    "momentum": 0.9,
    "lr_schedule": "cosine",
}
"""Of configs/search/exact.yaml (a test compares), which adaptive.yaml takes, too."""
STEPS = {"dmx_40": 40, "dmx_80": 80, "exact": 400}
POLISHED = "_polish"
"""End of the name of a search that is polished, in rounds as configs/search/polished.yaml has them."""
ROTATED_LEARNED = "_rotated_learned"
"""End of the name of a search whose weights and inputs are rotated in blocks first, and whose weights learn at the end."""
ROUNDS = 12
ROWS = 8
"""Of a step, at most; all batches have as many."""
BATCHES = 32
"""Of a search, at least, before a batch has more than one row."""


def config_of(cell: Cell) -> SearchConfig:
    """The search that the method names; of a stage of weights the one whose space is that of the request."""
    asked = cell.request
    units = "fused" if any(len(unit) > 1 for unit in asked.units) else "layer"
    shared: dict[str, Any] = {"family": list(asked.formats), "units": units, "seed": asked.seed}
    if (rule := asked.options.get(RULE)) is not None:
        shared["scale_rules"] = ScaleRulesConfig(weight=rule, input=rule)
    if not asked.has_inputs:
        shared["input_format"] = BF16.name
    exact: dict[str, Any] = {"objective": "kl", "descent": DescentConfig(**EXACT)}
    method = "kl_per_bit" if asked.given else asked.method
    if method.endswith(POLISHED):
        method, shared["polish"] = method.removesuffix(POLISHED), PolishConfig(rounds=ROUNDS)
    if method.endswith(ROTATED_LEARNED):
        method, shared["transform"] = method.removesuffix(ROTATED_LEARNED), "hadamard_block"
    if method in STEPS:
        return SearchConfig(name="differentiable", steps=STEPS[method], **exact, **shared)
    if method == "adaptive":
        return SearchConfig(name="adaptive", **exact, **shared)
    return SearchConfig(name=method, **shared)


def batches_of(tokens: torch.Tensor) -> list[torch.Tensor]:
    """Of a search: (rows, length) each, on the CPU, as many rows in one as leave BATCHES of them, ROWS at most."""
    rows = math.gcd(len(tokens), min(ROWS, max(1, len(tokens) // BATCHES)))
    return list(tokens.cpu().split(rows))


def run(cell: Cell) -> None:
    """Answers with formats, with weights of the given ones, or with both."""
    model = cell.model()
    if cell.request.given is not None:
        return weights(cell, model)
    config, budget = config_of(cell), Budget(cell.request.limit)
    batches = batches_of(cell.tokens)
    result = cell.timed(lambda: search(model, batches, budget, config))
    assignment = result.assignment
    if assignment.search is not None and assignment.search.kept is not None:
        cell.notes.append(f"{len(result.history)} steps; kept: {assignment.search.kept}")
    if config.polish.rounds:
        cell.notes.append(f"at most {config.polish.rounds} rounds of polish")
    if config.transform != "none":
        save_rotated_model(cell, model)
        return finish(cell, learn(cell, model, assignment))
    cell.answer(
        dict(assignment.formats),
        ("dmx",),
        peak=cell.peak(),
        said_bits=assignment.bits["element_bits"],
    )
    return None


def weights(cell: Cell, model: Any) -> None:
    """Answers with weights that learned, or that GPTQ rounded, on the same tokens, inputs quantized meanwhile unless they are left alone."""
    asked = cell.request
    assert asked.given is not None
    told = config_of(cell)
    space = search_space(model, told)
    inputs = None if asked.has_inputs else dict.fromkeys(asked.given, BF16.name)
    choice = space.choice_of(asked.given, inputs)
    formats = make_assignment(space, choice, model, scale_rules=told.scale_rules.by_format())
    if asked.method == "gptq":
        batches = batches_of(cell.tokens)
        done = cell.timed(lambda: gptq(model, formats, batches))
    else:
        done = learn(cell, model, formats)
    finish(cell, done)


def learn(cell: Cell, model: Any, assignment: Assignment) -> Assignment:
    """The assignment with weights that learned under its formats, on the given tokens."""
    asked = cell.request
    rows = math.gcd(len(cell.tokens), ROWS)
    batches = list(cell.tokens.cpu().split(rows))
    steps = asked.options.get("learn_steps")
    has_inputs = LEARN_INPUTS not in asked.options
    config = LearnConfig(
        steps=None if steps is None else int(steps), seed=asked.seed, inputs=has_inputs
    )
    done = cell.timed(lambda: learn_weights(model, assignment, batches, config))
    assert done.weights is not None
    cell.notes.append(
        f"{done.weights['steps']} steps of {rows} rows, over the given tokens again and again"
    )
    return done


def finish(cell: Cell, done: Assignment) -> None:
    """Answers with the formats and the weights."""
    peak = cell.peak()
    cell.save_weights(
        {
            name: weight.values(torch.float32)[
                :, : done.shapes[name][1]
            ]  # without what fills blocks
            for name, weight in stored_weights(done).items()
        }
    )
    cell.answer(dict(done.formats), ("dmx",), peak=peak, said_bits=done.bits["element_bits"])


def save_rotated_model(cell: Cell, model: torch.nn.Module) -> None:
    """All but the layers' weights as it is, and the rotation of every layer's input."""
    elsewhere = {f"{name}.weight" for name in cell.layers}
    named = model.named_parameters(remove_duplicate=False)  # a tied head, too
    rest = {name: parameter for name, parameter in named if name not in elsewhere}
    cell.save_rotated(rest, hadamard_block(), cell.layers)


if __name__ == "__main__":
    main(run)
