"""Records of scripts/peers as results: one method's answers to one request, over its seeds. Numbers and cells of tables."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import mean, median, stdev
from typing import Any

from ..groups import Group
from ..record import Record, Row
from ..stages import NATURAL_ORDER

OURS = ("ours", "ours_weights")
"""Peers that are this project."""
DEFAULTS = {
    "cuda": {
        "formats": ("adaptive_polish", "adaptive"),
        "weights": ("adaptive_learned", "kl_per_bit_learned", "adaptive_polish_learned"),
    },
    "cpu": {
        "formats": ("adaptive", "adaptive_polish"),
        "weights": ("adaptive_learned", "kl_per_bit_learned", "adaptive_polish_learned"),
    },
}
"""By the type of device, and what is given: our methods, what the command does by default first (search=adaptive, polished on a
card where weights stay nearest); the first that was run stands for us."""
ROTATED = "adaptive_rotated_learned"
"""Our method that rotates, no default: it is set beside a tool that rotates."""
SHOWN = tuple(
    dict.fromkeys(
        (*(m for of in DEFAULTS.values() for names in of.values() for m in names), ROTATED)
    )
)
"""Our methods that are held against other tools."""
RULE, INPUTS = "rule", "inputs"
"""Options of what a method was told: the scale rule, of ours alone, and that inputs are left alone."""
UNTOLD = "floor"
"""The rule of ours where it is not given."""
_NATURAL = "dmx GPTQ"
"""What records call it that were made before it ordered blocks, which the label has said since."""
_RERUN = 5e-3
"""Relative difference of perplexities between two runs on a card of one request for weights that learn, at most; 0.4 %
was seen (docs/lab-notes/weights.md)."""
MAY_DIFFER = ("peer torch", "peer transformers")
"""Versions that may differ between seeds; the tool's own may not."""

Kind = tuple[str, str]
"""What is quantized, W+A or W, and the scale rule: of the inputs where finished weights have one of their own."""
Place = tuple[Any, ...]
"""What two results must have in common to be set beside each other at all."""


def kind_of(row: Row) -> Kind:
    """Of a row."""
    return str(row.method.quantized), row.method.scale_rules.rpartition("input: ")[2]


def measured_of(record: Record) -> Place:
    """Model, dtype, machine and evaluation text: what perplexities must share."""
    evaluation = record.data["evaluation"]
    return (
        record.model.id,
        record.model.dtype,
        record.device.name,
        evaluation.sha256,
        evaluation.window,
        evaluation.tokens,
    )


def place_of(record: Record) -> Place:
    """What perplexities must share, units, and the calibration text: records of other ones are never mixed."""
    model, dtype, *rest = measured_of(record)
    return (
        model,
        dtype,
        record.requested["units"],
        *rest,
        record.data["calibration"].sha256,
    )


def rows_of(record: Record) -> int:
    """Tokens of a row of the calibration text."""
    return (record.data["calibration"].batch_shape or (1, 0))[-1]


def beside_of(record: Record) -> int:
    """Other cells that ran at the same time, which makes seconds longer; older records do not say."""
    return int(record.actual.get("beside", 0))


@dataclass(frozen=True)
class Time:
    """Seconds, and beside how many other cells they were taken: at least, and at most, where a search and what follows it
    were measured apart."""

    seconds: float
    least: int = 0
    most: int = 0

    def plus(self, other: Time) -> Time:
        """Of one after the other."""
        return Time(
            self.seconds + other.seconds, min(self.least, other.least), max(self.most, other.most)
        )

    @property
    def text(self) -> str:
        """For a cell."""
        beside = f"{self.least} to {self.most}" if self.least != self.most else f"{self.most}"
        return f"{self.seconds:.0f}" + (f" (beside {beside})" if self.most else "")


def label_of(record: Record) -> str:
    """The method, and what it was set to; not what tells machines apart (folders)."""
    numbers = [f"{k}={v}" for k, v in _options(record).items() if str(v).isdigit()]
    notes = ["amp off"] if any("amp off" in note for note in record.actual["notes"]) else []
    return ", ".join([called(record), *numbers, *notes])


def called(record: Record) -> str:
    """The method, as the record calls it."""
    label = str(record.actual["label"])
    if label.partition(", told ")[0] == _NATURAL:
        label = label.replace(_NATURAL, f"{_NATURAL}, {NATURAL_ORDER}")
    return label


def _options(record: Record) -> Mapping[str, Any]:
    found: Mapping[str, Any] = record.requested.get("option") or {}
    return found


@dataclass(frozen=True)
class Result:
    """What one method gave for one request, a record a seed."""

    records: tuple[Record, ...]
    """By seed."""
    more: tuple[Record, ...] = ()
    """Of the same answers, measured otherwise."""

    @property
    def first(self) -> Record:
        """For what all seeds have in common."""
        return self.records[0]

    @property
    def label(self) -> str:
        """As tables and legends have it."""
        return label_of(self.first)

    @property
    def title(self) -> str:
        """The label without what it was told."""
        return re.sub(r", told \w+", "", self.label)

    @property
    def method(self) -> str:
        """Of the peer."""
        return str(self.first.requested["method"])

    @property
    def asked(self) -> tuple[str, str]:
        """Peer and method."""
        return str(self.first.requested["peer"]), self.method

    @property
    def units(self) -> str:
        """That formats were chosen for."""
        return str(self.first.requested["units"])

    @property
    def is_ours(self) -> bool:
        """This project's."""
        return self.first.requested["peer"] in OURS

    @property
    def gives(self) -> str:
        """formats | weights"""
        return str(self.first.actual["gives"])

    @property
    def rotates(self) -> bool:
        """Whether its weights are of a rotated model; older records do not say, and are of none."""
        return bool(self.first.actual.get("rotates", False))

    @property
    def told(self) -> Kind:
        """For what a method chose: what is quantized, and the scale rule, which is of ours alone."""
        options = _options(self.first)
        return "W" if INPUTS in options else "W+A", str(options.get(RULE, UNTOLD))

    @property
    def is_varied(self) -> bool:
        """Whether it had options of its own besides."""
        return not _options(self.first).keys() <= {RULE, INPUTS}

    @property
    def family(self) -> tuple[str, ...]:
        """Candidates, cheapest first."""
        return tuple(self.first.requested["family"])

    @property
    def limit(self) -> float:
        """element_bits"""
        return float(self.first.requested["limit"])

    @property
    def tokens(self) -> tuple[int, int]:
        """Of calibration, and of a row of it."""
        return int(self.first.requested["tokens"]), rows_of(self.first)

    @property
    def request(self) -> tuple[Any, ...]:
        """What a result of another method must share to be compared: all but the seed."""
        return (*self.tokens, self.family, self.limit, self.gives)

    @property
    def seeds(self) -> list[int]:
        """In order."""
        return [record.requested["seed"] for record in self.records]

    @cached_property
    def _rows(self) -> dict[Kind, dict[int, Row]]:
        found: dict[Kind, dict[int, Row]] = {}
        for record in (*self.records, *self.more):
            for row in record.rows:
                of, seed = found.setdefault(kind_of(row), {}), record.requested["seed"]
                there = of.setdefault(seed, row)
                known, more = there.zero_shot or {}, row.zero_shot or {}
                if new := {task: more[task] for task in more if task not in known}:
                    of[seed] = replace(there, zero_shot={**known, **new})
        return found

    @property
    def kinds(self) -> list[Kind]:
        """That it was measured in."""
        return list(self._rows)

    def perplexities(self, kind: Kind) -> dict[int, float]:
        """seed -> perplexity"""
        rows = self._rows.get(kind, {})
        return {s: row.perplexity for s, row in rows.items() if row.perplexity is not None}

    def accuracies(self, kind: Kind, task: str) -> list[float]:
        """Of each seed, shares of 1."""
        rows = self._rows.get(kind, {}).values()
        return [
            row.zero_shot[task].value for row in rows if row.zero_shot and task in row.zero_shot
        ]

    def tasks(self) -> list[str]:
        """Zero-shot tasks that it was measured on."""
        rows = (row for of in self._rows.values() for row in of.values())
        return list(dict.fromkeys(task for row in rows for task in row.zero_shot or {}))

    def group(self, kind: Kind, seeds: Iterable[int]) -> Group | None:
        """Its rows of these seeds, for differences over windows; None where there are none."""
        wanted = set(seeds)
        rows = tuple(row for seed, row in self._rows.get(kind, {}).items() if seed in wanted)
        return Group(method=rows[0].method, budget=rows[0].budget, rows=rows) if rows else None

    @property
    def bits(self) -> float:
        """element_bits, mean over seeds."""
        return mean(float(record.rows[0].element_bits or math.nan) for record in self.records)

    @property
    def time(self) -> Time:
        """Of the search, or of what makes weights."""
        return typical([_time(record) for record in self.records])

    @property
    def gib(self) -> float:
        """Peak memory, the largest of all seeds."""
        return max(record.actual["peak_memory_bytes"] for record in self.records) / 2**30

    def whole_times(self, results: Sequence[Result]) -> list[Time]:
        """By seed: of the answer, with the fastest search that chose its formats where the method did not; seeds for which
        none is known are left out."""
        if self.first.actual.get("chose_formats", self.gives == "formats"):
            return [_time(record) for record in self.records]
        found = []
        for record in self.records:
            chose = [
                _time(other)
                for result in results
                if result.gives == "formats" and result.tokens == self.tokens
                for other in result.records
                if other.actual["formats"] == record.actual["formats"]
            ]
            if chose:
                found.append(_time(record).plus(min(chose, key=lambda t: t.seconds)))
        return found


def _time(record: Record) -> Time:
    beside = beside_of(record)
    return Time(float(record.actual["seconds"]), beside, beside)


def typical(times: Sequence[Time]) -> Time:
    """The median over seeds, of those that were taken beside the fewest others."""
    fewest = min(time.most for time in times)
    of = [time for time in times if time.most == fewest]
    return Time(median(time.seconds for time in of), min(time.least for time in of), fewest)


def results_of(records: Iterable[Record]) -> list[Result]:
    """Records that differ in seed alone as one. Of several with one seed that of the most rows, of equals the later, and those
    that measured the same answer otherwise, in that order."""
    grouped: dict[tuple[Any, ...], dict[int, list[Record]]] = {}
    for record in records:
        asked = record.requested
        peer = {k: v for k, v in record.versions.items() if k.startswith("peer ")}
        key = (
            place_of(record),
            asked["tokens"],
            rows_of(record),
            tuple(asked["family"]),
            asked["limit"],
            asked["peer"],
            asked["method"],
            tuple(sorted(_options(record).items())),
            tuple(sorted((k, v) for k, v in peer.items() if k not in MAY_DIFFER)),
            label_of(record),
        )
        grouped.setdefault(key, {}).setdefault(asked["seed"], []).append(record)
    found = []
    for of in grouped.values():
        taken, more = [], []
        for seed in sorted(of):
            same: list[Record] = []
            for record in sorted(of[seed], key=lambda r: (len(r.rows), r.finished), reverse=True):
                if all(_is_same_answer(other, record) for other in same):
                    same.append(record)
            taken.append(same[0])
            more += same[1:]
        found.append(Result(tuple(taken), tuple(more)))
    return found


def _is_same_answer(record: Record, other: Record) -> bool:
    """Whether two records measured the same formats, and, where both measured one kind, the same weights, or weights
    that the same steps gave again, whose sums a card adds in another order."""
    own, theirs = (
        {kind_of(row): row.perplexity for row in of.rows if row.perplexity is not None}
        for of in (record, other)
    )
    apart = _RERUN if record.actual["gives"] == "weights" else 0.0
    same = all(
        math.isclose(own[kind], theirs[kind], rel_tol=apart) for kind in own.keys() & theirs.keys()
    )
    return same and record.actual["formats"] == other.actual["formats"]


def by_place(results: Sequence[Result]) -> list[list[Result]]:
    """Those that may stand in one table, in a fixed order."""
    found: dict[Place, list[Result]] = {}
    for result in results:
        found.setdefault(place_of(result.first), []).append(result)
    return [found[place] for place in sorted(found, key=str)]


def told(results: Iterable[Result], method: str, kind: Kind) -> Result | None:
    """The result of a method of ours, as it is by default, that was told this kind; else the nearest to it."""
    of = [r for r in results if r.is_ours and r.method == method and not r.is_varied]
    return min(of, key=lambda r: untold(r, kind), default=None)


def untold(result: Result, kind: Kind) -> tuple[bool, bool]:
    """Whether a method was told another kind: of what is quantized, and of the rule."""
    return result.told[0] != kind[0], result.told[1] != kind[1]


def default(results: Sequence[Result], gives: str, kind: Kind) -> Result | None:
    """What stands for us among results for one request: of DEFAULTS the first that was told the kind, else the nearest."""
    if not results:
        return None
    methods = DEFAULTS[results[0].first.device.type][gives]
    found = [r for m in methods if (r := told(results, m, kind)) is not None and r.gives == gives]
    return min(found, key=lambda r: untold(r, kind), default=None)  # the first of them


# --- cells ----------------------------------------------------------------------------------------


def standard_error(values: Sequence[float]) -> float | None:
    """Of the mean; None of one value."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def mean_text(values: Sequence[float], digits: int = 2) -> str:
    """`mean ± standard error`; of one value that alone, of none nothing."""
    if not values:
        return ""
    error = standard_error(values)
    return f"{mean(values):.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def candidates(family: Iterable[str]) -> str:
    """`4/8`"""
    return "/".join(f.removeprefix("mxfp").partition("_")[0] for f in family)


def place_text(record: Record) -> str:
    """`MODEL, bfloat16 on NVIDIA H200, fused units`"""
    asked = record.requested["units"]
    return f"{record.model.id}, {record.model.dtype} on {record.device.name}, {asked} units"
