"""Tables of a report and of the terminal: results, zero-shot tasks, who can load."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table

from dmx.assignment.targets import TARGETS, obstacles
from experiments.reporting.html import Html, el, scroll_table
from experiments.reporting.reading import Record
from experiments.reporting.results import (
    SEPARATE_NOTE,
    SIGNIFICANT,
    Accuracy,
    Difference,
    Group,
    Statistic,
    accuracy,
    best_other,
    bits_unit,
    by_operands,
    difference_to,
    group_rows,
    item_difference,
    points_text,
    reference_name,
    spread_text,
    zero_shot_tasks,
)

_MAX_REASONED_COLUMNS = 4


@dataclass(frozen=True)
class Column:
    """One column of the results table; `cell` gives the text and the reason when it is missing."""

    head: str
    """{} stands for the search that rows are compared with."""
    unit: str
    cell: Callable[[Group, Sequence[Group]], tuple[str, str]]
    narrow: str | None
    """Head for the terminal, where a hundred columns must hold the table; None leaves it out."""


def _metric(
    name: str, text: Callable[[Statistic], str] = spread_text
) -> Callable[..., tuple[str, str]]:
    def cell(group: Group, groups: Sequence[Group]) -> tuple[str, str]:
        statistic = group.statistic(name)
        return (text(statistic) if statistic.mean is not None else "–"), statistic.reason

    return cell


def _difference_cell(group: Group, groups: Sequence[Group]) -> tuple[str, str]:
    difference = difference_to(group, groups)
    return difference_text(difference), difference.reason


def difference_text(difference: Difference) -> str:
    if difference.mean is None:
        return "–"
    error = f" ± {difference.stderr:.4f}" if difference.stderr is not None else ""
    return f"{difference.mean:+.4f}{error}".replace("-", "−")


def seconds_text(seconds: float) -> str:
    """Two units at most: `8.4 s`, `2 min 05 s`, `1 h 12 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return (
        f"{minutes} min {rest:02d} s"
        if minutes < 60
        else f"{minutes // 60} h {minutes % 60:02d} min"
    )


def bytes_text(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def _seconds(statistic: Statistic) -> str:
    return seconds_text(statistic.mean or 0.0)


def _memory(statistic: Statistic) -> str:
    assert statistic.mean is not None
    return bytes_text(statistic.mean)


def _bits(statistic: Statistic) -> str:
    """The mean alone: every search ends just below its budget, so a spread would tell nothing."""
    return f"{statistic.mean:.3f}"


COLUMNS = (
    Column("perplexity", "", _metric("perplexity"), "perplexity"),
    Column("minus {}", "nats/token, paired", _difference_cell, "minus {}\nnats/token"),
    Column("element bits", "without scales", _metric("element_bits", _bits), "element\nbits"),
    Column("bits/element", "with scales", _metric("bits_per_element", _bits), "bits/\nelement"),
    Column(
        "whole model",
        "bits/element",
        _metric("whole_model_bits_per_element", _bits),
        "model bits\n/element",
    ),
    Column("search", "time", _metric("search_seconds", _seconds), "search"),
    Column("memory", "search peak", _metric("search_peak_memory_bytes", _memory), None),
    Column("eval", "time", _metric("eval_seconds", _seconds), None),
)


def row_name(group: Group) -> str:
    return "dMX" if group.name == "dmx" else group.name


def terminal_table(record: Record) -> Table:
    """The results table for the end of a run; the same cells as in the report."""
    groups = group_rows(record["results"])
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("method", overflow="fold")
    if any(group.budget for group in groups):
        table.add_column("budget", no_wrap=True)
    columns = [column for column in COLUMNS if column.narrow]
    against = reference_name(groups)
    for column in columns:
        table.add_column(
            (column.narrow or "").format(against), justify="right", overflow="fold"
        )  # never a cut number
    joint, separate = by_operands(groups)
    for group in (*joint, *separate):
        if separate and group is separate[0]:
            table.add_section()
        budget = [_budget(group)] if any(g.budget for g in groups) else []
        cells = [column.cell(group, groups)[0] for column in columns]
        style = "bold" if group.search == "differentiable" else None
        table.add_row(_plain(row_name(group)), *budget, *cells, style=style)
    return table


def _plain(text: str) -> str:
    return text.replace("[", r"\[")


def _budget(group: Group) -> str:
    return f"≤ {group.budget[0]:g}" if group.budget else ""


def _best_per_budget(groups: Sequence[Group]) -> list[Group]:
    """The group of lowest perplexity at each budget, of those that are compared."""
    best: dict[Any, Group] = {}
    for group in groups:
        perplexity = group.statistic("perplexity").mean
        if group.budget is None or perplexity is None:
            continue
        leader = best.setdefault((group.budget, group.kind), group)
        if perplexity < (leader.statistic("perplexity").mean or 0.0):
            best[group.budget, group.kind] = group
    return list(best.values())


def results_table(groups: Sequence[Group]) -> Html:
    """One table, and one more for choices that are separate for weights and inputs."""
    joint, separate = by_operands(groups)
    if not separate:
        return _results_table(joint)
    apart = (
        el("h3", "Separate operands"),
        _results_table(separate),
        el("p", SEPARATE_NOTE, cls="note"),
    )
    return el("div", _results_table(joint) if joint else None, apart)


def _results_table(groups: Sequence[Group]) -> Html:
    best = _best_per_budget(groups)
    seeds = any(len(group.rows) > 1 for group in groups)
    budgets = any(group.budget for group in groups)
    against = reference_name(groups)
    head = el(
        "tr",
        el("th", "method", scope="col"),
        el("th", "budget", el("small", bits_unit(groups)), scope="col", cls="num")
        if budgets
        else None,
        el("th", "seeds", scope="col", cls="num") if seeds else None,
        (
            el(
                "th",
                c.head.format(against),
                el("small", c.unit) if c.unit else None,
                scope="col",
                cls="num",
            )
            for c in COLUMNS
        ),
    )
    body = []
    for group in groups:
        cells = (column.cell(group, groups) for column in COLUMNS)
        body.append(
            el(
                "tr",
                el("th", row_name(group), scope="row"),
                el("td", _budget(group), cls="num") if budgets else None,
                el("td", str(len(group.rows)), cls="num") if seeds else None,
                (
                    el("td", text, cls="num", title=why if text == "–" or why else None)
                    for text, why in cells
                ),
                cls="best" if group in best else None,
            )
        )
    windows = {(r.get("windows"), r.get("tokens")) for g in groups for r in g.rows}
    caption = "± after a mean is the sample standard deviation over seeds. " if seeds else ""
    caption += "± after a difference is the paired standard error over windows. "
    caption += "A – says why when pointed at. "
    if len(windows) == 1 and None not in (only := windows.pop()):
        caption += f"Measured on {only[1]:,} tokens in {only[0]:,} windows."
    return el("div", scroll_table(head, body), el("p", caption, cls="note"))


def zero_shot_table(groups: Sequence[Group]) -> Html | None:
    tasks = zero_shot_tasks(groups)
    if not tasks:
        return None
    head = el(
        "tr",
        el("th", "method", scope="col"),
        (el("th", task, scope="col", cls="num") for task in tasks),
    )
    body = []
    for group in groups:
        cells = [el("th", group.title, scope="row")]
        for task in tasks:
            found = accuracy(group, task)
            title = (
                f"{found.metric}, {found.count} items, {found.seeds} seed(s)"
                if found
                else group.statistic("zero_shot").reason or "task not evaluated"
            )
            cells.append(el("td", _accuracy_text(found), cls="num", title=title))
        body.append(el("tr", cells))
    sources = dict.fromkeys(
        f"{task}: {found.metric}, {found.count} items, {found.source}"
        for task in tasks
        for group in groups
        if (found := accuracy(group, task))
    )
    return el(
        "div",
        scroll_table(head, body),
        el("p", "Percent right ± standard error over items.", cls="note"),
        el("ul", (el("li", text) for text in sources), cls="note"),
        _item_differences(groups, tasks),
    )


def _accuracy_text(found: Accuracy | None) -> str:
    if found is None:
        return "–"
    error = f" ± {100 * found.stderr:.1f}" if found.stderr is not None else ""
    return f"{100 * found.value:.1f}{error}"


def _item_differences(groups: Sequence[Group], tasks: Sequence[str]) -> Html | None:
    """Each group against bf16 and against the best of the others, paired over items."""
    unquantized = next((g for g in groups if g.label == "bf16"), None)
    body, any_found = [], False
    for group in groups:
        cells = [el("th", group.title, scope="row")]
        for task in tasks:
            for reference in (unquantized, best_other(group, groups, task)):
                if reference is None or reference is group:
                    cells.append(el("td", "–", cls="num", title="nothing to compare with"))
                    continue
                found = item_difference(group, reference, task)
                any_found = any_found or found.mean is not None
                text = points_text(found.mean, found.stderr).replace("-", "−")
                cells.append(
                    el(
                        "td",
                        el("strong", text) if found.is_clear else text,
                        cls="num",
                        title=found.reason or f"minus {reference.title}, {found.windows} items",
                    )
                )
        body.append(el("tr", cells))
    if not any_found:
        return None
    head = el(
        "tr",
        el("th", "method", scope="col"),
        (
            el("th", task, el("small", to), scope="col", cls="num")
            for task in tasks
            for to in ("minus bf16", "minus the best other")
        ),
    )
    note = (
        "Differences in percentage points, paired item by item, ± their standard error; those "
        f"beyond {SIGNIFICANT:g} standard error{'s' if SIGNIFICANT != 1 else ''} are bold. The best other is the most accurate other quantized "
        "row on that task; it is named when pointed at."
    )
    return el("div", el("h3", "Item by item"), scroll_table(head, body), el("p", note, cls="note"))


def zero_shot_terminal(record: Record) -> Table | None:
    """Zero-shot accuracies for the end of a run, in percent; None where nothing was asked."""
    groups = group_rows(record["results"])
    tasks = zero_shot_tasks(groups)
    if not tasks:
        return None
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("zero-shot, %", overflow="fold")
    for task in tasks:
        metric = next(found.metric for g in groups if (found := accuracy(g, task)))
        table.add_column(f"{task}\n{metric}", justify="right", overflow="fold")
    for group in groups:
        table.add_row(
            _plain(group.title), *(_accuracy_text(accuracy(group, task)) for task in tasks)
        )
    return table


def budget_suffix(group: Group) -> str:
    return f", ≤ {group.budget[0]:g} {group.budget[1]}" if group.budget else ""


def targets_table(groups: Sequence[Group], assignments: Mapping[str, Mapping[str, Any]]) -> Html:
    shown = [g for g in groups if any(row.get("assignment") for row in g.rows)]
    head = el(
        "tr",
        el("th", "export target", scope="col"),
        el("th", "loads in", scope="col"),
        (el("th", row_name(g), el("small", _budget(g)), scope="col") for g in shown),
    )
    body = []
    for name, target in TARGETS.items():
        for loader in target.loaders:
            cells = []
            for group in shown:
                paths = [row["assignment"] for row in group.rows if row.get("assignment")]
                given = [assignments[path] for path in paths]
                found = [
                    obstacles(
                        a["formats"],
                        target,
                        loader,
                        a.get("unquantized") or (),
                        a.get("input_formats"),
                    )
                    for a in given
                ]
                good = sum(not reasons for reasons in found)
                why = next(("; ".join(reasons) for reasons in found if reasons), None)
                if good == len(found):
                    cells.append(el("td", "✓ yes", cls="yes"))
                else:
                    word = "✗ no" if not good else f"{good} of {len(found)}"
                    narrow = len(shown) > _MAX_REASONED_COLUMNS
                    text = None if narrow else el("small", why)
                    cells.append(el("td", word, text, cls="no", title=why if narrow else None))
            body.append(el("tr", el("th", name, scope="row"), el("td", loader.name), cells))
    note = (
        "For the weights, and for inputs in other formats than these; a loader that also quantizes "
        "inputs applies its own scale rule. "
        "Layers in BF16 are left out of every target."
    )
    return el("div", scroll_table(head, body, cls="targets"), el("p", note, cls="note"))
