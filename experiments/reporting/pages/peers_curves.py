"""Quality of the searches of scripts/peers by calibration tokens and by seconds: pictures, and our default held against heuristics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import TYPE_CHECKING, Any

from ..differences import SIGNIFICANT, Difference, paired_difference
from ..markdown import markdown
from ..plots.tokens import Point, tokens_rows
from ..texts import nats_text
from .peers_results import (
    Kind,
    Result,
    by_place,
    candidates,
    default,
    mean_text,
    place_text,
    standard_error,
    told,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FEWEST = 3
"""Numbers of tokens of a line."""
OPPONENTS = ("fisher", "kl_per_bit")
"""Heuristics that our default may not be worse than."""
HEAD = (
    "candidates",
    "budget",
    "tokens",
    "our default",
    "seeds",
    "perplexity",
    *(f"minus {name}, nats/token" for name in OPPONENTS),
    f"worse by more than {SIGNIFICANT:g} standard error",
)


@dataclass(frozen=True)
class Curve:
    """One request but for its tokens, under one kind."""

    kind: Kind
    results: tuple[Result, ...]
    """Formats alone, of one place."""

    @property
    def title(self) -> str:
        """Beside its picture."""
        first = self.results[0]
        return f"{candidates(first.family)} at {first.limit:g} bits"

    def lines(self) -> dict[str, list[Point]]:
        """Label -> points, of methods with numbers of tokens enough. Of a search of ours those stand that were told this
        kind, where they are enough, else those that were told the nearest to it."""
        labels: dict[str, list[Result]] = {}
        for result in self.results:
            if result.perplexities(self.kind):
                labels.setdefault(result.label, []).append(result)
        enough = {k: of for k, of in labels.items() if len({r.tokens[0] for r in of}) >= FEWEST}
        firsts = [of[0] for of in enough.values()]
        return {
            label: [self._point(r) for r in _by_number_of_tokens(of)]
            for label, of in sorted(
                enough.items(), key=lambda pair: (not pair[1][0].is_ours, pair[0])
            )
            if not of[0].is_ours or of[0] is told(firsts, of[0].method, self.kind)
        }

    def _point(self, result: Result) -> Point:
        values = list(result.perplexities(self.kind).values())
        return result.tokens[0], result.time.seconds, mean(values), standard_error(values) or 0.0

    def held(self) -> list[Held]:
        """Our default at each number of tokens."""
        found = []
        for tokens in sorted({r.tokens for r in self.results}):
            of = [r for r in self.results if r.tokens == tokens]
            ours = default(of, "formats", self.kind)
            if ours is not None and ours.perplexities(self.kind):
                against = {
                    r.method: _difference(ours, r, self.kind)
                    for r in of
                    if r.is_ours and r.method in OPPONENTS and r.told == ours.told
                }
                found.append(Held(self, ours, against))
        return found


@dataclass(frozen=True)
class Held:
    """Our default at one number of tokens, against heuristics."""

    curve: Curve
    ours: Result
    against: Mapping[str, Difference | None]

    @property
    def worse(self) -> list[str]:
        """Than which, by more than SIGNIFICANT standard errors."""
        return [n for n, d in self.against.items() if d and d.is_clear and (d.mean or 0.0) > 0]

    @property
    def is_comparable(self) -> bool:
        """Whether there is anything to hold it against."""
        return any(d is not None and d.noise is not None for d in self.against.values())

    @property
    def line(self) -> list[Any]:
        """Of the table."""
        ours, found = self.ours, [self.against.get(name) for name in OPPONENTS]
        values = list(ours.perplexities(self.curve.kind).values())
        return [
            candidates(ours.family),
            f"{ours.limit:g}",
            f"{ours.tokens[0]:,}",
            ours.label,
            len(values),
            mean_text(values),
            *("–" if d is None else nats_text(d.mean, d.noise) for d in found),
            (", ".join(self.worse) or "no") if self.is_comparable else "–",
        ]


def _difference(ours: Result, other: Result, kind: Kind) -> Difference | None:
    """Over the windows, on the seeds that both have; its noise holds the scatter of the seeds, which draw the same tokens for
    both and are paired, too."""
    own, theirs = ours.perplexities(kind), other.perplexities(kind)
    seeds = set(own) & set(theirs)
    groups = (ours.group(kind, seeds), other.group(kind, seeds))
    if groups[0] is None or groups[1] is None:
        return None
    difference = paired_difference(groups[0], groups[1])
    if difference.stderr is None:
        return difference
    scatter = standard_error([math.log(own[s] / theirs[s]) for s in seeds]) or 0.0
    return replace(difference, noise=math.hypot(difference.stderr, scatter))


def _by_number_of_tokens(results: Iterable[Result]) -> list[Result]:
    """One a number of tokens, rising: of several, that whose rows are longest."""
    return list({r.tokens[0]: r for r in sorted(results, key=lambda r: r.tokens)}.values())


def curves_of(results: Iterable[Result]) -> list[Curve]:
    """Of one place, those that have a line."""
    asked: dict[tuple[Any, ...], list[Result]] = {}
    for result in results:
        if result.gives == "formats":
            asked.setdefault((result.family, result.limit), []).append(result)
    kinds = dict.fromkeys(k for of in asked.values() for r in of for k in r.kinds)
    found = [
        Curve(kind, tuple(asked[key]))
        for kind in kinds
        if kind[0] == "W+A"
        for key in sorted(asked)
    ]
    return [curve for curve in found if curve.lines()]


def _beside(curves: Sequence[Curve]) -> list[str]:
    """Beside how many cells the seconds of a picture were taken; nothing where all were taken alone."""
    counts = sorted({r.time.most for curve in curves for r in curve.results})
    if counts == [0]:
        return []
    others = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
    return [f"Seconds were taken beside {others} other cells, which makes them longer.", ""]


def by_tokens(results: Sequence[Result]) -> tuple[str, list[str], dict[str, Figure]]:
    """What the pictures say in a sentence, the section, and the pictures by name; empty where no method has numbers of
    tokens enough."""
    lines, figures, held = [], {}, []
    for number, place in enumerate(by_place(results)):
        curves = curves_of(place)
        for kind in dict.fromkeys(curve.kind for curve in curves):
            of = [curve for curve in curves if curve.kind == kind]
            name = f"peers_{kind[1]}{f'_{number}' if number else ''}.png"
            figures[name] = tokens_rows(
                {curve.title: curve.lines() for curve in of},
                searches={r.label: r.method for r in place if r.is_ours},
                dashed={r.label for r in place if not r.is_ours},
            )
            table = [h for curve in of for h in curve.held()]
            held += table
            lines += ["", f"{place_text(place[0].first)}, {kind[0]}, scale rule {kind[1]}:", ""]
            lines += _beside(of)
            lines += [f"![perplexity over calibration tokens and over seconds]({name})"]
            lines += ["", *markdown(HEAD, (h.line for h in table))] if table else []
    if not figures:
        return "", [], {}
    said = f"By calibration tokens: {', '.join(f'[{n}]({n})' for n in figures)}"
    comparable = [h for h in held if h.is_comparable]
    if comparable:
        worse = sum(bool(h.worse) for h in comparable)
        said += (
            f"; our default is worse than {' or '.join(OPPONENTS)} by more than {SIGNIFICANT:g} standard error at "
            f"{worse} of {len(comparable)} places"
        )
    head = [
        "",
        "## By calibration tokens",
        "",
        f"Perplexity of the formats that searches chose, of methods with at least {FEWEST} numbers of tokens; bars are standard "
        "errors over seeds, which draw rows of one text: the nearer to the whole of it, the more have two seeds in common, and the "
        "less do errors say. Lines of other tools are dashed. Over seconds a point is still one number of tokens, and lines join "
        "those of a search in their order where more tokens never took less time; elsewhere they stand alone. Below, our default "
        "minus the heuristics that were told the same rule: ± a standard error over windows and seeds, paired by both; positive is worse.",
    ]
    return said + ".", head + lines, figures
