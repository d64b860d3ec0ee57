"""Zero-shot accuracies over the rows of a group, and their differences item by item. Numbers only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dmx.evaluate.statistics import paired_difference as mean_difference

from .differences import Difference
from .groups import Group


@dataclass(frozen=True)
class Accuracy:
    """One zero-shot task over the rows of a group; shares of 1."""

    value: float
    stderr: float | None
    """Over items. Seeds see the same items, so averaging over them does not shrink it."""
    metric: str
    count: int
    seeds: int
    source: str


def zero_shot_tasks(groups: Iterable[Group]) -> list[str]:
    """Every task that some row has, in order of first appearance."""
    return list(dict.fromkeys(t for g in groups for row in g.rows for t in row.zero_shot or {}))


def accuracy(group: Group, task: str) -> Accuracy | None:
    """None where no row of the group has the task."""
    results = [row.zero_shot[task] for row in group.rows if task in (row.zero_shot or {})]  # type: ignore[index]
    if not results:
        return None
    errors = [r.stderr for r in results if r.stderr is not None]
    first = results[0]
    return Accuracy(
        float(np.mean([r.value for r in results])),
        float(np.mean(errors)) if errors else None,
        first.metric,
        first.count,
        len(results),
        first.source,
    )


def item_difference(group: Group, reference: Group, task: str) -> Difference:
    """Accuracy of one group minus that of another, paired over the items of a task, shares of 1;
    positive is better. Items are averaged over the rows of a group first."""
    sides = []
    for side in (group, reference):
        results = [(row.zero_shot or {}).get(task) for row in side.rows]
        answered = [r for r in results if r is not None and r.items]
        if len(answered) < len(results):
            reason = f"no items of {task} for {side.title}"
            return Difference(None, None, 0, reference.title, reason)
        sides.append(answered)
    asked = {(r.sha256, r.metric, len(r.items)) for results in sides for r in results}
    if len(asked) > 1:
        return Difference(None, None, 0, reference.title, f"{task}: not the same items")
    means = [np.mean([r.items for r in results], axis=0) for results in sides]
    mean, stderr, count = mean_difference(*means)
    return Difference(mean, stderr, count, reference.title, "", stderr)


def best_other(group: Group, groups: Sequence[Group], task: str) -> Group | None:
    """The most accurate of the other quantized groups on a task."""
    shares = [
        (share.value, other)
        for other in groups
        if other is not group
        and not other.method.is_unquantized
        and (share := accuracy(other, task))
    ]
    return max(shares, key=lambda pair: pair[0])[1] if shares else None
