"""Each other tool's method beside ours of the same kind, where most was measured; and what no tool chose, to orient."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import mean
from typing import Any

from ..markdown import markdown
from ..record import Record, Row
from ..texts import SIDES
from .peers_against import NAMES, Comparison, compared, others_told, seconds_of
from .peers_results import (
    Result,
    by_place,
    candidates,
    default,
    kind_of,
    measured_of,
    place_text,
)

HEAD = ("your tool", "gives", "its s", "ours", "our s")


def each_tool(results: Sequence[Result]) -> list[str]:
    """The section; nothing where no method of another tool has an answer of ours beside it."""
    place, asked = _most_measured(results)
    rule = _best_rule([r for r in asked if not r.is_ours])
    if rule is None:
        return []
    rows = sorted(_rows(asked, rule, place), key=_order)
    if not rows:
        return []
    shown = [quantized for quantized in SIDES if any(quantized in row for row in rows)]
    kinds = [cell for q in shown for cell in (f"{q}: theirs → ours (difference, %)", "seeds")]
    first = asked[0]
    return [
        "",
        "## Each other tool, and ours in its place",
        "",
        f"Where most was measured of other tools: {place_text(first.first)}, candidates {candidates(first.family)}, "
        f"{first.limit:g} bits, {first.tokens[0]:,} calibration tokens; scale rule {rule}, under which most was measured; where "
        "several have as much, that of their lowest mean perplexity. Perplexities are means over the seeds that both have; the difference of ours is in % of theirs, "
        "negative where ours is lower, ± its standard error, paired by seed; one seed has none. Ours is what the command does by "
        "default for this kind of answer. Under W stands what was told W, where there is one; its seconds come second. Seconds of "
        "finished weights are with the fastest search that chose their formats.",
        "",
        *markdown([*HEAD, *kinds], (_cells(row, shown) for row in rows)),
    ]


def _most_measured(results: Sequence[Result]) -> tuple[list[Result], list[Result]]:
    """A place, and of it the candidates, budget and number of tokens that have most records of other tools."""
    found: dict[tuple[Any, ...], tuple[list[Result], list[Result]]] = {}
    for number, place in enumerate(by_place(results)):
        for result in place:
            *asked, _ = result.request  # formats alone and finished weights together
            found.setdefault((number, *asked), (place, []))[1].append(result)
    return max(
        found.values(),
        key=lambda pair: sum(len(r.records) for r in pair[1] if not r.is_ours),
        default=([], []),
    )


def _best_rule(others: Sequence[Result]) -> str | None:
    """The scale rule that most was measured under; of several that of the lowest mean. None where no loss was finite."""
    levels: dict[str, list[float]] = {}
    for result in others:
        for kind in result.kinds:
            if values := result.perplexities(kind).values():
                levels.setdefault(kind[1], []).extend(values)
    return min(levels, key=lambda rule: (-len(levels[rule]), mean(levels[rule])), default=None)


def _rows(
    asked: Sequence[Result], rule: str, place: Sequence[Result]
) -> Iterator[Mapping[str, Comparison]]:
    """Of each method of another tool, by what is quantized."""
    for gives in NAMES:
        of = [r for r in asked if r.gives == gives]
        rows: dict[str, dict[str, Comparison]] = {}
        for quantized in SIDES:
            kind = (quantized, rule)
            if (ours := default(asked, gives, kind)) is None:
                continue
            for other in others_told(of, kind):
                if comparison := compared(ours, other, kind, place):
                    rows.setdefault(other.title, {})[quantized] = comparison
        yield from rows.values()


def _order(row: Mapping[str, Comparison]) -> tuple[int, float]:
    """Formats alone first; of each the best tool first."""
    first = next(iter(row.values()))
    return list(NAMES).index(first.other.gives), first.levels[1]


def _cells(row: Mapping[str, Comparison], shown: Sequence[str]) -> list[Any]:
    of = list(row.values())
    own, theirs = seconds_of(of)
    cells: list[Any] = [
        of[0].other.title,
        NAMES[of[0].other.gives],
        "; ".join(theirs.values()),
        "; ".join(dict.fromkeys(c.ours.title for c in of)),
        "; ".join(own.values()),
    ]
    for quantized in shown:
        found = row.get(quantized)
        cells += [_levels(found), len(found.seeds)] if found else ["", ""]
    return cells


def _levels(comparison: Comparison) -> str:
    own, theirs = comparison.levels
    return f"{theirs:.2f} → {own:.2f} ({comparison.text}){comparison.note}"


def unquantized(results: Sequence[Result], others: Sequence[Record]) -> list[str]:
    """Perplexities of the model in its own dtype and with one candidate everywhere, a line for each model, machine and text;
    nothing where no record measured them of the same."""
    lines: dict[tuple[Any, ...], str] = {}
    for place in by_place(results):
        first, family = place[0].first, {name for r in place for name in r.family}
        key = measured_of(first)
        rows = [
            row
            for record in others
            if "evaluation" in record.data and measured_of(record) == key
            for row in record.rows
            if row.perplexity is not None
        ]
        said = {_plain_name(row, first): row.perplexity for row in rows if _is_plain(row, family)}
        if said:
            lines[key] = (
                f"To orient: perplexity of {first.model.id} on {first.data['evaluation'].name}, {first.device.name}, where no "
                f"formats are chosen: {', '.join(f'{name} {value:.2f}' for name, value in said.items())}."
            )
    return [line for text in lines.values() for line in ("", text)]


def _plain_name(row: Row, record: Record) -> str:
    if row.method.is_unquantized:
        return f"not quantized ({record.model.dtype})"
    return f"{row.method.format} everywhere ({', '.join(kind_of(row))})"


def _is_plain(row: Row, family: set[str]) -> bool:
    """Nothing quantized, or one candidate everywhere with weights to nearest."""
    method = row.method
    if method.transform != "none" or method.weights != "nearest" or method.net:
        return False
    return method.is_unquantized or (method.is_uniform and method.format in family)
