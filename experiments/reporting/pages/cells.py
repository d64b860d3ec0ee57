"""Cells of the quality tables: perplexities, differences, and the best heuristic beside a group."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dmx.formats import Format, get_family

from ..differences import common, paired_difference
from ..groups import Group
from ..record import USUAL_FAMILY, Limit, Method
from ..texts import spread_text


def best_heuristic(budget: Limit | None, groups: Iterable[Group]) -> Group | None:
    """Of a table's bare heuristics at the budget, the one with the lowest mean perplexity."""
    known = [g for g in groups if g.budget == budget and g.method.is_heuristic and not g.method.net]
    return min(known, key=mean_perplexity, default=None)


def mean_perplexity(group: Group) -> float:
    """Over seeds; pooled groups have one."""
    mean = group.statistic("perplexity").mean
    assert mean is not None  # `pooled` leaves rows without it out
    return mean


def percent(group: Group, reference: Group) -> float:
    """Difference of mean perplexities, %, on the seeds that both have."""
    group, reference = common(group, reference)
    return 100 * (mean_perplexity(group) / mean_perplexity(reference) - 1)


def percent_text(group: Group, reference: Group | None) -> str:
    """Difference of mean perplexities, ± the paired standard error over windows with the scatter
    of seeds."""
    if reference is None or reference is group:
        return "–"
    noise = paired_difference(*common(group, reference)).noise
    decimals = 2 if noise is not None and 100 * noise < 0.05 else 1
    share = round(percent(group, reference), decimals) + 0.0  # no -0.0
    text = f"{share:+.{decimals}f}"
    return text if noise is None else f"{text} ± {100 * noise:.{decimals}f}"


def runs_text(group: Group | None, name: str = "") -> str:
    """Mean perplexity, runs in brackets, a name behind."""
    if group is None:
        return "–"
    return f"{mean_perplexity(group):.2f} ({len(group.rows)}) {name}".rstrip()


def perplexity_text(group: Group) -> str:
    """± over seeds, with two decimals also of a weak model."""
    return spread_text(group.statistic("perplexity"), 5 if mean_perplexity(group) >= 100 else 4)


def references(groups: Iterable[Group]) -> str:
    """bf16 and uniform formats in a line."""
    return ", ".join(
        f"{g.method.short_label} {mean_perplexity(g):.2f}"
        for g in groups
        if not g.method.is_searched
    )


def by_budget(group: Group) -> tuple[Any, ...]:
    """Order of a table's rows: by budget, heuristics first."""
    budget = (group.budget.limit, group.budget.unit) if group.budget else (0.0, "")
    return budget, group.method.is_dmx


def verdict(group: Group, reference: Group) -> str:
    """lower | higher by more than one standard error, within it, or the same."""
    difference = paired_difference(*common(group, reference))
    if difference.mean is not None and abs(difference.mean) < 1e-12:  # sums of other orders apart
        return "same"
    if not difference.is_clear:
        return "within"
    return "lower" if (difference.mean or 0.0) < 0 else "higher"


def cheapest_format(method: Method) -> Format:
    """Of the family of a method."""
    return formats_of(method)[0]


def formats_of(method: Method) -> tuple[Format, ...]:
    """The family of a method, which its name or its formats one by one say."""
    family = method.family or USUAL_FAMILY
    return get_family(family.split() if " " in family else family).formats
