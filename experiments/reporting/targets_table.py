"""Who can load the assignments of a run: export targets and their loaders, by method."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dmx.assignment.runtimes import (
    CARDS,
    HOW_IT_RUNS,
    NOT_LOADED,
    RAN,
    SOURCE,
    how_it_runs,
    kind_of,
    kinds_of,
)
from dmx.assignment.targets import TARGETS, obstacles
from dmx.transforms.stage import RUN_TIME_TRANSFORMS

from .groups import Group
from .html import Html, el, scroll_table
from .reading import Assignments
from .tables import limit_text

_MAX_REASONED_COLUMNS = 4


def targets_table(groups: Sequence[Group], assignments: Assignments) -> Html:
    """A row a loader, a column a method; a no says why."""
    shown = [g for g in groups if any(row.assignment for row in g.rows)]
    is_narrow = len(shown) > _MAX_REASONED_COLUMNS
    heads = (el("th", g.name, el("small", limit_text(g)), scope="col") for g in shown)
    lead = (el("th", "export target", scope="col"), el("th", "loads in", scope="col"))
    body = []
    for name, target in TARGETS.items():
        for loader in target.loaders:
            cells = []
            for group in shown:
                given = [assignments[row.assignment] for row in group.rows if row.assignment]
                reasons = [
                    obstacles(
                        a["formats"],
                        target,
                        loader,
                        a.get("unquantized") or (),
                        a.get("input_formats"),
                        is_rotated=(a.get("transform") or {}).get("name") in RUN_TIME_TRANSFORMS,
                    )
                    for a in given
                ]
                cells.append(_cell(reasons, is_narrow))
            body.append(el("tr", el("th", name, scope="row"), el("td", loader.name), cells))
    note = (
        "For the weights, and for inputs in other formats than these; a loader that also quantizes "
        "inputs applies its own scale rule. "
        "Layers in BF16 are left out of every target."
    )
    table = scroll_table(el("tr", lead, heads), body, cls="targets")
    mixtures = {
        _pairs(assignments[row.assignment]) for g in shown for row in g.rows if row.assignment
    }
    return el("div", table, el("p", note, cls="note"), _runs_table(mixtures))


Pairs = frozenset[tuple[str, str | None]]
"""Formats of weights and of their inputs; None where no engine tells the pair from weights alone."""


def _pairs(assignment: Mapping[str, Any]) -> Pairs:
    told = {kind for known in HOW_IT_RUNS.values() for kind in known}
    of_inputs = assignment.get("input_formats") or {}
    both = {(f, of_inputs.get(layer)) for layer, f in assignment["formats"].items() if f != "bf16"}
    return frozenset(pair if kind_of(*pair) in told else (pair[0], None) for pair in both)


def _runs_table(mixtures: Collection[Pairs]) -> Html | None:
    """How vLLM runs layers of these assignments, a row a card; layouts that hold none of the assignments have no row."""
    kinds = kinds_of(pair for mixture in mixtures for pair in mixture)
    body = []
    for target, loader in HOW_IT_RUNS:
        for card in CARDS:
            words = how_it_runs(target, loader, card, kinds)
            read = {f for f, word in words.items() if word != NOT_LOADED}
            if not any(mixture and read.issuperset(kinds_of(mixture)) for mixture in mixtures):
                continue
            cells = [el("td", words[f]) for f in kinds]
            body.append(
                el("tr", el("th", target, scope="row"), el("td", f"{loader}, {card}"), cells)
            )
    if not body:
        return None
    heads = [el("th", title, scope="col") for title in ("export target", "runs on", *kinds)]
    note = (
        f"What runs, which the folder does not decide alone: read in the source of {SOURCE}; {RAN}. "
        "All other loaders dequantize."
    )
    table = scroll_table(el("tr", heads), body, cls="targets")
    return el("div", table, el("p", note, cls="note"))


def _cell(reasons: Sequence[Sequence[str]], is_narrow: bool) -> Html:
    """Args:
    reasons: of each assignment, why the loader does not take it.
    """
    good = sum(not why for why in reasons)
    if good == len(reasons):
        return el("td", "✓ yes", cls="yes")
    first = next("; ".join(why) for why in reasons if why)
    word = "✗ no" if not good else f"{good} of {len(reasons)}"
    if is_narrow:
        return el("td", word, cls="no", title=first)
    return el("td", word, el("small", first), cls="no")
