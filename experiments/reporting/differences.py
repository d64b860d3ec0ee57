"""Paired differences of loss between groups, and which group one is compared with. Numbers only.

    difference = mean over windows of (nll_w - nll_w of the reference)            nats/token
    stderr     = sample standard deviation of that difference / sqrt(windows)

Both are measured on the same windows, so most of the variance over windows cancels in the pair. With
several seeds, each window is averaged over the seeds first, and the seeds' own scatter is added when
it is decided whether a difference is more than noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dmx.evaluate.statistics import paired_difference as mean_difference

from .groups import Group
from .record import HEURISTICS, Method

SIGNIFICANT = 1.0
"""A difference counts when it exceeds this many paired standard errors; below, it is a tie. The
standard error stands beside every difference, so that a stricter reader can ask for more."""


@dataclass(frozen=True)
class Difference:
    """nll of one group minus nll of its reference, in nats/token; negative is better. For
    `item_difference`: shares of 1 over items, positive is better."""

    mean: float | None
    stderr: float | None
    """Paired, over windows; None for a single window."""
    windows: int
    reference: str
    reason: str
    noise: float | None = None
    """stderr with the scatter over seeds added; what a claim is tested against."""

    @property
    def is_clear(self) -> bool:
        """More than `SIGNIFICANT` standard errors from zero."""
        known = self.mean is not None and self.noise is not None
        return known and abs(self.mean or 0.0) > SIGNIFICANT * (self.noise or 0.0)


def paired_difference(group: Group, reference: Group) -> Difference:
    """Paired difference of nll over windows (module docstring)."""
    ours, theirs = group.window_nll(), reference.window_nll()
    if ours is None or theirs is None:
        lacking = group if ours is None else reference
        reason = f"no common window_nll for {lacking.title}"
        return Difference(None, None, 0, reference.title, reason)
    if len(ours) != len(theirs):
        reason = f"measured on {len(ours)} and {len(theirs)} windows"
        return Difference(None, None, 0, reference.title, reason)
    mean, stderr, count = mean_difference(ours.tolist(), theirs.tolist())
    if stderr is None:
        reason = "one window gives no standard error"
        return Difference(mean, None, 1, reference.title, reason)
    noise = math.sqrt(stderr**2 + _seed_variance(group) + _seed_variance(reference))
    return Difference(mean, stderr, count, reference.title, "", noise)


def _seed_variance(group: Group) -> float:
    """Variance of the group's mean nll over its seeds; 0 for one seed, which shows no scatter."""
    nll = group.statistic("nll")
    return nll.spread**2 / nll.count if nll.spread is not None else 0.0


def common(group: Group, reference: Group) -> tuple[Group, Group]:
    """Both on the seeds that both have; as they are where they have none in common."""
    seeds = {r.seed for r in group.rows} & {r.seed for r in reference.rows}
    if not seeds:
        return group, reference
    return group.on_seeds(seeds), reference.on_seeds(seeds)


def is_alike(method: Method, reference: Method) -> bool:
    """Whether two methods are of one kind; a uniform format has no candidates and no units."""
    if method.is_uniform:
        method = replace(method, family=reference.family, units=reference.units)
    return method.kind == reference.kind


def alike_in(group: Group, groups: Sequence[Group], names: Sequence[str]) -> list[Group]:
    """Groups of these searches of the same kind and budget, and not polished; of any budget for a group without one."""
    return [
        g
        for g in groups
        if g.method.search in names
        and not g.method.polish
        and is_alike(group.method, g.method)
        and group.budget in (None, g.budget)
        and g.statistic("perplexity").mean is not None
    ]


def reference_of(group: Group, groups: Sequence[Group], search: str | None = None) -> Group | str:
    """The group of `search` that `group` is compared with, or the reason why there is none.

    Same kind and budget, and not polished; a group without a budget takes those of the only one there is.

    Args:
        search: None: the heuristic of the lowest mean perplexity, of those that were run.
    """
    alike = alike_in(group, groups, HEURISTICS if search is None else (search,))
    if not alike:
        return f"no {search or 'heuristic'} result at the same budget with the same settings and weights"
    if len({g.place for g in alike}) > 1:
        return f"several {search or 'heuristic'} results, none of them at this row's budget"
    return min(alike, key=lambda g: g.statistic("perplexity").mean or 0.0)


def reference_name(groups: Sequence[Group]) -> str:
    """Of the search that `reference_of` finds for these groups; `heuristic` where they differ or there is none."""
    references = [reference_of(group, groups) for group in groups]
    names = {str(g.method.search) for g in references if isinstance(g, Group)}
    return names.pop() if len(names) == 1 else "heuristic"


def difference_to(group: Group, groups: Sequence[Group], search: str | None = None) -> Difference:
    """The paired difference to the group that `reference_of` finds."""
    reference = reference_of(group, groups, search)
    if isinstance(reference, str):
        return Difference(None, None, 0, search or "heuristic", reference)
    if reference is group:
        return Difference(None, None, 0, reference.title, "the reference itself")
    return paired_difference(group, reference)
