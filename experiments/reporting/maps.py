"""Format maps, block by projection."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .colours import FORMAT_COLOURS, UNKNOWN_COLOUR
from .groups import Group
from .html import Html, el, scroll_table
from .projections import PROJECTIONS, locate
from .reading import Assignments
from .record import Row
from .verdicts import budget_suffix

_CELL_MARKS = {
    "mxfp4": "4",
    "mxfp6_e2m3": "6",
    "mxfp6_e3m2": "6r",
    "mxfp8_e4m3": "8",
    "mxfp8_e5m2": "8r",
    "nvfp4": "4n",
    "fp8": "8f",
    "bf16": "16",
}
_OTHER = "other"
_MAX_OTHER_COLUMNS = 5
_OPEN_MAPS = 8


def operand_formats(assignment: Mapping[str, Any]) -> dict[str, Mapping[str, str]]:
    """weight, input -> layer -> format."""
    formats: Mapping[str, str] = assignment.get("formats") or {}
    return {"weight": formats, "input": assignment.get("input_formats") or formats}


def chosen_formats(assignment: Mapping[str, Any]) -> dict[str, Mapping[str, str]]:
    """Those of `operand_formats` that were chosen: without inputs in one fixed format."""
    formats = operand_formats(assignment)
    return {"weight": formats["weight"]} if fixed_inputs(assignment) else formats


def fixed_inputs(assignment: Mapping[str, Any]) -> str | None:
    """The format of every input, where the weights' formats alone were chosen."""
    name: str | None = (assignment.get("search") or {}).get("input_format")
    return name


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


def map_section(groups: Sequence[Group], assignments: Assignments) -> list[Html]:
    """Maps of one seed of each search side by side; uniform formats and other seeds are folded."""
    first: list[Html] = []
    others: list[Html] = []
    for group in groups:
        paths = [(row, row.assignment) for row in group.rows if row.assignment is not None]
        for index, (row, path) in enumerate(paths):
            picture = _map_box(group, row, assignments[path])
            shown = not index and not group.method.is_uniform and len(first) < _OPEN_MAPS
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


def _map_box(group: Group, row: Row, assignment: Mapping[str, Any]) -> Html:
    seed = f", seed {row.seed}" if len(group.rows) > 1 and row.seed is not None else ""
    caption = [el("strong", group.name), f"{budget_suffix(group)}{seed}"]
    shown, shapes = operand_formats(assignment), assignment.get("shapes") or {}
    if name := fixed_inputs(assignment):
        caption += [el("br"), f"inputs {name}"]
    if name or not assignment.get("input_formats"):
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
