"""One self-contained `report.html` per run folder, and the table that ends a run on the terminal.

Everything comes from the files of the folder (record.json, history.jsonl, offsets.npz,
assignments); nothing is measured here. A result list may hold many searches, budgets and seeds:
rows that differ in seed alone become one line with mean and spread (`_results.group_rows`). Text
reaches the page through `el`, which escapes it.
"""

import html
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich import box
from rich.table import Table

from dmx.errors import RunError
from dmx.files import write_text
from dmx.formats import BLOCK_FORMATS
from dmx.targets import TARGETS, obstacles
from experiments import _plots
from experiments._results import (
    SIGNIFICANT,
    Accuracy,
    Difference,
    Group,
    Statistic,
    accuracy,
    best_other,
    bits_unit,
    budget_text,
    difference_to,
    group_rows,
    item_difference,
    spread_text,
    verdicts,
    zero_shot_tasks,
)

Record = Mapping[str, Any]

_STYLESHEET = Path(__file__).with_name("_report.css")
_HISTORY_KEYS = (
    "step", "temperature", "loss", "soft_bits", "hard_bits", "projected_bits",
    "soft_loss", "hard_loss", "projected_loss",
)  # fmt: skip
_CELL_MARKS = {
    "mxfp4": "4", "mxfp6_e2m3": "6", "mxfp6_e3m2": "6r",
    "mxfp8_e4m3": "8", "mxfp8_e5m2": "8r", "bf16": "16",
}  # fmt: skip
_PROJECTIONS = {
    "q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o",
    "gate_proj": "gate", "up_proj": "up", "down_proj": "down",
}  # fmt: skip
_OTHER = "other"
_MAX_OTHER_COLUMNS = 5
_OPEN_MAPS = 8
_MAX_REASONED_COLUMNS = 4
_VOID = ("img", "br", "meta")


class Html(str):
    """Text that is markup already; every other string is escaped by `el`."""


Child = str | None | Iterable[Any]


def el(tag: str, /, *children: Child, **attributes: str | None) -> Html:
    """An HTML element. `cls` is the class, `_` in names becomes `-`, attributes of None are left
    out."""
    given = "".join(
        f' {"class" if key == "cls" else key.replace("_", "-")}="{html.escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    inner = "".join(_flatten_markup(children))
    return Html(f"<{tag}{given}>" if tag in _VOID else f"<{tag}{given}>{inner}</{tag}>")


def _flatten_markup(children: Iterable[Child]) -> Iterator[str]:
    for child in children:
        if child is None:
            continue
        if isinstance(child, str):
            yield child if isinstance(child, Html) else html.escape(child)
        else:
            yield from _flatten_markup(child)


# --- reading a run folder ------------------------------------------------------------------------


@dataclass(frozen=True)
class SearchTrace:
    """What one gradient search left beside its assignment."""

    title: str
    history: dict[str, np.ndarray] | None
    """Each column (steps,) float64, NaN where the row holds null."""
    raw: np.ndarray | None
    """(steps + 1, units) float32."""
    units: list[str]
    assignment: Mapping[str, Any] | None
    budget: tuple[float, str] | None


def read_record(folder: Path) -> dict[str, Any]:
    """`record.json` of a run folder.

    Raises:
        RunError: there is none, it is not JSON, or it has another schema.
    """
    record = _read_json(folder / "record.json", "a finished run leaves one; finish the run first")
    if record.get("schema") != "dmx.record/1":
        raise RunError(
            f"{folder / 'record.json'}: schema is {record.get('schema')!r}, this version reads "
            "'dmx.record/1'. Write the report with the version that made the run."
        )
    return record


def _read_json(path: Path, way_out: str) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise RunError(f"{path} does not exist: {way_out}.") from None
    except (ValueError, TypeError) as error:
        raise RunError(f"{path} is not a JSON object ({error}): {way_out}.") from error


def read_history(path: Path) -> dict[str, np.ndarray] | None:
    """Columns of `history.jsonl` by step; None when there is no such file or it is empty.

    A step that occurs twice (a run that went on from a checkpoint) counts as written last.
    """
    if not path.exists():
        return None
    rows: dict[int, Mapping[str, Any]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            rows[int(row["step"])] = row
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(
                f"{path}, line {number}: not a history row ({error!r}). "
                "Resume the run, or delete the line."
            ) from error
    ordered = [rows[step] for step in sorted(rows)]
    if not ordered:
        return None
    return {
        key: np.array(
            [np.nan if row.get(key) is None else row[key] for row in ordered], dtype=np.float64
        )
        for key in _HISTORY_KEYS
    }


def _read_assignments(
    folder: Path, results: Iterable[Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    found = {}
    for row in results:
        path = row.get("assignment")
        if path is not None and path not in found:
            found[path] = _read_json(
                folder / path,
                f"result {row['label']!r} in record.json names it; put it back or run again",
            )
            if not isinstance(found[path].get("formats"), dict):
                raise RunError(f"{folder / path} holds no 'formats': not an assignment; run again.")
    return found


def _read_traces(
    folder: Path, groups: Sequence[Group], assignments: Mapping[str, Mapping[str, Any]]
) -> list[SearchTrace]:
    """Traces beside every gradient-searched assignment; the folder's own also without an
    assignment."""
    sources: dict[Path, tuple[str, Any, tuple[float, str] | None]] = {}
    for group in groups:
        for row in group.rows:
            if group.search == "differentiable" and row.get("assignment"):
                seed = f", seed {row['seed']}" if row.get("seed") is not None else ""
                home = (folder / row["assignment"]).parent
                sources[home] = (group.title + seed, assignments[row["assignment"]], group.budget)
    sources.setdefault(folder, ("search", None, None))
    traces = []
    for home, (title, assignment, budget) in sources.items():
        history = read_history(home / "history.jsonl")
        raw, units = None, []
        if (home / "offsets.npz").exists():
            with np.load(home / "offsets.npz", allow_pickle=False) as arrays:
                raw, units = arrays["raw"], [str(name) for name in arrays["units"]]
        if history is not None or raw is not None:
            traces.append(SearchTrace(title, history, raw, units, assignment, budget))
    return traces


def unit_format(unit: str, formats: Mapping[str, str]) -> str | None:
    """Final format of a unit: a layer name, layer names joined by `+` or `,`, or `parent.{a,b}`.

    None when no layer of that name is in the assignment.
    """
    parent, brace, inner = unit.partition("{")
    names = (
        [parent + leaf for leaf in inner.rstrip("}").split(",")]
        if brace
        else unit.replace("+", ",").split(",")
    )
    found = {formats[name.strip()] for name in names if name.strip() in formats}
    return found.pop() if len(found) == 1 else None


# --- cells shared by the page and the terminal ---------------------------------------------------


@dataclass(frozen=True)
class Column:
    """One column of the results table; `cell` gives the text and the reason when it is missing."""

    head: str
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
    Column("minus kl", "nats/token, paired", _difference_cell, "minus kl\nnats/token"),
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


def _row_name(group: Group) -> str:
    return "dMX" if group.name == "dmx" else group.name


def terminal_table(record: Record) -> Table:
    """The results table for the end of a run; the same cells as in the report."""
    groups = group_rows(record["results"])
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("method", overflow="fold")
    if any(group.budget for group in groups):
        table.add_column("budget", no_wrap=True)
    columns = [column for column in COLUMNS if column.narrow]
    for column in columns:
        table.add_column(
            column.narrow or "", justify="right", overflow="fold"
        )  # never a cut number
    for group in groups:
        budget = [_budget(group)] if any(g.budget for g in groups) else []
        cells = [column.cell(group, groups)[0] for column in columns]
        style = "bold" if group.search == "differentiable" else None
        table.add_row(_plain(_row_name(group)), *budget, *cells, style=style)
    return table


def _plain(text: str) -> str:
    return text.replace("[", r"\[")


def _budget(group: Group) -> str:
    return f"≤ {group.budget[0]:g}" if group.budget else ""


# --- sections of the page ------------------------------------------------------------------------


def _headline(record: Record, groups: Sequence[Group]) -> Html:
    """The verdict, then what limits it: stronger opponents, the note on the model."""
    found = verdicts(record["results"])
    recorded = record.get("verdict")
    texts = [recorded["text"]] if recorded and len(found) < 2 else [v["text"] for v in found]
    if not texts:
        quantized = [
            g for g in groups if g.label != "bf16" and g.statistic("perplexity").mean is not None
        ]
        texts = [
            f"{_row_name(g)}: perplexity {spread_text(g.statistic('perplexity'))}"
            for g in quantized[:1]
        ]
        texts.append(
            "No dMX result stands beside a kl result at the same budget, so there is no verdict."
        )
    notes = [_strongest_note(group, groups) for group in groups if group.search == "differentiable"]
    model = record.get("model") or {}
    if model.get("note"):
        notes.append(f"{model.get('id')}: {model['note']}")
    head, *more = texts
    return Html(
        el("h1", head)
        + el("ul", (el("li", text) for text in more), cls="more") * bool(more)
        + "".join(el("p", note, cls="note") for note in dict.fromkeys(notes) if note)
    )


def _strongest_note(group: Group, groups: Sequence[Group]) -> str | None:
    """dMX against the best of the searches other than `kl` at its budget."""
    others = [
        g for g in groups
        if g.budget == group.budget and g.operands == group.operands
        and g.search not in ("differentiable", "kl", "uniform", None) and g.statistic("nll").mean is
        not None
    ]  # fmt: skip
    if not others:
        return (
            "kl is a weak opponent; kl_per_bit and fisher, which are stronger, were not run here."
        )
    best = min(others, key=lambda g: g.statistic("nll").mean or 0.0)
    difference = difference_to(group, groups, best.search or "")
    return (
        f"Against {best.name}{_budget_suffix(group)}, the strongest other search: "
        f"{difference_text(difference)} nats/token."
    )


def _best_per_budget(groups: Sequence[Group]) -> list[Group]:
    """The group of lowest perplexity at each budget (and operands)."""
    best: dict[Any, Group] = {}
    for group in groups:
        perplexity = group.statistic("perplexity").mean
        if group.budget is None or perplexity is None:
            continue
        leader = best.setdefault((group.budget, group.operands), group)
        if perplexity < (leader.statistic("perplexity").mean or 0.0):
            best[group.budget, group.operands] = group
    return list(best.values())


def _results_table(groups: Sequence[Group]) -> Html:
    best = _best_per_budget(groups)
    seeds = any(len(group.rows) > 1 for group in groups)
    budgets = any(group.budget for group in groups)
    head = el(
        "tr",
        el("th", "method", scope="col"),
        el("th", "budget", el("small", bits_unit(groups)), scope="col", cls="num")
        if budgets
        else None,
        el("th", "seeds", scope="col", cls="num") if seeds else None,
        (
            el("th", c.head, el("small", c.unit) if c.unit else None, scope="col", cls="num")
            for c in COLUMNS
        ),
    )
    body = []
    for group in groups:
        cells = (column.cell(group, groups) for column in COLUMNS)
        body.append(
            el(
                "tr",
                el("th", _row_name(group), scope="row"),
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
    return el("div", _table(head, body), el("p", caption, cls="note"))


def _table(head: Html, body: Iterable[Html], cls: str | None = None) -> Html:
    return el("div", el("table", el("thead", head), el("tbody", body), cls=cls), cls="scroll")


def _zero_shot_table(groups: Sequence[Group]) -> Html | None:
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
        _table(head, body),
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
                text = _points_text(found)
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
    return el("div", el("h3", "Item by item"), _table(head, body), el("p", note, cls="note"))


def _points_text(found: Difference) -> str:
    if found.mean is None:
        return "–"
    error = f" ± {100 * found.stderr:.1f}" if found.stderr is not None else ""
    return f"{100 * found.mean:+.1f}{error}".replace("-", "−")


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


def _picture(figure: Figure, caption: str, kind: str = "svg") -> Html:
    image = el("img", src=_plots.figure_uri(figure, kind), alt=caption)
    return el("figure", el("div", image, cls="panel"), el("figcaption", caption))


def _pareto_section(groups: Sequence[Group]) -> Html | None:
    figure = _plots.pareto(groups)
    if figure is None:
        return None
    pictures = [
        _picture(
            figure, "Perplexity over bits; lower left is better. Grey: one format for all layers."
        )
    ]
    if (near := _plots.pareto(groups, zoom=True)) is not None:
        seeds = any(len(group.rows) > 1 for group in groups)
        bars = " Marks are means, bars the standard deviation over seeds." if seeds else ""
        pictures.append(_picture(near, f"The searches alone, from near.{bars}"))
    return el("div", pictures, cls="figures")


def _thresholds(assignment: Mapping[str, Any] | None) -> tuple[float, ...]:
    """Raw offsets where the hard choice changes (design section 3); none when the family is not
    recorded."""
    family = ((assignment or {}).get("search") or {}).get("family")
    return () if not family else (0.5, 1.5) if family.count("mxfp") == 3 else (1.0,)


def _trace_pictures(trace: SearchTrace) -> list[Html]:
    pictures = []
    if trace.history is not None:
        pictures.append(
            _picture(
                _plots.bits_over_steps(trace.history, trace.budget),
                "Average bits: soft (annealed), hard (thresholded), projected (within budget).",
            )
        )
        if (figure := _plots.loss_gap(trace.history)) is not None:
            pictures.append(
                _picture(figure, "Loss on the held batch; below, hard and projected minus soft.")
            )
    if trace.raw is not None:
        formats = (trace.assignment or {}).get("formats") or {}
        colours = [unit_format(unit, formats) for unit in trace.units]
        caption = (
            f"Raw offset of each of the {len(trace.units)} units, coloured by its final format."
        )
        figure = _plots.offsets_over_steps(trace.raw, colours, _thresholds(trace.assignment))
        pictures.append(
            _picture(figure, caption, kind="png")
        )  # hundreds of lines: a PNG is far smaller
    return pictures


def _search_section(traces: Sequence[SearchTrace]) -> list[Html]:
    if len(traces) == 1:
        return [el("div", _trace_pictures(traces[0]), cls="figures")]
    return [
        el(
            "details",
            el("summary", t.title),
            el("div", _trace_pictures(t), cls="figures"),
            open="" if not i else None,
        )
        for i, t in enumerate(traces)
    ]


def locate(layer: str) -> tuple[str, int | None, str]:
    """(stack, block, projection) of a layer name; `model.layers.3.mlp.up_proj` -> ("model.layers",
    3, "up")."""
    parts = layer.split(".")
    leaf = _PROJECTIONS.get(parts[-1], parts[-1])
    index = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    if index is None:
        return "", None, leaf
    return ".".join(parts[:index]), int(parts[index]), leaf


def format_map(assignment: Mapping[str, Any]) -> Html:
    """Blocks x projections; a cell with several layers of different formats is striped and tells
    the counts."""
    cells: dict[tuple[str, int | None], dict[str, list[tuple[str, str]]]] = {}
    leaves = Counter(locate(layer)[2] for layer in assignment["formats"])
    known = [leaf for leaf in _PROJECTIONS.values() if leaf in leaves]
    extra = [leaf for leaf in leaves if leaf not in known]
    shown = known + extra[:_MAX_OTHER_COLUMNS]
    columns = shown + ([_OTHER] if len(extra) > _MAX_OTHER_COLUMNS else [])
    for layer, name in assignment["formats"].items():
        stack, block, leaf = locate(layer)
        column = leaf if leaf in shown else _OTHER
        cells.setdefault((stack, block), {}).setdefault(column, []).append((layer, name))
    stacks = {stack for stack, block in cells if block is not None}
    rows = []
    for (stack, block), row in cells.items():
        number = "–" if block is None else str(block)
        label = f"{stack} {number}" if len(stacks) > 1 else number
        rows.append(
            el("tr", el("th", label, scope="row"), (_map_cell(row.get(c, [])) for c in columns))
        )
    head = el(
        "tr", el("th", "", scope="col"), (el("th", column, scope="col") for column in columns)
    )
    return _table(head, rows, cls="map")


def _map_cell(layers: Sequence[tuple[str, str]]) -> Html:
    if not layers:
        return el("td", cls="none")
    counts = Counter(name for _, name in layers)
    if len(counts) == 1:
        name = layers[0][1]
        title = f"{layers[0][0]}: {name}" if len(layers) == 1 else f"{len(layers)} layers: {name}"
        return el("td", _CELL_MARKS.get(name, "?"), cls=f"f-{name}", title=title)
    stops, start = [], 0.0
    for name, count in counts.items():
        end = start + 100 * count / len(layers)
        colour = _plots.FORMAT_COLOURS.get(name, _plots.UNKNOWN_COLOUR)
        stops.append(f"{colour} {start:.0f}% {end:.0f}%")
        start = end
    title = ", ".join(f"{count} {name}" for name, count in counts.items())
    return el("td", title=title, style=f"background:linear-gradient(90deg,{','.join(stops)})")


def _format_shares(assignment: Mapping[str, Any]) -> str:
    """Share of each format in the weight elements of the assigned layers."""
    shapes = assignment.get("shapes") or {}
    sizes: Counter[str] = Counter()
    for layer, name in assignment["formats"].items():
        sizes[name] += int(np.prod(shapes[layer])) if layer in shapes else 1
    unit = "weights" if shapes else "layers"
    total = sum(sizes.values())
    return (
        ", ".join(f"{100 * n / total:.0f} % {name}" for name, n in sorted(sizes.items()))
        + f" of the {unit}"
    )


def _map_section(
    groups: Sequence[Group], assignments: Mapping[str, Mapping[str, Any]]
) -> list[Html]:
    """Maps of one seed of each search side by side; uniform formats and other seeds are folded."""
    first: list[Html] = []
    others: list[Html] = []
    for group in groups:
        rows = [row for row in group.rows if row.get("assignment") is not None]
        for index, row in enumerate(rows):
            picture = _map_box(group, row, assignments[row["assignment"]])
            shown = not index and group.search != "uniform" and len(first) < _OPEN_MAPS
            (first if shown else others).append(picture)
    used = {name for a in assignments.values() for name in a["formats"].values()}
    legend = el(
        "p",
        (
            el("span", el("i", mark, cls=f"f-{name}"), f" {name}", cls="key")
            for name, mark in _CELL_MARKS.items()
            if name in used
        ),
        cls="legend",
    )
    folded = el("details", el("summary", f"{len(others)} more maps"), el("div", others, cls="maps"))
    return [legend, el("div", first, cls="maps"), *([folded] if others else [])]


def _sizes(assignment: Mapping[str, Any]) -> dict[str, int]:
    return {name: shape[0] * shape[1] for name, shape in assignment["shapes"].items()}


def agreement(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    """Share of the weights that two assignments of one model give the same format, 0 to 1."""
    sizes = _sizes(a)
    same = sum(n for k, n in sizes.items() if a["formats"][k] == b["formats"].get(k))
    return same / sum(sizes.values())


def raised_by_projection(assignment: Mapping[str, Any]) -> dict[str, float]:
    """projection -> share of its weights above the assignment's smallest format, 0 to 1."""
    bits = {k: BLOCK_FORMATS[f].element_bits for k, f in assignment["formats"].items()}
    low = min(bits.values())
    total: Counter[str] = Counter()
    high: Counter[str] = Counter()
    for layer, n in _sizes(assignment).items():
        projection = locate(layer)[2]
        total[projection] += n
        high[projection] += n if bits[layer] > low else 0
    return {name: high[name] / total[name] for name in total}


def _agreement_section(
    groups: Sequence[Group], assignments: Mapping[str, Mapping[str, Any]]
) -> list[Html] | None:
    """For each budget: how much two searches agree, and where each spends its bits (first seed)."""
    by_budget: dict[Any, list[tuple[str, Mapping[str, Any]]]] = {}
    for group in groups:
        path = group.rows[0].get("assignment")
        if group.search not in (None, "uniform") and path is not None and group.budget:
            by_budget.setdefault(group.budget, []).append((group.name, assignments[path]))
    parts: list[Html] = []
    for budget, found in by_budget.items():
        if len(found) < 2 or len({frozenset(a["formats"]) for _, a in found}) > 1:
            continue
        projections = list(raised_by_projection(found[0][1]))
        head = el("tr", el("th", f"≤ {budget_text(budget)}"),
                  (el("th", f"as {name}") for name, _ in found),
                  (el("th", f"{p} raised") for p in projections))  # fmt: skip
        body = []
        for name, own in found:
            raised = raised_by_projection(own)
            cells = [el("td", f"{agreement(own, other):.0%}") for _, other in found]
            cells += [el("td", f"{raised.get(p, 0.0):.0%}") for p in projections]
            body.append(el("tr", el("td", name), cells))
        parts.append(_table(head, body))
    if not parts:
        return None
    note = "Shares of the weights; first seed of each. “as”: same format as that search gives."
    return [*parts, el("p", note, cls="note")]


def _map_box(group: Group, row: Mapping[str, Any], assignment: Mapping[str, Any]) -> Html:
    seed = f", seed {row['seed']}" if len(group.rows) > 1 and row.get("seed") is not None else ""
    caption = [
        el("strong", _row_name(group)), f"{_budget_suffix(group)}{seed}",
        el("br"), _format_shares(assignment),
    ]  # fmt: skip
    if assignment.get("unquantized"):
        caption += [el("br"), f"in BF16: {', '.join(assignment['unquantized'])}"]
    return el("figure", el("figcaption", caption), format_map(assignment), cls="mapbox")


def _budget_suffix(group: Group) -> str:
    return f", ≤ {group.budget[0]:g} {group.budget[1]}" if group.budget else ""


def _targets_table(groups: Sequence[Group], assignments: Mapping[str, Mapping[str, Any]]) -> Html:
    shown = [g for g in groups if any(row.get("assignment") for row in g.rows)]
    head = el(
        "tr",
        el("th", "export target", scope="col"),
        el("th", "loads in", scope="col"),
        (el("th", _row_name(g), el("small", _budget(g)), scope="col") for g in shown),
    )
    body = []
    for name, target in TARGETS.items():
        for loader in target.loaders:
            cells = []
            for group in shown:
                paths = [row["assignment"] for row in group.rows if row.get("assignment")]
                given = [assignments[path] for path in paths]
                found = [
                    obstacles(a["formats"], target, loader, a.get("unquantized") or ())
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
        "For the weights; a loader that also quantizes inputs applies its own scale rule. "
        "Layers in BF16 are left out of every target."
    )
    return el("div", _table(head, body, cls="targets"), el("p", note, cls="note"))


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings to dotted keys; lists stay whole."""
    if isinstance(value, Mapping) and value:
        pairs: dict[str, Any] = {}
        for key, child in value.items():
            pairs |= flatten(child, f"{prefix}.{key}" if prefix else str(key))
        return pairs
    return {prefix: value}


def _value_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def _asked_and_ran(record: Record) -> Html | None:
    requested, actual = flatten(record.get("requested") or {}), flatten(record.get("actual") or {})
    requested.pop("", None), actual.pop("", None)
    keys = dict.fromkeys((*requested, *actual))
    if not keys:
        return None
    missing = object()
    differing = [k for k in keys if requested.get(k, missing) != actual.get(k, missing)]
    rows = []
    for key in sorted(keys, key=lambda k: k not in differing):
        texts = [_value_text(side[key]) if key in side else "–" for side in (requested, actual)]
        cls = "differs" if key in differing else None
        rows.append(
            el("tr", el("th", key, scope="row"), (el("td", text) for text in texts), cls=cls)
        )
    head = el("tr", (el("th", text, scope="col") for text in ("setting", "asked", "ran")))
    says = f"{len(differing)} of {len(keys)} settings differ, first and in red." if differing else (
        f"All {len(keys)} settings ran as asked.")  # fmt: skip
    table = _table(head, rows, cls="pairs")
    body = table if differing else el("details", el("summary", "Show them"), table)
    return el("div", el("p", says, cls="bad" if differing else "good"), body)


def _environment(record: Record) -> Html:
    pairs: dict[str, Any] = {key: record.get(key) for key in ("command", "started", "finished")}
    if record.get("wall_seconds") is not None:
        pairs["wall time"] = seconds_text(record["wall_seconds"])
    peak = record.get("peak_memory_bytes")
    pairs["peak memory"] = (
        bytes_text(peak) if peak is not None else record.get("peak_memory_bytes_reason")
    )
    seeds = sorted({row["seed"] for row in record["results"] if row.get("seed") is not None})
    pairs["seed"] = seeds if len(seeds) > 1 else record.get("seed")
    for key in ("device", "model", "data", "versions"):
        pairs |= flatten(record.get(key) or {}, key)
    rows = (
        el("tr", el("th", key, scope="row"), el("td", "–" if value is None else _value_text(value)))
        for key, value in pairs.items()
    )
    return el("div", el("table", el("tbody", rows), cls="pairs"), cls="scroll")


def _section(title: str, body: Any) -> Html | None:
    return el("section", el("h2", title), body) if body else None


def render(folder: Path) -> str:
    """The whole page as text; see `write_report`."""
    record = read_record(folder)
    groups = group_rows(record["results"])
    assignments = _read_assignments(folder, record["results"])
    traces = _read_traces(folder, groups, assignments)
    model = (record.get("model") or {}).get("id") or "unknown model"
    colours = "".join(
        f".f-{name}{{background:{colour}}}" for name, colour in _plots.FORMAT_COLOURS.items()
    )
    warnings = record.get("warnings") or []
    when = record.get("finished") or record.get("started") or ""
    eyebrow = " · ".join(filter(None, (model, record.get("command"), when)))
    body = el(
        "main",
        el("p", eyebrow, cls="eyebrow"),
        el("aside", el("strong", "Warnings"), el("ul", (el("li", str(w)) for w in warnings)))
        if warnings
        else None,
        el("header", _headline(record, groups)),
        _section("Results", _results_table(groups)),
        _section("Zero-shot", _zero_shot_table(groups)),
        _section("Perplexity and bits", _pareto_section(groups)),
        _section("The search, step by step", _search_section(traces) if traces else None),
        _section(
            "Formats by block and projection",
            _map_section(groups, assignments) if assignments else None,
        ),
        _section("Where searches agree", _agreement_section(groups, assignments)),
        _section(
            "Who can load the result", _targets_table(groups, assignments) if assignments else None
        ),
        _section("What was asked and what ran", _asked_and_ran(record)),
        _section("Environment", _environment(record)),
    )
    style = Html(_STYLESHEET.read_text(encoding="utf-8") + colours)
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("title", f"dMX report: {model}"),
        el("style", style),
    )
    return "<!doctype html>\n" + el("html", head, el("body", body), lang="en") + "\n"


def write_report(folder: Path) -> Path:
    """Write `report.html` into a run folder from the files that the run left there.

    Returns:
        The path of the page. It is written beside its place and renamed, so a reader never sees
        half of it.

    Raises:
        RunError: record.json is missing or of another schema, an assignment that it names cannot
            be read, or history.jsonl holds a damaged line.
    """
    folder = Path(folder)
    return write_text(folder / "report.html", render(folder))
