"""The page of the records of scripts/benchmarks/tokens.py: quality of searches by calibration tokens and by seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dmx.searching.adaptive import FEWEST_BATCHES

from ..differences import SIGNIFICANT, paired_difference, reference_of
from ..groups import Group, group_rows
from ..markdown import markdown
from ..plots.tokens import tokens_curves
from ..record import Record
from ..texts import nats_text, spread_text
from .compare import conditions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PREFIX = "tokens_"
"""How the names of these records begin."""
OPPONENTS = ("fisher", "kl_per_bit")
"""What no other search may be worse than, at any number of tokens."""
HEAD = (
    "tokens",
    "search",
    "seeds",
    "perplexity",
    *(f"minus {n}, nats/token" for n in OPPONENTS),
    "search, s",
)


def calibration_tokens(record: Record) -> int:
    """That every search of the record was given."""
    text = record.data["calibration"]
    assert text.batches is not None and text.batch_shape is not None
    return text.batches * math.prod(text.batch_shape)


def searched(record: Record) -> list[Group]:
    """The groups that a search chose."""
    return [
        g
        for g in group_rows(record.rows)
        if g.method.is_searched and g.statistic("perplexity").mean is not None
    ]


def search_seconds(group: Group, groups: Sequence[Group], batches: int) -> float:
    """Of a search; nan where nobody measured it. In older records `adaptive` counts no time for the scans that
    `kl_per_bit` and, where there are batches enough, `fisher` made in the same run: it is added."""
    seconds = group.statistic("search_seconds").mean
    if group.method.search != "adaptive" or seconds is None:
        return math.nan if seconds is None else seconds
    if group.statistic("score_seconds").mean is not None:
        return seconds
    read = ("kl_per_bit", "fisher") if batches >= FEWEST_BATCHES else ("kl_per_bit",)
    scans = [g for g in groups if g.method.search in read and g.budget == group.budget]
    return seconds + sum(search_seconds(g, groups, batches) for g in scans)


def worse_than_opponents(groups: Sequence[Group], group: Group) -> list[str]:
    """Opponents that a group is worse than by more than SIGNIFICANT standard errors, seeds included."""
    found = []
    for name in OPPONENTS:
        reference = reference_of(group, groups, name)
        if isinstance(reference, Group) and reference is not group:
            difference = paired_difference(group, reference)
            if difference.is_clear and (difference.mean or 0.0) > 0:
                found.append(name)
    return found


def tokens_page(records: Mapping[str, Record]) -> tuple[str, dict[str, Figure]]:
    """The page and its pictures, one of each scale rule.

    Args:
        records: by name, `tokens_<rule>_<tokens>`.
    """
    by_rule: dict[str, list[Record]] = {}
    for name, record in sorted(records.items()):
        by_rule.setdefault(name.removeprefix(PREFIX).rsplit("_", 1)[0], []).append(record)
    lines = ["# Tokens", "", _said(list(records.values()))]
    figures = {}
    for rule, of in by_rule.items():
        of.sort(key=calibration_tokens)
        picture = f"{PREFIX}{rule}.png"
        curves: dict[str, list[tuple[float, float, float, float]]] = {}
        rows = []
        for record in of:
            groups, tokens = searched(record), calibration_tokens(record)
            for group in groups:
                perplexity = group.statistic("perplexity")
                seconds = search_seconds(group, groups, record.data["calibration"].batches or 0)
                assert perplexity.mean is not None
                point = (tokens, seconds, perplexity.mean, perplexity.spread or 0.0)
                curves.setdefault(group.method.without("kept").base, []).append(point)
                rows.append(
                    [
                        f"{tokens:,}",
                        group.name,
                        len(group.seeds),
                        spread_text(perplexity),
                        *(_difference(group, groups, name) for name in OPPONENTS),
                        "–" if math.isnan(seconds) else f"{seconds:.1f}",
                    ]
                )
        figures[picture] = tokens_curves(curves)
        lines += ["", f"## Scale rule {rule}", "", *markdown(HEAD, rows)]
        lines += ["", f"![perplexity over calibration tokens and over seconds]({picture})"]
        lines += ["", *conditions(of[-1])]
    return "\n".join(lines) + "\n", figures


def _difference(group: Group, groups: Sequence[Group], name: str) -> str:
    reference = reference_of(group, groups, name)
    if isinstance(reference, str) or reference is group:
        return "–"
    difference = paired_difference(group, reference)
    return "–" if difference.stderr is None else nats_text(difference.mean, difference.noise)


def _said(records: Sequence[Record]) -> str:
    """Where `adaptive` is worse than an opponent; its claim, checked."""
    places, worse = 0, []
    for record in sorted(records, key=calibration_tokens):
        groups = searched(record)
        for group in groups:
            if group.method.search == "adaptive":
                places += 1
                for name in worse_than_opponents(groups, group):
                    worse.append(f"{name} at {calibration_tokens(record):,} tokens")
    among = f"`adaptive` at {places} places of these curves"
    against = " or ".join(OPPONENTS)
    error = f"more than {SIGNIFICANT:g} standard error (over windows and seeds)"
    if not places:
        return f"Quality of searches by calibration tokens, beside {against}."
    if not worse:
        return f"{among}: nowhere worse than {against} by {error}."
    return f"{among}: worse by {error} than {'; '.join(worse)}."
