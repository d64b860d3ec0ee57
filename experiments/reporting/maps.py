"""Format maps, block by projection, and how far the maps of several searches agree."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dmx.formats import FORMATS
from experiments.reporting.html import Html, el, scroll_table
from experiments.reporting.plots import FORMAT_COLOURS, UNKNOWN_COLOUR
from experiments.reporting.results import Group, budget_text
from experiments.reporting.tables import budget_suffix, row_name

_CELL_MARKS = {
    "mxfp4": "4", "mxfp6_e2m3": "6", "mxfp6_e3m2": "6r",
    "mxfp8_e4m3": "8", "mxfp8_e5m2": "8r", "bf16": "16",
}  # fmt: skip
PROJECTIONS = {
    "q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o",
    "gate_proj": "gate", "up_proj": "up", "down_proj": "down",
}  # fmt: skip
_OTHER = "other"
_MAX_OTHER_COLUMNS = 5
_OPEN_MAPS = 8


def locate(layer: str) -> tuple[str, int | None, str]:
    """(stack, block, projection) of a layer name; `model.layers.3.mlp.up_proj` -> ("model.layers",
    3, "up")."""
    parts = layer.split(".")
    leaf = PROJECTIONS.get(parts[-1], parts[-1])
    index = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    if index is None:
        return "", None, leaf
    return ".".join(parts[:index]), int(parts[index]), leaf


def operand_formats(assignment: Mapping[str, Any]) -> dict[str, Mapping[str, str]]:
    """weight, input -> layer -> format."""
    formats: Mapping[str, str] = assignment.get("formats") or {}
    return {"weight": formats, "input": assignment.get("input_formats") or formats}


def format_counts(
    formats: Mapping[str, str], input_formats: Mapping[str, str] | None = None
) -> dict[str, dict[str, dict[str, int]]]:
    """weight (and input, where it has formats of its own) -> projection -> format -> layers."""
    sides = {"weight": formats} | ({"input": input_formats} if input_formats else {})
    counts: dict[str, dict[str, dict[str, int]]] = {}
    for side, of in sides.items():
        for layer, name in of.items():
            found = counts.setdefault(side, {}).setdefault(locate(layer)[2], {})
            found[name] = found.get(name, 0) + 1
    return counts


def format_map(formats: Mapping[str, str]) -> Html:
    """Blocks x projections; a cell with several layers of different formats is striped and tells
    the counts.

    Args:
        formats: layer -> format of one operand.
    """
    cells: dict[tuple[str, int | None], dict[str, list[tuple[str, str]]]] = {}
    leaves = Counter(locate(layer)[2] for layer in formats)
    known = [leaf for leaf in PROJECTIONS.values() if leaf in leaves]
    extra = [leaf for leaf in leaves if leaf not in known]
    shown = known + extra[:_MAX_OTHER_COLUMNS]
    columns = shown + ([_OTHER] if len(extra) > _MAX_OTHER_COLUMNS else [])
    for layer, name in formats.items():
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
    return scroll_table(head, rows, cls="map")


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
        colour = FORMAT_COLOURS.get(name, UNKNOWN_COLOUR)
        stops.append(f"{colour} {start:.0f}% {end:.0f}%")
        start = end
    title = ", ".join(f"{count} {name}" for name, count in counts.items())
    return el("td", title=title, style=f"background:linear-gradient(90deg,{','.join(stops)})")


def _format_shares(formats: Mapping[str, str], shapes: Mapping[str, Any]) -> str:
    """Share of each format in the weight elements of the assigned layers."""
    sizes: Counter[str] = Counter()
    for layer, name in formats.items():
        sizes[name] += int(np.prod(shapes[layer])) if layer in shapes else 1
    unit = "weights" if shapes else "layers"
    total = sum(sizes.values())
    return (
        ", ".join(f"{100 * n / total:.0f} % {name}" for name, n in sorted(sizes.items()))
        + f" of the {unit}"
    )


def map_section(
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
    used = {
        name
        for a in assignments.values()
        for formats in operand_formats(a).values()
        for name in formats.values()
    }
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
    """Share of the weights, and of the inputs by the weights, that two assignments of one model give
    the same format, 0 to 1."""
    sizes, (ours, theirs) = _sizes(a), (operand_formats(x) for x in (a, b))
    same = sum(n for k, n in sizes.items() for o in ours if ours[o][k] == theirs[o].get(k))
    return same / (len(ours) * sum(sizes.values()))


def raised_by_projection(assignment: Mapping[str, Any]) -> dict[str, float]:
    """projection -> share of its operands, by weights, above the assignment's smallest format, 0 to
    1."""
    bits = [
        {k: FORMATS[f].element_bits for k, f in formats.items()}
        for formats in operand_formats(assignment).values()
    ]
    low = min(min(of.values()) for of in bits)
    total: Counter[str] = Counter()
    high: Counter[str] = Counter()
    for layer, n in _sizes(assignment).items():
        projection = locate(layer)[2]
        for of in bits:
            total[projection] += n
            high[projection] += n if of[layer] > low else 0
    return {name: high[name] / total[name] for name in total}


def agreement_section(
    groups: Sequence[Group], assignments: Mapping[str, Mapping[str, Any]]
) -> list[Html] | None:
    """For each budget: how much two searches agree, and where each spends its bits (first seed)."""
    by_budget: dict[Any, list[tuple[str, Mapping[str, Any]]]] = {}
    for group in groups:
        path = group.rows[0].get("assignment")
        if group.search not in (None, "uniform") and path is not None and group.budget:
            key = group.budget, group.is_separate
            by_budget.setdefault(key, []).append((group.name, assignments[path]))
    parts: list[Html] = []
    for (budget, _), found in by_budget.items():
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
        parts.append(scroll_table(head, body))
    if not parts:
        return None
    note = "Shares of the weights; first seed of each. “as”: same format as that search gives."
    return [*parts, el("p", note, cls="note")]


def _map_box(group: Group, row: Mapping[str, Any], assignment: Mapping[str, Any]) -> Html:
    seed = f", seed {row['seed']}" if len(group.rows) > 1 and row.get("seed") is not None else ""
    caption = [el("strong", row_name(group)), f"{budget_suffix(group)}{seed}"]
    shown, shapes = operand_formats(assignment), assignment.get("shapes") or {}
    if not assignment.get("input_formats"):
        caption += [el("br"), _format_shares(shown["weight"], shapes)]
        pictures: list[Html] = [format_map(shown["weight"])]
    else:
        pictures = [
            part
            for operand, formats in shown.items()
            for part in (
                el("p", el("strong", f"{operand}s"), f" {_format_shares(formats, shapes)}"),
                format_map(formats),
            )
        ]
    if assignment.get("unquantized"):
        caption += [el("br"), f"in BF16: {', '.join(assignment['unquantized'])}"]
    return el("figure", el("figcaption", caption), pictures, cls="mapbox")
