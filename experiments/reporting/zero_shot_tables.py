"""Tables of zero-shot accuracies, in a report and in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from .accuracies import Accuracy, accuracy, best_other, item_difference, zero_shot_tasks
from .differences import SIGNIFICANT
from .groups import Group, group_rows
from .html import Html, el, scroll_table
from .record import Record
from .tables import plain
from .texts import points_text, with_minus


def zero_shot_table(groups: Sequence[Group]) -> Html | None:
    """Accuracies by task, and below them differences item by item; None where nothing was asked."""
    tasks = zero_shot_tasks(groups)
    if not tasks:
        return None
    heads = (el("th", task, scope="col", cls="num") for task in tasks)
    head = el("tr", el("th", "method", scope="col"), heads)
    body = []
    for group in groups:
        cells = [el("th", group.title, scope="row")]
        for task in tasks:
            share = accuracy(group, task)
            title = _missing(group)
            if share:
                title = f"{share.metric}, {share.count} items, {share.seeds} seed(s)"
            cells.append(el("td", _accuracy_text(share), cls="num", title=title))
        body.append(el("tr", cells))
    sources = dict.fromkeys(
        f"{task}: {share.metric}, {share.count} items, {share.source}"
        for task in tasks
        for group in groups
        if (share := accuracy(group, task))
    )
    return el(
        "div",
        scroll_table(head, body),
        el("p", "Percent right ± standard error over items.", cls="note"),
        el("ul", (el("li", text) for text in sources), cls="note"),
        _item_differences(groups, tasks),
    )


def _missing(group: Group) -> str:
    reasons = dict.fromkeys(r.reason("zero_shot") for r in group.rows if r.zero_shot is None)
    return "; ".join(reasons) or "task not evaluated"


def _accuracy_text(share: Accuracy | None) -> str:
    if share is None:
        return "–"
    error = f" ± {100 * share.stderr:.1f}" if share.stderr is not None else ""
    return f"{100 * share.value:.1f}{error}"


def _item_differences(groups: Sequence[Group], tasks: Sequence[str]) -> Html | None:
    """Each group against bf16 and against the best of the others, paired over items."""
    unquantized = next((g for g in groups if g.method.is_unquantized), None)
    body, any_known = [], False
    for group in groups:
        cells = [el("th", group.title, scope="row")]
        for task in tasks:
            for reference in (unquantized, best_other(group, groups, task)):
                if reference is None or reference is group:
                    cells.append(el("td", "–", cls="num", title="nothing to compare with"))
                    continue
                difference = item_difference(group, reference, task)
                any_known = any_known or difference.mean is not None
                text = with_minus(points_text(difference.mean, difference.stderr))
                against = f"minus {reference.title}, {difference.windows} items"
                shown = el("strong", text) if difference.is_clear else text
                cells.append(el("td", shown, cls="num", title=difference.reason or against))
        body.append(el("tr", cells))
    if not any_known:
        return None
    heads = (
        el("th", task, el("small", to), scope="col", cls="num")
        for task in tasks
        for to in ("minus bf16", "minus the best other")
    )
    head = el("tr", el("th", "method", scope="col"), heads)
    errors = f"{SIGNIFICANT:g} standard error{'s' if SIGNIFICANT != 1 else ''}"
    note = (
        "Differences in percentage points, paired item by item, ± their standard error; those "
        f"beyond {errors} are bold. The best other is the most accurate other quantized row on that "
        "task; it is named when pointed at."
    )
    return el("div", el("h3", "Item by item"), scroll_table(head, body), el("p", note, cls="note"))


def zero_shot_terminal(record: Record) -> Table | None:
    """Zero-shot accuracies for the end of a run, in percent; None where nothing was asked."""
    groups = group_rows(record.rows)
    tasks = zero_shot_tasks(groups)
    if not tasks:
        return None
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("zero-shot, %", overflow="fold")
    for task in tasks:
        metric = next(share.metric for g in groups if (share := accuracy(g, task)))
        table.add_column(f"{task}\n{metric}", justify="right", overflow="fold")
    for group in groups:
        cells = (_accuracy_text(accuracy(group, task)) for task in tasks)
        table.add_row(plain(group.title), *cells)
    return table
