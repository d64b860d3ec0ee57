"""One self-contained `report.html` per run folder.

Everything comes from the files of the folder (record.json, history.jsonl, offsets.npz,
assignments); nothing is measured here. A result list may hold many searches, budgets and seeds:
rows that differ in seed alone become one line with mean and spread (`groups.group_rows`). Text
reaches the page through `el`, which escapes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dmx.files import write_text
from dmx.formats import get_family
from dmx.models.experts import experts_path, of_all_experts
from dmx.searching.offsets import harden, raw_thresholds

from .agreement import agreement_section
from .colours import FORMAT_COLOURS
from .groups import Group, group_rows
from .html import Html, el, page, picture, section
from .maps import map_section, operand_formats
from .plots.pareto import pareto
from .plots.traces import bits_over_steps, loss_gap, offsets_over_steps
from .reading import SearchTrace, read_assignments, read_record, read_traces
from .record import Record
from .report_export import export_section
from .report_settings import asked_and_ran, environment
from .tables import results_table
from .targets_table import targets_table
from .texts import spread_text
from .verdicts import strongest_notes, verdict_texts
from .zero_shot_tables import zero_shot_table


def unit_format(unit: str, assignment: Mapping[str, Any]) -> str | None:
    """Final format of a unit: a layer name, layer names joined by `+` or `,`, or `parent.{a,b}`, of experts also their
    path or one name for all of them; with `:weight` or `:input` behind it where operands are separate.

    None when no layer of that name is in the assignment.
    """
    unit, _, operand = unit.partition(":")
    formats = operand_formats(assignment)["input" if operand == "input" else "weight"]
    parent, brace, inner = unit.partition("{")
    names = (
        [parent + leaf for leaf in inner.rstrip("}").split(",")]
        if brace
        else unit.replace("+", ",").split(",")
    )
    wanted = {name.strip() for name in names}
    chosen = {formats[name] for name in wanted if name in formats} or {
        block_format
        for layer, block_format in formats.items()
        if experts_path(layer) in wanted or of_all_experts(layer) in wanted
    }
    return chosen.pop() if len(chosen) == 1 else None


def _headline(record: Record, groups: Sequence[Group]) -> Html:
    """The verdict, then what limits it: stronger opponents, the note on the model."""
    texts = verdict_texts(record)
    if not texts:
        perplexities = (
            (g, g.statistic("perplexity")) for g in groups if not g.method.is_unquantized
        )
        known = [
            f"{g.name}: perplexity {spread_text(p)}" for g, p in perplexities if p.mean is not None
        ]
        texts = [
            *known[:1],
            "No dMX result stands beside a heuristic's at the same budget, so there is no verdict.",
        ]
    notes = strongest_notes(groups)
    if record.model.note:
        notes.append(f"{record.model.id}: {record.model.note}")
    head, *more = texts
    return Html(
        el("h1", head)
        + el("ul", (el("li", text) for text in more), cls="more") * bool(more)
        + "".join(el("p", note, cls="note") for note in notes)
    )


def _pareto_section(groups: Sequence[Group]) -> Html | None:
    figure = pareto(groups)
    if figure is None:
        return None
    pictures = [
        picture(
            figure, "Perplexity over bits; lower left is better. Grey: one format for all layers."
        )
    ]
    if (near := pareto(groups, zoom=True)) is not None:
        seeds = any(len(group.rows) > 1 for group in groups)
        bars = " Marks are means, bars the standard deviation over seeds." if seeds else ""
        pictures.append(picture(near, f"The searches alone, from near.{bars}"))
    return el("div", pictures, cls="figures")


def _thresholds(assignment: Mapping[str, Any] | None) -> tuple[float, ...]:
    """Raw offsets where the hard choice changes; none where no family is recorded."""
    family = ((assignment or {}).get("search") or {}).get("family")
    return raw_thresholds(get_family(family)) if family else ()


def _moved_afterwards(
    ends: np.ndarray, unit_formats: Sequence[str | None], assignment: Mapping[str, Any]
) -> str:
    """A sentence for a caption on lines that do not end where their colour says; empty where all do.

    Args:
        ends: (units,) raw offsets after the last step.
    """
    search = assignment.get("search") or {}
    if not search.get("family"):
        return ""
    family = get_family(search["family"])
    rank = {f.name: i for i, f in enumerate(family.formats)}
    final = np.array([rank.get(name or "", -1) for name in unit_formats])
    own = harden(ends.astype(np.float64), family)
    known = final >= 0
    counts = {
        "below": np.count_nonzero(known & (final > own)),
        "above": np.count_nonzero(known & (final < own)),
    }
    by = "the projection to the budget"
    if search.get("polish_rounds") or search.get("kept") in ("scores", "fisher"):
        by = "what chose after the descent"
    moved = [
        f"{n} {'line ends' if n == 1 else 'lines end'} {side} the dashed line of {'its' if n == 1 else 'their'} format: {by} "
        f"{'raised' if side == 'below' else 'lowered'} {'it' if n == 1 else 'them'}"
        for side, n in counts.items()
        if n
    ]
    return "".join(f" {text}." for text in moved)


def _trace_pictures(trace: SearchTrace) -> list[Html]:
    pictures = []
    if trace.history is not None:
        pictures.append(
            picture(
                bits_over_steps(trace.history, trace.budget),
                "Average bits: soft (annealed), hard (thresholded), projected (within budget).",
            )
        )
        if (figure := loss_gap(trace.history)) is not None:
            pictures.append(
                picture(figure, "Loss on the held batch; below, hard and projected minus soft.")
            )
    if trace.raw is not None:
        colours = [unit_format(unit, trace.assignment or {}) for unit in trace.units]
        caption = (
            f"Raw offset of each of the {len(trace.units)} units, coloured by its final format. "
            "Dashed: where the hard choice goes from one format to the next."
            + _moved_afterwards(trace.raw[-1], colours, trace.assignment or {})
        )
        figure = offsets_over_steps(trace.raw, colours, _thresholds(trace.assignment))
        pictures.append(
            picture(figure, caption, kind="png")
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


def render(folder: Path) -> str:
    """The whole page as text; see `write_report`."""
    record = read_record(folder)
    groups = group_rows(record.rows)
    assignments = read_assignments(folder, record.rows)
    traces = read_traces(folder, groups, assignments)
    model = record.model.id
    sections = [
        section("Exported files", export_section(record)),
        section("Results", results_table(groups)),
        section("Zero-shot", zero_shot_table(groups)),
        section("Perplexity and bits", _pareto_section(groups)),
        section("The search, step by step", _search_section(traces) if traces else None),
        section(
            "Formats by block and projection",
            map_section(groups, assignments) if assignments else None,
        ),
        section("Where searches agree", agreement_section(groups, assignments)),
        section(
            "Who can load the result", targets_table(groups, assignments) if assignments else None
        ),
        section("What was asked and what ran", asked_and_ran(record)),
        section("Environment", environment(record)),
    ]
    return page(
        f"dMX report: {model}",
        " · ".join((model, record.command, record.finished)),
        record.warnings,
        _headline(record, groups),
        sections,
        style="".join(f".f-{n}{{background:{c}}}" for n, c in FORMAT_COLOURS.items()),
    )


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
