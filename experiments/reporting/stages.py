"""What a stage of the weights did otherwise than usual, in a few words: part of what tells results apart
(`Method.stage`).

Settings are named where they differ from their defaults; the text that was learned from, and how much of it a
step saw, where it differs from what most of the records that stand together have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from dmx.weights.config import GptqConfig, LocalHessianConfig
from dmx.weights.learn_config import MOST_STEPS, LearnConfig, batches_text

from .record import Record, Row, TextFacts, TrainingRow

R = TypeVar("R", bound=Row | TrainingRow)
_FULL_INPUTS = "inputs in full precision"
NATURAL_ORDER = "natural order"
"""Of GPTQ's columns, which all had before blocks were ordered by activity."""
LEARNED = {
    "learned": LearnConfig(),
    "learned_scales": LearnConfig(train="scales"),
    "learned_rounding": LearnConfig(train="rounding", block_steps=200, steps=0),
}
"""Stage that learns -> its usual settings."""


def stage_text(facts: Mapping[str, Any] | None) -> str:
    """Settings of a stage of the weights that are not as by default: `950 steps, lr 0.0001`.

    Args:
        facts: what an assignment says of its weights; those that an older version did not say are as usual, but for the
            order of GPTQ, which was the natural one.
    """
    name = None if facts is None else facts.get("name")
    if facts is None or (name not in _ROUNDED and name not in LEARNED):
        return ""
    said = (
        _ROUNDED[str(name)](facts) if name in _ROUNDED else _learned_said(facts, LEARNED[str(name)])
    )
    return ", ".join(text for text, is_unusual in said.items() if is_unusual)


def _learned_said(facts: Mapping[str, Any], usual: LearnConfig) -> dict[str, bool]:
    """Text of each setting -> whether it is to be said."""

    def of(name: str, default: Any) -> Any:
        return facts.get(name, default)

    # Versions that did not say the number of batches took MOST_STEPS whatever text there was, as so many batches do now.
    usual_steps = usual.steps_for(of("batches", MOST_STEPS))
    steps, blocks = of("steps", usual_steps), of("block_steps", usual.block_steps)
    rate, norm = of("lr", usual.peak_rate), of("max_norm", usual.max_norm)
    warmup, masters = of("warmup", usual.warmup), of("masters", usual.masters)
    moments = of("optimizer_state", usual.optimizer_state)
    said = {
        f"{blocks} steps a block": blocks != usual.block_steps,
        f"{steps} steps": steps != usual_steps,
        f"lr {rate:g}": rate != usual.peak_rate,
        f"warm-up {warmup}": warmup != usual.warmup,
        f"norm {norm:g}": norm != usual.max_norm,
        _FULL_INPUTS: not of("inputs", True),
        f"masters {masters}": masters != usual.masters,
        f"moments {moments}": moments != usual.optimizer_state,
    }
    start = [f"{name} {rule}" for name, rule in of("start_rules", {}).items() if rule != "floor"]
    said[f"from scales {' '.join(start)}"] = bool(start)
    if "batches" in facts:
        held = of("held_batches", 0)
        kept = f"{batches_text(held)} kept to measure on" if held else "learned from all batches"
        said[kept] = held != usual.held_of(facts["batches"] + held)
    return said


def _calibrated_said(
    facts: Mapping[str, Any], usual: GptqConfig | LocalHessianConfig
) -> dict[str, bool]:
    batches = facts.get("batches", usual.batches)
    return {
        _FULL_INPUTS: not facts.get("inputs", True),
        "inputs corrected": bool(facts.get("correct_inputs")),
        f"{batches} batches": batches != usual.batches,
    }


def _gptq_said(facts: Mapping[str, Any]) -> dict[str, bool]:
    usual = GptqConfig()
    damping = facts.get("damping", usual.damping)
    return {
        f"damping {damping:g}": damping != usual.damping,
        "scales searched": facts.get("scales") == "search",
        NATURAL_ORDER: facts.get("order", "natural") == "natural",
        **_calibrated_said(facts, usual),
    }


_ROUNDED: dict[str, Callable[[Mapping[str, Any]], dict[str, bool]]] = {
    "gptq": _gptq_said,
    "local_hessian": lambda facts: _calibrated_said(facts, LocalHessianConfig()),
}
"""Stage that rounds on calibration data -> what is to be said of it."""


def as_called_now(row: R) -> R:
    """A row that was kept, called as a new one would be: earlier versions did not say the order of GPTQ that all theirs had,
    nor 600 learning steps, which all took whatever text there was."""
    if not isinstance(row, Row) or row.method.weights not in _ROUNDED.keys() | LEARNED.keys():
        return row
    return replace(row, method=replace(row.method, stage=stage_text(row.weights)))


# --- the text that was learned from ----------------------------------------------------------------


@dataclass(frozen=True)
class Drawn:
    """What was learned from, and how much of it a step saw."""

    name: str
    sha256: str
    tokens: int
    batch_shape: tuple[int, ...]

    @classmethod
    def of(cls, record: Record) -> Drawn | None:
        """Of a record's training text; of its calibration text where it has no other."""
        facts: TextFacts | None = record.data.get("training") or record.data.get("calibration")
        if facts is None or facts.batch_shape is None:
            return None
        return cls(facts.name, facts.sha256, facts.tokens, facts.batch_shape)

    def said(self, usual: Drawn) -> str:
        """What differs from the usual one."""
        parts = []
        if self.batch_shape != usual.batch_shape:
            parts.append(f"{' x '.join(map(str, self.batch_shape))} tokens a step")
        if (self.sha256, self.tokens) != (usual.sha256, usual.tokens):
            # Files have one name whatever they hold.
            name = f"text {self.sha256[:6]}" if self.name == "files" else self.name
            parts.append(f"{self.tokens / 1e6:.3g} M tokens of {name}")
        return ", ".join(parts)


def _reads_training(row: Row) -> bool:
    return row.method.search == "joint" or row.method.weights in LEARNED


def usual_drawn(records: Iterable[Record]) -> Drawn | None:
    """What most records with something that learned learned from; None where nothing did."""
    counts = Counter(
        drawn
        for record in records
        if any(map(_reads_training, record.rows)) and (drawn := Drawn.of(record)) is not None
    )
    return counts.most_common(1)[0][0] if counts else None


def with_stage(row: Row, record: Record, usual: Drawn | None) -> Row:
    """The row whose method says what its stage of the weights, and a joint search, did otherwise than usual.

    Args:
        record: that the row is of.
        usual: `usual_drawn` of the records that it stands together with.
    """
    drawn, method = Drawn.of(record), row.method
    text = "" if drawn is None or usual is None else drawn.said(usual)
    stage = stage_text(row.weights)
    if method.weights in LEARNED:
        stage = ", ".join(filter(None, (stage, text)))
    settings = method.settings
    if method.search == "joint" and text:
        settings = f"{settings} on {text}".strip()
    return replace(row, method=replace(method, stage=stage, settings=settings))
