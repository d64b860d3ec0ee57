"""docs/results/quality_tasks.md: zero-shot accuracies of the `quality_*` records."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from ..accuracies import accuracy, item_difference, zero_shot_tasks
from ..differences import SIGNIFICANT
from ..groups import Group, budget_cell
from ..markdown import markdown
from ..pooling import Tables, by_text, ordered
from ..texts import points_text
from .cells import best_heuristic, by_budget


def tasks_page(tables: Tables) -> str | None:
    """None where no row was measured on tasks."""
    shown = {t: g for t, g in tables.items() if not t.is_validation}
    parts = [(name, lines) for of, name in by_text(shown) if (lines := task_tables(of))]
    if not parts:
        return None
    lines = [
        "# quality: zero-shot tasks",
        "",
        "Appendix of [quality](quality.md), which says how it was measured. "
        + " ".join(filter(None, (_said(of) for of, _ in by_text(shown)))),
    ]
    for name, part in parts:
        lines += ["", f"## {name}", "", *part]
    return "\n".join(lines) + "\n"


def _said(tables: Tables) -> str | None:
    """How often dMX differs from the best heuristic, in the mean over tasks."""
    tasks = zero_shot_tasks(g for groups in tables.values() for g in groups)
    counts: Counter[str] = Counter()
    for groups in tables.values():
        for group in groups:
            ours, best = _with_tasks(group), best_heuristic(group.budget, groups)
            theirs = best and _with_tasks(best)
            if not group.method.is_dmx or ours is None or theirs is None:
                continue
            mean, stderr = mean_difference(ours, theirs, tasks)
            if mean is not None and stderr is not None and mean != 0:
                counts["clear" if abs(mean) > SIGNIFICANT * stderr else "within"] += 1
                counts["better"] += mean > SIGNIFICANT * stderr
    if not counts["clear"] + counts["within"]:
        return None
    total = counts["clear"] + counts["within"]
    return (
        f"In the mean over {len(tasks)} tasks, dMX differs from the best heuristic by no more than one standard error "
        f"in {counts['within']} of {total} cells; it is better in {counts['better']} and worse in "
        f"{counts['clear'] - counts['better']}."
    )


def task_tables(tables: Tables) -> list[str]:
    """Of one model: accuracy of all methods, and dMX against the best heuristic, item by item."""
    measured = {t: [m for g in groups if (m := _with_tasks(g))] for t, groups in tables.items()}
    every = [g for groups in measured.values() for g in groups]
    tasks = zero_shot_tasks(every)
    full = next((g for g in every if g.method.is_unquantized), None)
    accuracies, differences = [], []
    for table, groups in sorted(ordered(measured), key=lambda item: full not in item[1]):
        for group in sorted(groups, key=by_budget):
            where = [
                "–" if group is full else table.setting,
                group.method.short_label,
                budget_cell(group.budget),
                len(group.rows),
            ]
            shares = [accuracy(group, task) for task in tasks]
            known = [a.value for a in shares if a]
            mean = f"{100 * sum(known) / len(known):.1f}" if len(known) == len(tasks) else "–"
            cells = (f"{100 * a.value:.1f}" if a else "–" for a in shares)
            accuracies.append([*where, *cells, mean])
            best = best_heuristic(group.budget, tables[table])
            for other in (best and _with_tasks(best), full) if group.method.is_dmx else ():
                if other is not None:
                    against = other.method.short_label
                    differences.append([*where, against, *_points(group, other, tasks)])
    if not accuracies:
        return []
    metrics = [
        ", ".join([task, *{a.metric: None for g in every if (a := accuracy(g, task))}])
        for task in tasks
    ]
    head = ("setting", "method", "budget", "runs")
    lines = [*markdown((*head, *metrics, "mean"), accuracies), "", "Percent right."]
    if differences:
        lines += [
            "",
            *markdown((*head, "minus", *tasks, "mean"), differences),
            "",
            "Percentage points, paired item by item, ± their standard error; runs are averaged first. "
            "Bold: dMX is better by more than one standard error; italic: worse. The best heuristic is that of perplexity.",
        ]
    return lines


def _with_tasks(group: Group) -> Group | None:
    """The group's rows that were measured on tasks."""
    rows = tuple(row for row in group.rows if row.zero_shot)
    return replace(group, rows=rows) if rows else None


def mean_difference(
    group: Group, reference: Group, tasks: Sequence[str]
) -> tuple[float | None, float | None]:
    """Mean over tasks of the differences of accuracy, and its standard error, shares of 1; None where
    a task has none."""
    differences = [item_difference(group, reference, task) for task in tasks]
    known = [(d.mean, d.stderr) for d in differences if d.mean is not None and d.stderr is not None]
    if len(known) < len(tasks):
        return None, None
    means, errors = zip(*known, strict=True)
    return sum(means) / len(means), math.hypot(*errors) / len(errors)


def _points(group: Group, reference: Group, tasks: Sequence[str]) -> list[str]:
    """Differences by task, and their mean where every task has one."""
    differences = [item_difference(group, reference, task) for task in tasks]
    cells = [_marked(d.mean, d.stderr) for d in differences]
    return [*cells, _marked(*mean_difference(group, reference, tasks))]


def _marked(mean: float | None, stderr: float | None) -> str:
    """Points; bold where dMX is better by more than a standard error, italic where it is worse."""
    text = points_text(mean, stderr)
    if mean is None or stderr is None or abs(mean) <= SIGNIFICANT * stderr:
        return text
    return f"**{text}**" if mean > 0 else f"*{text}*"
