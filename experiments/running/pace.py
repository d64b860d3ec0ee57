"""How long a search will take on this machine, said in its first seconds; its work in plain steps.

A plain step (`timed_work.py`) is timed in the run itself: before the work, and again between its stages and at the
end. Each stage is counted in the steps timed on both sides of it, so work counted in plain steps hardly depends on the
machine, nor on what else runs there.

The work of a stage follows from its matrix products. With B weights in the searched blocks and H in the
output layer, for as many tokens as the plain step, which has 2 (B + H):

    evaluation                    B + H
    change of one unit in a scan  B / 2 + H       on average: the blocks before the unit are not run again
    step of a search              3 B + 2 H       gradients of the weights, too: an offset's needs them
    fisher, F candidates          (3 + F) B + 2 H
    aumann_shapley, F candidates  NODES (F - 1) (3 B + 2 H)
    judgement of adaptive         JUDGED (B + H)  of a batch held out
    step of learned weights       3 B + 3 H       both models' products of the head, and the gradient's
    what it needs of a new batch  B               the full-precision model up to its head

times what quantizing adds to it (`OVERHEAD`).
"""

import statistics
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from dmx.models.dtype import SLOW_BF16, bf16_slowness
from dmx.searching import search_space
from dmx.searching.adaptive import HELD_SHARE, JUDGED, adaptive_steps
from dmx.searching.config import DESCENDING
from dmx.searching.scan import NODES
from dmx.weights.learned import measured_batches

from ..reporting.texts import seconds_text, work_text
from .bench import EVALUATION, Bench
from .folder import PACE_FILE
from .guard import console
from .plan import SearchPlan
from .timed_work import TimedWork, clock_of, plain_step_times

OVERHEAD = {"evaluation": 0.96, "scan": 1.04, "search": 1.15, "learning": 1.2}
"""Seconds over those of the matrix products, as a share of a plain step's; measured."""


def dtype_advice(model: nn.Module) -> str:
    """What to say of a model in bfloat16 on a processor without products of it; empty elsewhere."""
    parameter = next(model.parameters())
    if parameter.device.type != "cpu" or parameter.dtype != torch.bfloat16:
        return ""
    slower = bf16_slowness()
    if slower < SLOW_BF16:
        return ""
    return (
        f" Products in bfloat16 take {slower:.1f} times those in float32 on this processor: "
        "model.dtype=auto takes float32 here."
    )


@dataclass(frozen=True)
class Stage:
    """A part of a run and its expected work in plain steps."""

    name: str
    steps: float


@dataclass(frozen=True)
class Sizes:
    """What the work of a run follows from."""

    blocks: int
    """Weights of the layers that are searched."""
    output: int
    """Weights of the output layer."""
    units: int
    batches: int
    """Calibration batches."""
    evaluation: float
    """Tokens of one evaluation over those of a calibration batch."""
    training: float = 0.0
    """Tokens of a training batch over those of a calibration batch."""
    learned_batches: int = 0
    held_batches: int = 0
    """That the loss is measured on before and after learning."""


def sizes_of(bench: Bench, plan: SearchPlan) -> Sizes:
    """Of a loaded model and its texts."""
    space = search_space(bench.model, plan.search)
    batches = bench.batches(plan.search.seed)
    head = bench.model.get_output_embeddings()  # type: ignore[operator]
    assert bench.tokens is not None
    training: dict[str, Any] = {}
    if bench.training is not None:
        drawn = bench.training_batches(plan.search.seed)
        learned, held = bench.learn.split(drawn)
        training = {
            "training": drawn[0].numel() / batches[0].numel(),
            "learned_batches": len(learned),
            "held_batches": len(measured_batches(learned, held)),
        }
    return Sizes(
        blocks=sum(rows * columns for rows, columns in space.shapes.values()),
        output=0 if head is None else head.weight.numel(),
        units=len(space.units),
        batches=len(batches),
        evaluation=bench.tokens.numel() / batches[0].numel(),
        **training,
    )


def learning_work(steps: int, sizes: Sizes) -> float:
    """Plain steps of `steps` steps of learned weights, with what is measured before and after."""
    whole = 2 * (sizes.blocks + sizes.output)
    step = (3 * sizes.blocks + 3 * sizes.output) / whole
    new_batch = sizes.blocks / whole
    work = steps * step + min(steps, sizes.learned_batches) * new_batch + 2 * sizes.held_batches
    return OVERHEAD["learning"] * sizes.training * work


def expected_stages(plan: SearchPlan, sizes: Sizes, learning_steps: int) -> list[Stage]:
    """The stages of a search that take time, in the order in which they run.

    Args:
        learning_steps: of each assignment whose weights learn.
    """
    whole, settings = 2 * (sizes.blocks + sizes.output), plan.search
    measured = OVERHEAD["evaluation"] * sizes.evaluation / 2
    candidates = len(settings.format_family.formats)
    scored = min(sizes.batches, settings.score_batches or sizes.batches)
    stages = [Stage(f"{EVALUATION}{name}", measured) for name in plan.measured_alone]
    scanned, own = 0, plan.stages
    fisher = scored * ((3 + candidates) * sizes.blocks + 2 * sizes.output) / whole
    for name in (*plan.opponents, settings.name):
        work = 0.0
        if name in ("kl", "kl_per_bit", "adaptive"):
            wanted = candidates - (name == "kl")
            changes = scored * sizes.units * max(0, wanted - scanned)  # the others are read
            work = OVERHEAD["scan"] * changes * (sizes.blocks / 2 + sizes.output) / whole
            scanned = max(scanned, wanted)
        elif name == "fisher":
            work = fisher
        elif name == "aumann_shapley":
            step = (3 * sizes.blocks + 2 * sizes.output) / whole
            work = scored * NODES * (candidates - 1) * step
        if name in DESCENDING:
            step = (3 * sizes.blocks + 2 * sizes.output) / whole
            steps = settings.steps
            if name == "adaptive":
                steps = adaptive_steps(settings, sizes.batches)
                if steps:
                    work += fisher * ("fisher" not in plan.opponents)  # else its scores are read
                    work += OVERHEAD["evaluation"] * JUDGED * (sizes.batches // HELD_SHARE) / 2
            work += OVERHEAD["search"] * step * steps
        stages += [Stage(name, work)] if work else []
        rows = measured * len(plan.quantized)
        stages.append(Stage(f"{EVALUATION}{name}", rows))
        for weights in (own if name == settings.name else plan.opponent_stages)[1:]:
            if weights == "learned":
                stages.append(Stage(f"weights of {name}", learning_work(learning_steps, sizes)))
            stages.append(Stage(f"{EVALUATION}{name}, {weights}", rows))
    return stages


class Pace:
    """Times plain steps of the rows of this process, says how long the run will take, and at its end how much work it was.

    Where a stage is asked for whose work follows from nothing known beforehand (a polish, a stage of the weights), it
    says so instead of a number.
    """

    def __init__(self, bench: Bench, plan: SearchPlan) -> None:
        self.bench, run = bench, bench.run
        first = bench.batches(plan.search.seed)[0]
        self.tokens = run.processes.own_rows(first).to(run.device)
        sizes, learn = sizes_of(bench, plan), bench.learn
        learning_steps = learn.steps_for(sizes.learned_batches) + learn.block_steps
        self.stages = expected_stages(plan, sizes, learning_steps)
        self.unknown = [
            name for name, asked in (
                ("the polish", plan.search.polish.count > 0),
                ("rounding the weights", plan.weights in ("gptq", "local_hessian")),
                ("selecting inputs", plan.search.transform == "hadamard_selected"),
            ) if asked
        ]  # fmt: skip
        times = plain_step_times(bench.model, self.tokens)
        self.step_seconds = statistics.median(times)
        """Of a plain step before the work of this start."""
        self.work = TimedWork(
            run.path(PACE_FILE),
            run.processes,
            partial(plain_step_times, bench.model, self.tokens, warm=True),
            clock_of(run.device),
            before=times,
            has_rows=run.path("rows").exists(),
        )
        console.print(self.announcement(), highlight=False, soft_wrap=True)
        bench.stage = self.work.stage

    @property
    def expected_steps(self) -> float:
        """Work of the run, in plain steps."""
        return sum(stage.steps for stage in self.stages)

    def announcement(self) -> str:
        """What a user reads before the work begins."""
        rows, length = self.tokens.shape
        done = self.work.steps
        seconds = max(0.0, self.expected_steps - done) * self.step_seconds
        beside = f", and {' and '.join(self.unknown)}, which is not counted" if self.unknown else ""
        left = f" An earlier start did {done:.0f} of them." if done else ""
        if self.work.untimed:
            left += f" What it did of {' and '.join(self.work.untimed)} was not timed."
        return (
            f"about {seconds_text(seconds)} on this machine: a plain step of {rows} x {length} tokens takes "
            f"{self.step_seconds:.2f} s here, and the work is about {self.expected_steps:.0f} of them"
            f"{beside}.{left}{dtype_advice(self.bench.model)}"
        )

    def ended(self) -> dict[str, Any]:
        """Facts for the record; says the work in plain steps."""
        self.work.end()
        seconds, steps = self.work.seconds, self.work.steps
        facts: dict[str, Any] = {
            "plain_step_seconds": seconds / steps if steps else self.step_seconds,
            "plain_step_shape": list(self.tokens.shape),
            "expected_plain_steps": self.expected_steps,
            "expected_stages": {stage.name: stage.steps for stage in self.stages},
            "not_expected": self.unknown,
            "seconds": seconds,
            "plain_steps": None if self.work.untimed else steps,
            "parts": [part.facts() for part in self.work.parts],
        }
        if self.work.untimed:
            facts["plain_steps_reason"] = (
                f"{steps:.0f} plain steps without what an earlier start did of "
                f"{' and '.join(self.work.untimed)}, which was not timed"
            )
        console.print(f"the work took {work_text(facts)}", highlight=False, soft_wrap=True)
        return facts
