"""Each other tool's method beside ours of the same kind, where most was measured; and what no tool chose, to orient."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from ..markdown import markdown
from ..record import Record, Row
from ..texts import SIDES
from .peers_against import (
    NAMES,
    Comparison,
    compared,
    others_told,
    seconds_of,
    verdict,
    with_blocks,
)
from .peers_results import (
    Result,
    by_place,
    candidates,
    default,
    kind_of,
    measured_of,
    place_text,
    results_of,
)

HEAD = ("your tool", "gives", "its s", "ours", "our s")


@dataclass(frozen=True)
class Beside:
    """Methods of other tools, and ours in their place: of one model, its texts, candidates, budget and number of tokens."""

    first: Result
    rule: str
    rows: Sequence[Mapping[str, Comparison]]
    """Of each method, by what is quantized."""

    @property
    def shown(self) -> list[str]:
        """Of what can be quantized."""
        return [quantized for quantized in SIDES if any(quantized in row for row in self.rows)]

    @property
    def has_blocks(self) -> bool:
        """Whether ours has rotated blocks in a row."""
        return any(c.ours.rotates for row in self.rows for c in row.values())

    @property
    def request(self) -> str:
        """Candidates, budget and tokens."""
        tokens, _ = self.first.tokens
        of = f"candidates {candidates(self.first.family)}, {self.first.limit:g} bits"
        return f"{of}, {tokens:,} calibration tokens"

    def name(self, row: Mapping[str, Comparison]) -> str:
        """Of the method, and its units where they are others."""
        other = next(iter(row.values())).other
        return other.title + f", {other.units} units" * (other.units != self.first.units)


def each_tool(results: Sequence[Result]) -> list[str]:
    """The section; nothing where no method of another tool has an answer of ours beside it."""
    beside = tools_beside(results)
    if beside is None:
        return []
    kinds = [f"{q}: theirs → ours (difference, %)" for q in beside.shown]
    return [
        "",
        "## Each other tool, and ours in its place",
        "",
        f"Where most was measured of other tools: {place_text(beside.first.first)} where no other units stand, {beside.request}; "
        f"scale rule {beside.rule}, under which most was measured; where "
        "several have as much, that of their lowest mean perplexity. Perplexities are means over the seeds that both have; the difference of ours is in % of theirs, "
        "negative where ours is lower, ± its standard error, paired by seed; one seed has none. Ours is what the command does by "
        "default for this kind of answer; beside a tool that rotates, ours has rotated blocks, which are no default. Under W stands what was told W, where there is one; its seconds come second. Seconds of "
        "finished weights are with the fastest search that chose their formats.",
        "",
        *markdown(
            [*HEAD, *(cell for kind in kinds for cell in (kind, "seeds"))],
            (_cells(beside, row) for row in beside.rows),
        ),
    ]


def readme_tools(records: Sequence[Record]) -> list[str]:
    """The same for README, less seeds and what was told, and at how many places the claims hold; nothing where there is none."""
    results = results_of(records)
    beside = tools_beside(results)
    if beside is None:
        return []
    first = beside.first.first
    return [
        *markdown(
            ["other tool", "gives", *(f"{q}: theirs → ours" for q in beside.shown), "seconds"],
            (_short_cells(beside, row) for row in beside.rows),
        ),
        "",
        f"Perplexity of {first.model.id} on {first.data['evaluation'].name}; {beside.request}, {first.device.name}, {beside.first.units} "
        f"units where no other stand, scale rule {beside.rule}; means over the seeds that both have, and how far ours is from theirs in %, ± its standard error. "
        + "Beside the tool that rotates, ours has rotated blocks, which are no default. "
        * beside.has_blocks
        + " ".join(
            [
                "Seconds of finished weights are with the search that chose their formats.",
                *verdict(results)[:1],
            ]
        ),
    ]


def tools_beside(results: Sequence[Result]) -> Beside | None:
    """Of the place, candidates, budget and number of tokens where most was measured of other tools; of methods that are not there,
    those of the same with other units. None where no answer of ours stands beside another's."""
    place, asked = _most_measured(results)
    rule = _best_rule([r for r in asked if not r.is_ours])
    if rule is None:
        return None
    found: dict[str, Mapping[str, Comparison]] = {}
    for units_place, units_asked in ((place, asked), *_in_other_units(results, asked[0])):
        for row in _rows(units_asked, rule, units_place):
            found.setdefault(next(iter(row.values())).other.title, row)
    if not found:
        return None
    return Beside(asked[0], rule, sorted(found.values(), key=_order))


def _in_other_units(
    results: Sequence[Result], like: Result
) -> Iterator[tuple[list[Result], list[Result]]]:
    """Places that differ from that of a result in units alone, and of each the same request."""

    def texts(result: Result) -> tuple[Any, ...]:
        return *measured_of(result.first), result.first.data["calibration"].sha256

    for place in by_place(results):
        if texts(place[0]) == texts(like) and place[0].units != like.units:
            yield place, [r for r in place if r.request[:-1] == like.request[:-1]]


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
                    blocks = with_blocks(comparison, place)
                    rows.setdefault(other.title, {})[quantized] = blocks or comparison
        yield from rows.values()


def _order(row: Mapping[str, Comparison]) -> tuple[int, float]:
    """Formats alone first; of each the best tool first."""
    first = next(iter(row.values()))
    return list(NAMES).index(first.other.gives), first.levels[1]


def _cells(beside: Beside, row: Mapping[str, Comparison]) -> list[Any]:
    of = list(row.values())
    own, theirs = seconds_of(of)
    cells: list[Any] = [
        beside.name(row),
        NAMES[of[0].other.gives],
        "; ".join(theirs.values()),
        "; ".join(dict.fromkeys(c.ours.title for c in of)),
        "; ".join(own.values()),
    ]
    for quantized in beside.shown:
        found = row.get(quantized)
        cells += [_levels(found) + found.note, len(found.seeds)] if found else ["", ""]
    return cells


def _short_cells(beside: Beside, row: Mapping[str, Comparison]) -> list[str]:
    first = next(iter(row.values()))
    own, theirs = seconds_of([first])
    seconds = f"{next(iter(theirs.values()))} → {next(iter(own.values()))}"
    levels = (_levels(row[q]) if q in row else "" for q in beside.shown)
    return [beside.name(row), NAMES[first.other.gives], *levels, seconds]


def _levels(comparison: Comparison) -> str:
    own, theirs = comparison.levels
    return f"{theirs:.2f} → {own:.2f} ({comparison.text})"


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
