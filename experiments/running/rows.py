"""Rows of a record: every one of them is made here, whatever measured it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dmx.assignment.assignment import Assignment
from dmx.assignment.facts import SearchFacts
from dmx.assignment.file import ScaleRules
from dmx.evaluate.perplexity import perplexity_of
from dmx.exporting.loading import FROM_FILES
from dmx.files import finite
from dmx.formats import BLOCK_FORMATS, family_name
from mor.log import read_log
from mor.training import TrainResult

from ..reporting.projections import format_counts
from ..reporting.record import Limit, Method, Row, TaskResult, TrainingRow
from ..reporting.stages import stage_text
from ..reporting.training_logs import fallback_digits, loss_curve

_FULL_BITS = 16.0
_BY_MSE = ("mse", "local_hessian", "learned_scales", "learned_rounding")
"""Stages that give weights the scale rule mse."""


def method_of(
    assignment: Assignment | None, *, quantized: str, net: bool = False, origin: str | None = None
) -> Method:
    """What tables know of an assignment; None = the model as it is.

    Args:
        quantized: W+A | W
        net: whether mor's safety net is around the quantizers.
        origin: what labels call it instead of its search.
    """
    if assignment is None:
        return Method()
    search = assignment.search
    name, formats = search.name, set(assignment.formats.values()) - {"bf16"}
    is_searched = name not in (None, "uniform")
    stage, rules = _stage_of(assignment), assignment.scale_rules
    searched = (assignment.weights or {}).get("scales") == "search"
    if stage in _BY_MSE or searched:  # says the rules of the weights
        rules = {operand: rules[operand] for operand in rules if operand != "weight"}
    family = (search.family,) if isinstance(search.family, str) else search.family or ()
    is_fixed = search.input_format is not None
    separate = search.choices == "separate" or (bool(assignment.unequal) and not is_fixed)
    return Method(
        search=name,
        format=formats.pop() if name == "uniform" and len(formats) == 1 else None,
        kept=search.kept,
        origin=origin,
        polish=bool(search.polish_rounds),
        transform=str((assignment.transform or {}).get("name", "none")),
        weights=stage,
        stage=stage_text(assignment.weights),
        net=net,
        quantized=quantized,
        family=family_name(family) if is_searched and family else None,
        path=", ".join(filter(None, (search.path or "element", search.input_path))),
        units=assignment.units if is_searched else None,
        choices="separate" if separate else "joint",
        input_format=search.input_format,
        scale_rules=scale_rules_text(rules),
    )


def _stage_of(assignment: Assignment) -> str:
    """What became of the weights; mse also where nothing but the scale rules says it."""
    if assignment.weights is not None and assignment.weights["name"] != FROM_FILES:
        return str(assignment.weights["name"])
    formats = assignment.block_formats("weight").values()
    rules = {assignment.rule("weight", f) for f in formats if "mse" in f.rules}
    return "mse" if rules == {"mse"} else "nearest"


def scale_rules_text(rules: ScaleRules) -> str:
    """Scale rules in a few words: the one rule of all formats, or each operand's.

    Args:
        rules: operand -> format -> rule; formats that are not named have their usual one, for which
            `floor` stands here.
    """
    sides = {}
    for operand, stated in rules.items():
        usual = {f: BLOCK_FORMATS[f].usual_rule(operand) for f in stated}
        by_format = {f: "floor" if rule == usual[f] else rule for f, rule in stated.items()}
        unusual = {f: rule for f, rule in sorted(by_format.items()) if rule != "floor"}
        alike = set(by_format.values())
        words = ", ".join(f"{name} {rule}" for name, rule in unusual.items()) or "floor"
        sides[operand] = alike.pop() if len(alike) == 1 else words
    if len(set(sides.values())) <= 1:
        return next(iter(sides.values()), "floor")
    return "; ".join(f"{operand}: {words}" for operand, words in sides.items())


@dataclass(frozen=True)
class Losses:
    """What a model was measured to lose on a text."""

    nll: float
    """nats/token"""
    tokens: int
    windows: int
    seconds: float | None
    by_window: tuple[float, ...] | None = None
    missing: str = ""
    """Why nothing was measured."""

    @classmethod
    def of(cls, window_losses: Tensor, window: int, seconds: float) -> "Losses":
        """From (windows,) nats/token, of `window` tokens each."""
        count = len(window_losses)
        nll, by_window = float(window_losses.mean()), tuple(window_losses.tolist())
        return cls(nll, count * (window - 1), count, seconds, by_window)

    @classmethod
    def none(cls, why: str, seconds: float | None = None) -> "Losses":
        """No text was measured."""
        return cls(math.nan, 0, 0, seconds, None, why)

    def fields(self) -> dict[str, Any]:
        """Of a row, with the reasons for what is missing."""
        nll, perplexity = finite(self.nll), finite(perplexity_of(self.nll))
        why = self.missing or "the loss is not finite"
        reasons = {}
        if nll is None:
            reasons["nll"] = why
        if perplexity is None:
            reasons["perplexity"] = (
                why if nll is None else "exp of the loss is beyond the largest float"
            )
        return {
            "nll": nll, "perplexity": perplexity, "tokens": self.tokens, "windows": self.windows,
            "window_nll": self.by_window if nll is not None else None, "reasons": reasons,
        }  # fmt: skip


@dataclass(frozen=True)
class Tasks:
    """What a model was measured to answer on zero-shot tasks."""

    results: Mapping[str, TaskResult] | None = None
    seconds: float | None = None
    missing: str = "not asked for (eval=zero_shot)"
    """Why nothing was measured."""


def make_row(
    method: Method,
    assignment: Assignment | None,
    losses: Losses,
    *,
    path: str | None = None,
    tasks: Tasks | None = None,
    safety: Mapping[str, Any] | None = None,
) -> Row:
    """A row of one method, measured.

    Args:
        assignment: None = the model as it is.
        path: of the assignment in the run's folder.
        safety: report of the net that was around it.
    """
    tasks = tasks or Tasks()
    search = SearchFacts() if assignment is None else assignment.search
    bits = dict.fromkeys(("element_bits", "bits_per_element", "whole_model_bits_per_element"))
    stated: Any = dict.fromkeys(bits, _FULL_BITS) if assignment is None else assignment.bits
    budget = None if assignment is None else assignment.budget
    measured = losses.fields()
    reasons = measured.pop("reasons")
    if losses.seconds is None:
        reasons["eval_seconds"] = "not timed apart"
    if tasks.results is None:
        reasons["zero_shot"] = reasons["zero_shot_seconds"] = tasks.missing
    if search.seconds is None:
        reasons["search_seconds"] = reasons["search_peak_memory_bytes"] = "no search"
    elif search.peak_memory_bytes is None:
        reasons["search_peak_memory_bytes"] = "measured on GPUs alone"
    return Row(
        method=method,
        budget=None if budget is None else Limit(float(budget["limit"]), str(budget["unit"])),
        seed=search.seed,
        assignment=path,
        **{name: stated.get(name) for name in bits},
        **measured,
        zero_shot=tasks.results,
        search_seconds=search.seconds,
        score_seconds=search.score_seconds,
        search_peak_memory_bytes=search.peak_memory_bytes,
        eval_seconds=losses.seconds,
        zero_shot_seconds=tasks.seconds,
        format_counts=None
        if assignment is None
        else format_counts(assignment.formats, assignment.input_formats),
        transform=None if assignment is None else _facts(assignment.transform),
        weights=None if assignment is None else _facts(assignment.weights),
        safety=safety,
        reasons=reasons,
        expert_tokens=_tokens_of(assignment),
    )


def _tokens_of(assignment: Assignment | None) -> dict[str, tuple[int, ...]] | None:
    counted = None if assignment is None else assignment.expert_tokens
    return None if counted is None else {path: tuple(counts) for path, counts in counted.items()}


def _facts(stage: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if stage is None else dict(stage)


def make_training_row(
    recipe: str,
    seed: int,
    folder: Path,
    model: nn.Module,
    result: TrainResult,
    *,
    window: int,
    statistics: Mapping[str, Any] | None,
    with_digits: bool,
) -> TrainingRow:
    """A row of one recipe and seed, trained.

    Args:
        folder: of its logs.
        window: tokens of a validation window.
        statistics: of mor; None for plain linear layers.
        with_digits: keep where MoR fell back, step by step, from its log.
    """
    measured = Losses.of(result.window_nll, window, 0.0).fields()
    reasons = measured.pop("reasons")
    if statistics is None:
        reasons["fp8_tensor_share"] = "no MoR in this recipe"
    digits = None
    if with_digits:
        header, log = read_log(folder / "mor.jsonl")
        digits = fallback_digits(header["layers"], log)
    mor: Mapping[str, Any] = statistics or {}
    return TrainingRow(
        recipe=recipe,
        seed=seed,
        folder=folder.name,
        parameters=sum(p.numel() for p in model.parameters()),
        steps=result.steps,
        train_tokens=result.tokens,
        train_seconds=result.seconds,
        tokens_per_second=result.tokens / result.seconds if result.seconds else None,
        **measured,
        loss_curve=loss_curve(folder),
        fp8_tensor_share=mor.get("fp8_tensor_share"),
        operands=mor.get("operands"),
        products=mor.get("products"),
        fallback_digits=digits,
        reasons=reasons,
    )
