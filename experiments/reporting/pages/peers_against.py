"""Our default search and finished weights against what other tools gave for the same request, and what that says of the best."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from ..markdown import markdown
from ..texts import SIDES
from .peers_results import (
    ROTATED,
    SHOWN,
    UNTOLD,
    Kind,
    Result,
    Time,
    by_place,
    candidates,
    default,
    place_of,
    place_text,
    standard_error,
    told,
    typical,
    untold,
)

CLAIMS = {"formats": 1.0, "weights": 5.0}
"""%: by how much ours is to be below the best other tool; finished weights in less time, too."""
NAMES = {"formats": "formats alone", "weights": "finished weights"}
UNCOUNTED = ("brevitas", "dmx")
"""Peer and method that no claim is held against: formats of the published dMX without its rotations, which its authors
do not leave out."""


@dataclass(frozen=True)
class Comparison:
    """Ours against another tool under one rule, over the seeds that both have."""

    ours: Result
    other: Result
    kind: Kind
    seeds: tuple[int, ...]
    levels: tuple[float, float]
    """Mean perplexity of ours and of the other."""
    error: float | None
    """Standard error of `change`, paired by seed; None of one seed."""
    times: tuple[Sequence[Time], Sequence[Time]]
    """Ours and the other's, by seed, with those of choosing the formats."""

    @property
    def change(self) -> float:
        """Mean perplexity of ours minus the other's, % of the other's."""
        own, theirs = self.levels
        return 100 * (own - theirs) / theirs

    @property
    def is_below(self) -> bool:
        """By as much as is claimed."""
        return self.change <= -CLAIMS[self.ours.gives]

    @property
    def is_faster(self) -> bool:
        """In less time, and not for having run beside fewer others."""
        own, theirs = self.times
        if not theirs:
            return False
        other = typical(theirs)
        fair = [time for time in own if time.least >= other.most]
        return bool(fair) and typical(fair).seconds < other.seconds

    @property
    def is_met(self) -> bool:
        """The claim."""
        return self.is_below and (self.is_faster or self.ours.gives == "formats")

    @property
    def text(self) -> str:
        """For a cell: the change and its error."""
        error = "" if self.error is None else f" ± {self.error:.1f}"
        return f"{self.change:+.1f}{error}"

    @property
    def note(self) -> str:
        """In what the kind that ours was told is another."""
        others = zip(self.ours.told, untold(self.ours, self.kind), strict=True)
        names = [name for name, is_other in others if is_other]
        return f" (told {', '.join(names)})" if names else ""


def compared(
    ours: Result, other: Result, kind: Kind, results: Sequence[Result]
) -> Comparison | None:
    """Over the seeds that both have under the kind; None where there are none.

    Args:
        results: of one place, for the searches that finished weights began with.
    """
    own, theirs = ours.perplexities(kind), other.perplexities(kind)
    seeds = sorted(set(own) & set(theirs))
    if not seeds:
        return None
    level = mean(theirs[s] for s in seeds)
    error = standard_error([own[s] - theirs[s] for s in seeds])
    return Comparison(
        ours=ours,
        other=other,
        kind=kind,
        seeds=tuple(seeds),
        levels=(mean(own[s] for s in seeds), level),
        error=None if error is None else 100 * error / level,
        times=(ours.whole_times(results), other.whole_times(results)),
    )


def others_told(results: Iterable[Result], kind: Kind) -> list[Result]:
    """Of each method of another tool that was measured in the kind, what was told whether inputs are quantized, else the other;
    of several that of most seeds."""
    methods: dict[str, list[Result]] = {}
    for result in results:
        if not result.is_ours and result.perplexities(kind):
            methods.setdefault(result.title, []).append(result)
    return [min(of, key=lambda r: (untold(r, kind)[0], -len(r.seeds))) for of in methods.values()]


def best_compared(ours: Result, kind: Kind, results: Sequence[Result]) -> Comparison | None:
    """With the other tool whose mean, over the seeds that it shares with ours, is lowest; None where there is none.

    Args:
        results: of one place.
    """
    others = others_told((r for r in results if r.request == ours.request), kind)
    found = [c for r in others if (c := compared(ours, r, kind, results)) is not None]
    return min(found, key=lambda c: c.levels[1], default=None)


def requests(results: Sequence[Result]) -> Iterator[list[Result]]:
    """Results by what was asked for, of one place."""
    by: dict[tuple[Any, ...], list[Result]] = {}
    for result in results:
        by.setdefault(result.request, []).append(result)
    for request in sorted(by):
        yield by[request]


def defaults_compared(results: Sequence[Result]) -> list[Comparison]:
    """Our default against the best other tool, in every place, request and kind where there are both, and it is not
    UNCOUNTED. At W no rule of inputs is in finished weights: they count once, as what was told UNTOLD or is nearest to it."""
    found = []
    for of in by_place(results):
        for asked in requests(of):
            gives, has_w = asked[0].gives, False
            kinds = dict.fromkeys(k for r in asked for k in r.kinds)
            for kind in sorted(kinds, key=lambda k: k[1] != UNTOLD):
                is_w = gives == "weights" and kind[0] == "W"
                ours = None if is_w and has_w else default(asked, gives, kind)
                comparison = None if ours is None else best_compared(ours, kind, of)
                if comparison and comparison.other.asked != UNCOUNTED:
                    found.append(comparison)
                    has_w |= is_w
    return found


def with_blocks(comparison: Comparison, results: Sequence[Result]) -> Comparison | None:
    """The same with our rotated blocks in place of our default, where the other tool rotates; None where it does not, or they
    were not measured so."""
    ours, other, kind = comparison.ours, comparison.other, comparison.kind
    if not other.rotates:
        return None
    place = [r for r in results if place_of(r.first) == place_of(ours.first)]
    blocks = told((r for r in place if r.request == ours.request), ROTATED, kind)
    return None if blocks is None else compared(blocks, other, kind, place)


def verdict(results: Sequence[Result]) -> list[str]:
    """At how many places the claims hold, in a sentence and as a table; nothing where nothing is compared."""
    found = defaults_compared(results)
    if not found:
        return []
    said = []
    for gives, name in NAMES.items():
        if of := [c for c in found if c.ours.gives == gives]:
            met, of_blocks = _met(of, results)
            more = f" ({of_blocks} with rotated blocks where the other tool rotates)"
            said.append(
                f"{_claim(gives)} at {met} of {len(of)} places with {name}{more * (of_blocks != met)}"
            )
    return [
        "Perplexity of our default beside that of the best other tool at the same place (candidates, units, budget, calibration "
        f"tokens, what is quantized, scale rule): {', '.join(said)}.",
        "",
        *markdown(
            ["kind of answer", "quantized", "places", "of these on one seed", "claim", "holds at"],
            (
                [
                    NAMES[gives],
                    SIDES[quantized],
                    len(of),
                    sum(len(c.seeds) == 1 for c in of),
                    _claim(gives),
                    _met_text(of, results),
                ]
                for (gives, quantized), of in _by_claim(found).items()
            ),
        ),
        "",
    ]


def _met(comparisons: Sequence[Comparison], results: Sequence[Result]) -> tuple[int, int]:
    """How many claims hold: of our default, and with rotated blocks in its place where the other tool rotates."""
    blocks = [with_blocks(c, results) or c for c in comparisons]
    return sum(c.is_met for c in comparisons), sum(c.is_met for c in blocks)


def _met_text(comparisons: Sequence[Comparison], results: Sequence[Result]) -> str:
    met, of_blocks = _met(comparisons, results)
    return f"{met}" + f" ({of_blocks} with rotated blocks)" * (of_blocks != met)


def _claim(gives: str) -> str:
    more = " and in less time" if gives == "weights" else ""
    return f"at least {CLAIMS[gives]:g} % lower{more}"


def _by_claim(comparisons: Sequence[Comparison]) -> dict[tuple[str, str], list[Comparison]]:
    found: dict[tuple[str, str], list[Comparison]] = {}
    for comparison in comparisons:
        found.setdefault((comparison.ours.gives, comparison.kind[0]), []).append(comparison)
    return found


def against_others(results: Sequence[Result]) -> list[str]:
    """The section; nothing where no request has an answer of ours and of another tool."""
    tables = [line for of in by_place(results) for line in _tables(of)]
    if not tables:
        return []
    return [
        "",
        "## Against the best other tool",
        "",
        "Perplexity of ours minus that of the other tool that is best under the rule, % of the latter's: means over the "
        "seeds that both have, ± the standard error of the difference, paired by seed; one seed has none. Under each rule "
        "stands what was told that rule, and under W+A and W what was told so, of ours and of other tools, where there is one. Seconds are medians over seeds, those of finished weights with the fastest search that chose their formats; ours count as faster only where they "
        "were taken beside as many other runs at least. `amp off`: auto-round computed in float32. Against formats of the published dMX without its rotations no "
        "place is counted above: its authors do not leave them out. Rows with rotated blocks are not our default; a tool that rotates "
        "stands beside both. Finished weights are counted once at W, where no rule is in them.",
        *tables,
        *_where_not(results),
    ]


def _where_not(results: Sequence[Result]) -> list[str]:
    """Where a claim is missed, by candidates, budget and rule."""
    lines: list[str] = []
    missed = [c for c in defaults_compared(results) if not c.is_met]
    for (gives, quantized), found in _by_claim(missed).items():
        places: dict[str, list[str]] = {}
        texts = {place_text(c.ours.first) for c in found}
        machines = {text.rpartition(", ")[0] for text in texts}  # without units
        for c in found:
            place = f"{candidates(c.ours.family)} at {c.ours.limit:g} bits"
            if (gives, quantized) != ("weights", "W"):
                place += f", {c.kind[1]}"
            if len(machines) > 1:
                place += f", {place_text(c.ours.first)}"
            elif len(texts) > 1:
                place += f", {c.ours.units} units"
            slower = ", but not known to be faster" if c.is_below else ""
            reads_met = round(c.change, 1) <= -CLAIMS[gives]
            short = " (just short)" if reads_met and not c.is_below else ""
            blocks = with_blocks(c, results)
            more = "" if blocks is None else f"; with rotated blocks {blocks.change:+.1f} %"
            at = f"{c.change:+.1f} %{short} with {c.ours.tokens[0]:,} tokens{slower}{c.note}{more}"
            places.setdefault(place, []).append(at)
        lines += [
            "",
            f"Where our default is not {CLAIMS[gives]:g} % below, {NAMES[gives]}, {SIDES[quantized]}:",
            "",
            *(f"- {place}: {', '.join(of)}" for place, of in places.items()),
        ]
    return lines


def _tables(results: Sequence[Result]) -> Iterator[str]:
    """Of one place: formats alone, and finished weights; a column for each kind in which something is compared."""
    for gives, name in NAMES.items():
        of = [r for r in results if r.gives == gives]
        kinds = list(dict.fromkeys(k for r in of for k in r.kinds))
        rows = [row for asked in requests(of) for row in _rows(asked, kinds, results)]
        if rows:
            shown = [kind for kind in kinds if any(kind in row for row in rows)]
            head = ["tokens", "candidates", "budget", "ours", "s", "best other tool", "s", "seeds"]
            yield from ("", f"{place_text(of[0].first)}; {name}:", "")
            yield from markdown(
                [*head, *map(", ".join, shown)], (_cells(row, shown) for row in rows)
            )


def _rows(
    asked: Sequence[Result], kinds: Sequence[Kind], results: Sequence[Result]
) -> Iterator[dict[Kind, Comparison]]:
    """Of one request, a row a method of ours: what it comes to in each kind."""
    for method in SHOWN:
        row = {}
        for kind in kinds:
            ours = told(asked, method, kind)
            if ours is not None and (comparison := best_compared(ours, kind, results)) is not None:
                row[kind] = comparison
        if row:
            yield row


def _cells(row: dict[Kind, Comparison], kinds: Sequence[Kind]) -> list[Any]:
    of = list(row.values())
    ours = of[0].ours
    own, theirs = seconds_of(of)
    counts = dict.fromkeys(str(len(c.seeds)) for c in of)
    return [
        f"{ours.tokens[0]:,}",
        candidates(ours.family),
        f"{ours.limit:g}",
        ours.title,
        "; ".join(own.values()),
        "; ".join(theirs),
        "; ".join(theirs.values()),
        "; ".join(counts),
        *(row[kind].text + row[kind].note if kind in row else "" for kind in kinds),
    ]


def seconds_of(comparisons: Sequence[Comparison]) -> tuple[dict[str, str], dict[str, str]]:
    """Label -> seconds, of ours and of other tools."""
    own = {c.ours.label: _seconds(c.times[0]) for c in comparisons}
    return own, {c.other.label: _seconds(c.times[1]) for c in comparisons}


def _seconds(times: Sequence[Time]) -> str:
    return typical(times).text if times else "–"
