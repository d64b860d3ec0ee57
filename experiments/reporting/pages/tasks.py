"""The page of one record of experiments.evaluate with zero-shot tasks alone."""

from __future__ import annotations

from ..accuracies import accuracy, item_difference, zero_shot_tasks
from ..differences import SIGNIFICANT
from ..groups import Group, group_rows
from ..markdown import markdown
from ..record import Record
from ..texts import points_text


def tasks_page(title: str, record: Record) -> str:
    """Accuracies, each with its difference to the first row, bf16."""
    groups = [g for g in group_rows(record.rows) if any(row.zero_shot for row in g.rows)]
    tasks, first = zero_shot_tasks(groups), groups[0]
    head = ["method", "element_bits"]
    for task in tasks:
        metric = next(a.metric for g in groups if (a := accuracy(g, task)))
        head += [f"{task}, {metric}, %", f"minus {first.label}"]
    body = []
    for group in groups:
        cells = [group.label, f"{group.statistic('element_bits').mean or 0.0:.3f}"]
        for task in tasks:
            share, difference = accuracy(group, task), item_difference(group, first, task)
            error = "" if share is None or share.stderr is None else f" ± {100 * share.stderr:.1f}"
            cells.append("–" if share is None else f"{100 * share.value:.1f}{error}")
            cells.append("–" if group is first else points_text(difference.mean, difference.stderr))
        body.append(cells)
    model, note = record.model, record.model.note or ""
    counts = ", ".join(f"{t} {a.count}" for t in tasks if (a := accuracy(first, t)))
    lines = [
        f"# {title}",
        "",
        _said(groups, tasks),
        "",
        *markdown(head, body),
        "",
        f"- Model: {model.id}, {model.dtype}. {note}".rstrip(),
        f"- Device: {record.device.name}; {record.wall_seconds:.0f} s for all rows; "
        f"torch {record.versions['torch']}; {record.finished[:10]}.",
        f"- Items: {counts}. Differences are paired by item, ± their standard error. Weights and inputs quantized.",
    ]
    return "\n".join(lines) + "\n"


def _said(groups: list[Group], tasks: list[str]) -> str:
    """On how many tasks each row is clearly below the first."""
    first, said = groups[0], []
    for group in groups[1:]:
        differences = [item_difference(group, first, task) for task in tasks]
        below = sum(d.is_clear and (d.mean or 0.0) < 0 for d in differences)
        said.append(f"{group.label} in {below}")
    errors = f"{SIGNIFICANT:g} standard error"
    return f"Of {len(tasks)} tasks, accuracy is below {first.label} by more than {errors}: {', '.join(said)}."
