"""The page of the records of scripts/benchmarks/growth.py: what a search step costs as models and cards grow."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dmx.errors import RunError
from dmx.searching.config import SearchConfig

from ..markdown import markdown
from ..plots.scaling import Point, fitted_against_measured
from ..scaling import (
    Facts,
    Growth,
    Measured,
    OneCard,
    SeveralCards,
    Step,
    fit_one_card,
    fit_several,
    own_step,
    whole_mib,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURE = "scaling.png"
CARDS = (1, 8, 64)
IN_A_HOST = 8
"""Cards between which the measured rate holds."""
NETWORK = 50e9
"""Bytes a second that come over to a card from other hosts: 400 Gbit/s, assumed."""
TOKENS = LENGTH = 1024
"""Of a card in a predicted step: one row."""
ROOM = 0.95
"""Of the card's memory; the rest is the driver's and lies between tensors."""
STEPS = SearchConfig.steps
"""Of a search by default."""
SECONDS_TEXT = {
    "step": ("a step", 1e3, "ms"),
    "layer": ("a decoder layer", 1e6, "us"),
    "product": ("a FLOP of the products", 1e15, "s a PFLOP"),
    "weight": ("an element of the quantized weights", 1e12, "ps"),
    "input": ("an element of the quantized inputs", 1e12, "ps"),
    "attention": ("layer x hidden x token x length", 1e15, "fs"),
    "logit": ("token x vocabulary", 1e12, "ps"),
}
MIB_TEXT = {
    "step": ("a step", 1.0, "MiB"),
    "largest weight": ("an element of the largest weight", 1.0, "bytes"),
    "hidden": ("layer x token x hidden", 1.0, "bytes"),
    "intermediate": ("layer x token x intermediate", 1.0, "bytes"),
    "logit": ("token x vocabulary", 1.0, "bytes"),
}


def read_growth(bodies: Mapping[str, Mapping[str, Any]]) -> tuple[Growth, Growth | None]:
    """The record of one card, and that of several if there is one.

    Raises:
        RunError: a record is damaged; there is none of one card, or two of a number; their cards differ.
    """
    records = {name: Growth.from_dict(body, name) for name, body in bodies.items()}
    by_cards: dict[int, str] = {}
    for name, record in records.items():
        if (first := by_cards.setdefault(record.processes, name)) != name:
            raise RunError(f"{first} and {name} are both of {record.processes} cards: delete one.")
    if 1 not in by_cards or len(records) > 2:
        raise RunError(
            f"records {', '.join(records)} are of {sorted(by_cards)} cards, wanted are one of 1 card and at most one of "
            "several: python -m scripts.benchmarks.growth makes them."
        )
    names = {record.machine["name"] for record in records.values()}
    if len(names) > 1:
        raise RunError(
            f"records {', '.join(records)} are of different cards, {sorted(names)}: measure them on one kind."
        )
    several = [records[name] for n, name in by_cards.items() if n > 1]
    return records[by_cards[1]], several[0] if several else None


@contextmanager
def _of(what: str) -> Iterator[None]:
    """Raise what is wrong with the record, or with the fit, by its name."""
    try:
        yield
    except RunError as error:
        raise RunError(f"{what}: {error}") from error


def scaling_page(bodies: Mapping[str, Mapping[str, Any]]) -> tuple[str, dict[str, Figure]]:
    """The page and its picture.

    Args:
        bodies: records by name.
    """
    alone, together = read_growth(bodies)
    names = {body["processes"]: f"record {name}" for name, body in bodies.items()}
    fit_rows = [r for r in alone.rows if r.is_fitted and r.search_seconds is not None]
    with _of(names[1]):
        one = fit_one_card(fit_rows)
        unseen = left_out(fit_rows)
    several = None
    if together is not None:
        with _of(names[together.processes]):
            several = fit_several(one, together.rows, together.processes)
    points = [_point(r, one.cost(own_step(r, 1), r.weights_mib)) for r in fit_rows] + unseen
    on_several = []
    if together is not None and several is not None:
        n = together.processes
        costs = [
            several.cost(r, r.rows * r.length // n, r.length, n, r.way, several.rate)
            for r in together.rows
        ]
        on_several = [_point(r, cost) for r, cost in zip(together.rows, costs, strict=True)]
    lines = ["# Scaling", "", _said(alone, fit_rows, unseen), "", *_conditions(alone, together)]
    lines += [
        "",
        "## Measured, and by the model",
        "",
        *_measured(alone, together, points, on_several),
    ]
    lines += ["", f"![the model against what was measured]({PICTURE})"]
    lines += ["", "## Sizes that the fit did not see", "", *_unseen(unseen)]
    lines += ["", "## The model", "", *_terms(one, several, together)]
    lines += ["", "## Predicted", "", *_predicted(alone, one, several, together)]
    sizes = {r.model: r.parameters for r in alone.rows}
    shown = sorted([*points, *on_several], key=lambda p: sizes.get(p.model, 0))
    figure = fitted_against_measured(shown)
    return "\n".join(lines) + "\n", {PICTURE: figure}


def left_out(rows: Sequence[Measured]) -> list[Point]:
    """Rows of each size as predicted by a fit to all others."""
    points = []
    for name in dict.fromkeys(r.model for r in sorted(rows, key=lambda r: r.parameters)):
        with _of(f"without {name}"):
            without = fit_one_card([r for r in rows if r.model != name])
        points += [
            _point(r, without.cost(own_step(r, 1), r.weights_mib), is_unseen=True)
            for r in rows
            if r.model == name
        ]
    return points


def _point(row: Measured, cost: tuple[float, float], *, is_unseen: bool = False) -> Point:
    assert row.search_seconds is not None and row.search_mib is not None
    seconds, mib = cost
    return Point(
        row.model, row.way, (row.search_seconds, seconds), (row.search_mib, mib), is_unseen
    )


def _off(pair: tuple[float, float]) -> float:
    """The model's relative error."""
    return pair[1] / pair[0] - 1


def _worst(pairs: Sequence[tuple[float, float]]) -> str:
    return f"{max(abs(_off(pair)) for pair in pairs):.0%}"


def _mean(pairs: Sequence[tuple[float, float]]) -> str:
    return f"{sum(map(_off, pairs)) / len(pairs):+.0%}"


def _said(alone: Growth, rows: Sequence[Measured], unseen: Sequence[Point]) -> str:
    largest = max(rows, key=lambda r: r.parameters)
    own = [p for p in unseen if p.model == largest.model]
    others = [p for p in unseen if p.model != largest.model]
    return (
        f"Seconds and memory of a search step on {alone.machine['name']}, and a model of them by shape, tokens and cards: fitted to "
        f"the smaller sizes alone, it predicts those of {largest.model} within {_worst([p.seconds for p in own])} of the seconds "
        f"and {_worst([p.mib for p in own])} of the memory; any other size left out, within "
        f"{_worst([p.seconds for p in others])} and {_worst([p.mib for p in others])}."
    )


def _conditions(alone: Growth, together: Growth | None) -> list[str]:
    median = "" if alone.steps is None else f", median of {alone.steps} steps"
    lines = [
        f"- Llamas with random bf16 weights, objective=kl{median}: `python -m scripts.benchmarks.growth`. "
        f"{alone.machine['name']}, torch {alone.machine['torch']}, {alone.machine['when']}."
    ]
    if together is not None:
        lines.append(
            f"- {together.processes} of these cards, of one host: whole weights in each, and sharded ones (FSDP2); the batch is "
            f"that of all, seconds and memory those of the card that has most; {together.machine['when']}."
        )
    return [*lines, "- The plain step: forward and backward in bf16 without a search, eager."]


def _number(value: float | None, scale: float, digits: int) -> str:
    return "–" if value is None else f"{value * scale:,.{digits}f}"


def _measured(
    alone: Growth, together: Growth | None, points: Sequence[Point], several: Sequence[Point]
) -> list[str]:
    """A row a measurement; steps without a graph on one card are outside the model."""
    of_alone = iter(p for p in points if not p.is_unseen)
    pairs: list[tuple[int, Measured, Point | None]] = [
        (1, r, next(of_alone) if r.is_fitted and r.search_seconds is not None else None)
        for r in alone.rows
    ]
    if together is not None:
        pairs += [(together.processes, r, p) for r, p in zip(together.rows, several, strict=True)]
    pairs.sort(key=lambda pair: (pair[1].parameters, pair[0]))
    body = []
    for cards, r, p in pairs:
        body.append(
            [
                r.model,
                f"{r.parameters / 1e9:.2f}",
                str(cards),
                r.way,
                f"{r.rows} x {r.length}",
                {True: "yes", False: "no", None: "–"}[r.graph],
                _number(r.plain_seconds, 1e3, 1),
                "out of memory" if r.search_seconds is None else f"{r.search_seconds * 1e3:,.1f}",
                "–" if p is None else f"{p.seconds[1] * 1e3:,.1f} ({_off(p.seconds):+.0%})",
                _number(r.search_mib, 1 / 1024, 1),
                "–" if p is None else f"{p.mib[1] / 1024:,.1f} ({_off(p.mib):+.0%})",
            ]
        )
    head = ("model", "parameters, 10^9", "cards", "weights", "batch", "CUDA graph", "plain, ms")
    return markdown((*head, "step, ms", "by the model", "peak GiB", "by the model"), body)


def _unseen(unseen: Sequence[Point]) -> list[str]:
    body = []
    for name in dict.fromkeys(p.model for p in unseen):
        own = [p for p in unseen if p.model == name]
        seconds, mib = [p.seconds for p in own], [p.mib for p in own]
        body.append([name, len(own), _mean(seconds), _worst(seconds), _mean(mib), _worst(mib)])
    head = (
        "left out",
        "batches",
        "seconds, mean",
        "seconds, worst",
        "memory, mean",
        "memory, worst",
    )
    return [
        "Each size is predicted by a fit to all the others: errors of the prediction.",
        "",
        *markdown(head, body),
    ]


def _terms(one: OneCard, several: SeveralCards | None, together: Growth | None) -> list[str]:
    """What each term costs. A term that costs nothing is one that the others explain."""
    product = one.seconds.costs["product"]
    rate = f": {1e-12 / product:,.0f} TFLOP/s" if product > 0 else ""
    seconds = [
        [text, f"{one.seconds.costs[name] * scale:.3g} {unit}{rate if name == 'product' else ''}"]
        for name, (text, scale, unit) in SECONDS_TEXT.items()
    ]
    mib = [
        [text, f"{one.mib.costs[name] * scale:.3g} {unit}"]
        for name, (text, scale, unit) in MIB_TEXT.items()
    ]
    lines = [
        "Formulas: `experiments/reporting/scaling.py`. Costs are not negative; one of zero is what other terms explain, so that "
        "single costs mean less than their sum.",
        "",
        *markdown(("seconds of", "cost"), seconds),
        "",
        *markdown(("memory of, beside the weights", "cost"), mib),
    ]
    if several is None or together is None:
        return lines
    rate = (
        "hidden behind the step" if math.isinf(several.rate) else f"{several.rate / 1e9:,.0f} GB/s"
    )
    body = [
        [
            "whole weights: a step, beside that of the card's own rows",
            f"{several.meeting * 1e3:.2f} ms",
        ],
        [
            "sharded weights: a layer, at the least, without a CUDA graph",
            f"{several.launch * 1e3:.2f} ms",
        ],
        ["sharded weights: bytes that come over to a card", rate],
        ["sharded weights: blocks that are whole at once", f"{several.blocks:.1f}"],
    ]
    return [*lines, "", *markdown((f"on {together.processes} cards", "cost"), body)]


def _predicted(
    alone: Growth, one: OneCard, several: SeveralCards | None, together: Growth | None
) -> list[str]:
    """A row for each shape, number of cards and way."""
    body = []
    for shape in alone.asked:
        for cards in CARDS if several is not None else CARDS[:1]:
            for way in ("alone",) if cards == 1 else ("whole", "sharded"):
                body.append(_prediction(shape, cards, way, alone.card_mib, one, several))
    head = ("shape", "cards", "weights", "step, s", "tokens/s", f"{STEPS} steps, min", "GiB a card")
    largest = max((r for r in alone.rows if r.is_fitted), key=lambda r: r.parameters)
    lines = [
        f"A step of one row of {LENGTH} tokens a card, of cards with {alone.card_mib / 1024:.0f} GiB, of which {ROOM:.0%} are used.",
        "",
        *markdown((*head, "most tokens a card"), body),
        "",
        f"- Nothing above {largest.parameters / 1e9:.1f} B parameters was measured: larger shapes take the costs of the terms as "
        "they are for smaller ones. Products of larger matrices may run faster, which would make these steps shorter.",
    ]
    if together is None:
        return [*lines, "- Several cards were not measured, so nothing is said of them."]
    return [
        *lines,
        f"- No more than {together.processes} cards were measured. Up to {IN_A_HOST} the rate between them is taken, for more, in hosts of {IN_A_HOST}, "
        f"at most {NETWORK / 1e9:.0f} GB/s a card, which is assumed (400 Gbit/s), and none of the copies as hidden. That cards wait for "
        "the slowest of many is in none of these numbers.",
        "- `search.descent.gradient_checkpointing=true` needs less memory than stands here, and more time; it is not in the model.",
    ]


def _prediction(
    shape: Facts,
    cards: int,
    way: str,
    card_mib: float,
    one: OneCard,
    several: SeveralCards | None,
) -> list[str]:
    def cost(tokens: int) -> tuple[float, float]:
        if several is None:
            return one.cost(Step(shape, tokens, LENGTH), whole_mib(shape))
        rate = several.rate if cards <= IN_A_HOST else min(several.rate, NETWORK)
        return several.cost(shape, tokens, LENGTH, cards, way, rate)

    seconds, mib = cost(TOKENS)
    fixed = cost(0)[1]
    room = ROOM * card_mib
    most = max(0, int((room - fixed) / (mib - fixed) * TOKENS)) if mib > fixed else 0
    head = [shape.model, str(cards), way]
    if mib > room:
        fits = f"{mib / 1024:,.0f}: does not fit"
        return [*head, "–", "–", "–", fits, f"{most:,}" if most else "none"]
    rate = cards * TOKENS / seconds
    times = [f"{seconds:.2f}", f"{rate:,.0f}", f"{STEPS * seconds / 60:,.1f}"]
    return [*head, *times, f"{mib / 1024:,.0f}", f"{most:,}"]
