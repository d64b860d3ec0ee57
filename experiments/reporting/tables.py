"""The table of results, in a report and in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich import box
from rich.table import Table

from .differences import difference_to, reference_name
from .groups import (
    INPUTS_NOTE,
    SEPARATE_NOTE,
    Group,
    RecipeGroup,
    Statistic,
    bits_unit,
    by_choices,
    group_recipes,
    group_rows,
)
from .html import Html, el, scroll_table
from .record import Method, Record, TrainingRow, weights_text
from .texts import SIDES, bytes_text, nats_text, seconds_text, spread_text, with_minus


@dataclass(frozen=True)
class Column:
    """One column of the results table; `cell` gives the text and the reason when it is missing."""

    head: str
    """{} stands for the search that rows are compared with."""
    unit: str
    cell: Callable[[Group, Sequence[Group]], tuple[str, str]]
    narrow: str | None
    """Head for the terminal, where eighty columns must hold the table; None leaves it out."""
    bits: str | None = None
    """Unit of the bits that it shows; the terminal shows those of the budgets alone."""


def _metric(
    name: str, text: Callable[[Statistic], str] = spread_text
) -> Callable[..., tuple[str, str]]:
    def cell(group: Group, groups: Sequence[Group]) -> tuple[str, str]:
        statistic = group.statistic(name)
        return (text(statistic) if statistic.mean is not None else "–"), statistic.reason

    return cell


def _difference_cell(group: Group, groups: Sequence[Group]) -> tuple[str, str]:
    difference = difference_to(group, groups)
    return with_minus(nats_text(difference.mean, difference.stderr)), difference.reason


def _seconds(statistic: Statistic) -> str:
    return seconds_text(statistic.mean or 0.0)


def _time_cell(group: Group, groups: Sequence[Group]) -> tuple[str, str]:
    search, weights = map(group.statistic, ("search_seconds", "weights_seconds"))
    if search.mean is None:
        return "–", search.reason
    return seconds_text(search.mean + (weights.mean or 0.0)), search.reason


def _memory(statistic: Statistic) -> str:
    return bytes_text(statistic.mean or 0.0)


def _bits(statistic: Statistic) -> str:
    """The mean alone: every search ends just below its budget, so a spread would tell nothing."""
    return f"{statistic.mean:.3f}"


_ELEMENT_BITS, _BITS = (_metric(name, _bits) for name in ("element_bits", "bits_per_element"))
_WHOLE = _metric("whole_model_bits_per_element", _bits)
COLUMNS = (
    Column("perplexity", "", _metric("perplexity"), "perplexity"),
    Column("minus {}", "nats/token, paired", _difference_cell, "minus {}\nnats/token"),
    Column("element bits", "without scales", _ELEMENT_BITS, "element\nbits", "element_bits"),
    Column("bits/element", "with scales", _BITS, "bits/\nelement", "bits_per_element"),
    Column("whole model", "bits/element", _WHOLE, None),
    Column("search + weights", "time", _time_cell, "search +\nweights"),
    Column("memory", "search peak", _metric("search_peak_memory_bytes", _memory), None),
    Column("eval", "time", _metric("eval_seconds", _seconds), None),
)


def terminal_table(record: Record) -> Table:
    """The results table for the end of a run, in eighty columns; the same cells as in the report, without columns that say
    nothing of any row."""
    if record.training_rows:
        return _recipes_terminal(record.training_rows)
    groups = group_rows(record.rows)
    against = reference_name(groups)
    units = {group.budget.unit for group in groups if group.budget} or {bits_unit(groups)}
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("method", overflow="fold")
    has_budgets = any(group.budget for group in groups)
    if has_budgets:
        table.add_column("budget", no_wrap=True)
    compared = any(difference_to(group, groups).mean is not None for group in groups)
    columns = [
        column
        for column in COLUMNS
        if column.narrow
        and column.bits in (None, *units)
        and any(column.cell(group, groups)[0] != "–" for group in groups)
    ]
    for column in columns:
        head = (column.narrow or "").format(against)
        table.add_column(head, justify="right", overflow="fold")  # never a cut number
    joint, separate = by_choices(groups)
    short, notes = _shortened(groups)
    for group in (*joint, *separate):
        if separate and group is separate[0]:
            table.add_section()
        cells = [column.cell(group, groups)[0] for column in columns]
        budget = [limit_text(group)] if has_budgets else []
        table.add_row(
            plain(short(group.method).name), *budget, *cells,
            style="bold" if group.method.is_dmx else None,
        )  # fmt: skip
    if compared:
        other = "the best heuristic" if against == "heuristic" else against
        notes.append(
            f"minus {against}: loss minus that of {other} at the same budget, settings and weights; – for that row itself, "
            "and where there is none"
        )
    table.caption_justify, table.caption = "left", plain("\n".join(notes)) or None
    return table


def _shortened(groups: Sequence[Group]) -> tuple[Callable[[Method], Method], list[str]]:
    """Takes from a method what all of these have alike, and what is then said of all under the table."""
    methods = [group.method for group in groups]
    quantized = {m.quantized for m in methods if m.quantized}
    stages: dict[str, set[str]] = {}
    for m in methods:
        stages.setdefault(m.weights, set()).add(m.stage)
    alike = {weights: said.pop() for weights, said in stages.items() if len(said) == 1}
    notes = [f"{weights_text(weights)}: {stage}" for weights, stage in alike.items() if stage]
    if len(quantized) == 1:
        (sides,) = quantized
        notes.insert(0, f"{SIDES[sides]} quantized ({sides})")

    def short(method: Method) -> Method:
        return replace(
            method,
            quantized=None if len(quantized) == 1 else method.quantized,
            stage="" if method.weights in alike else method.stage,
        )

    return short, notes


def _recipes_terminal(rows: Sequence[TrainingRow]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("recipe", overflow="fold")
    for head in ("seeds", "validation\nnats/token", "perplexity", "FP8\ntensors", "tokens/s"):
        table.add_column(head, justify="right", overflow="fold")
    for group in group_recipes(rows):
        table.add_row(plain(group.label), *recipe_cells(group))
    return table


def recipe_cells(group: RecipeGroup) -> tuple[str, ...]:
    """Seeds, validation loss, perplexity, share of FP8 tensors, tokens/s."""
    share = group.statistic("fp8_tensor_share")
    return (
        str(len(group.rows)),
        spread_text(group.statistic("nll")),
        spread_text(group.statistic("perplexity")),
        "–" if share.mean is None else f"{100 * share.mean:.2f} %",
        spread_text(group.statistic("tokens_per_second")),
    )


def plain(text: str) -> str:
    """Text that the terminal takes for no markup."""
    return text.replace("[", r"\[")


def limit_text(group: Group) -> str:
    """The budget without its unit; nothing without a budget."""
    return f"≤ {group.budget.limit:g}" if group.budget else ""


def _best_per_budget(groups: Sequence[Group]) -> list[Group]:
    """The group of lowest perplexity at each budget, of those that are compared."""
    best: dict[Any, Group] = {}
    for group in groups:
        perplexity = group.statistic("perplexity").mean
        if group.budget is None or perplexity is None:
            continue
        leader = best.setdefault(group.place, group)
        if perplexity < (leader.statistic("perplexity").mean or 0.0):
            best[group.place] = group
    return list(best.values())


def results_table(groups: Sequence[Group]) -> Html:
    """One table, and one more for choices that are separate for weights and inputs."""
    joint, separate = by_choices(groups)
    if not separate:
        return _results_table(joint)
    apart = (
        el("h3", "Separate choices"),
        _results_table(separate),
        el("p", SEPARATE_NOTE, cls="note"),
    )
    return el("div", _results_table(joint) if joint else None, apart)


def _results_table(groups: Sequence[Group]) -> Html:
    best = _best_per_budget(groups)
    seeds = any(len(group.rows) > 1 for group in groups)
    budgets = any(group.budget for group in groups)
    against = reference_name(groups)

    def head_cell(text: str, unit: str = "") -> Html:
        return el("th", text, el("small", unit) if unit else None, scope="col", cls="num")

    head = el(
        "tr",
        el("th", "method", scope="col"),
        head_cell("budget", bits_unit(groups)) if budgets else None,
        head_cell("seeds") if seeds else None,
        (head_cell(column.head.format(against), column.unit) for column in COLUMNS),
    )
    body = []
    for group in groups:
        cells = (column.cell(group, groups) for column in COLUMNS)
        body.append(
            el(
                "tr",
                el("th", group.name, scope="row"),
                el("td", limit_text(group), cls="num") if budgets else None,
                el("td", str(len(group.rows)), cls="num") if seeds else None,
                (
                    el("td", text, cls="num", title=why if text == "–" or why else None)
                    for text, why in cells
                ),
                cls="best" if group in best else None,
            )
        )
    caption = "± after a mean is the sample standard deviation over seeds. " if seeds else ""
    caption += "± after a difference is the paired standard error over windows. "
    caption += "A – says why when pointed at. "
    measured = {(row.windows, row.tokens) for g in groups for row in g.rows}
    if len(measured) == 1:
        windows, tokens = measured.pop()
        caption += f"Measured on {tokens:,} tokens in {windows:,} windows."
    if any(group.method.input_format for group in groups):
        caption += f" {INPUTS_NOTE}"
    return el("div", scroll_table(head, body, cls="results"), el("p", caption, cls="note"))
