"""How far the choices of several searches agree, and where each spends its bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from dmx.formats import FORMATS

from .groups import Group
from .html import Html, el, scroll_table
from .maps import chosen_formats
from .projections import locate
from .reading import Assignments
from .record import Limit, budget_text


def _sizes(assignment: Mapping[str, Any]) -> dict[str, int]:
    return {name: shape[0] * shape[1] for name, shape in assignment["shapes"].items()}


def agreement(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    """Share of the weights, and of the inputs by the weights where they were chosen, that two assignments
    of one model give the same format, 0 to 1."""
    sizes, (ours, theirs) = _sizes(a), (chosen_formats(x) for x in (a, b))
    same = sum(n for k, n in sizes.items() for o in ours if ours[o][k] == theirs[o].get(k))
    return same / (len(ours) * sum(sizes.values()))


def raised_by_projection(assignment: Mapping[str, Any]) -> dict[str, float]:
    """projection -> share of its operands, by weights, above the assignment's smallest format, 0 to
    1."""
    bits = [
        {k: FORMATS[f].element_bits for k, f in formats.items()}
        for formats in chosen_formats(assignment).values()
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


def agreement_section(groups: Sequence[Group], assignments: Assignments) -> list[Html] | None:
    """For each budget: how much two searches agree, and where each spends its bits (first seed)."""
    by_budget: dict[tuple[Limit, str, str | None], list[tuple[str, Mapping[str, Any]]]] = {}
    for group in groups:
        path = group.rows[0].assignment
        if group.method.is_searched and path is not None and group.budget:
            key = group.budget, group.method.choices, group.method.input_format
            by_budget.setdefault(key, []).append((group.name, assignments[path]))
    parts: list[Html] = []
    for (budget, _, _), searches in by_budget.items():
        if len(searches) < 2 or len({frozenset(a["formats"]) for _, a in searches}) > 1:
            continue
        projections = list(raised_by_projection(searches[0][1]))
        head = el(
            "tr",
            el("th", f"≤ {budget_text(budget)}"),
            (el("th", f"as {name}") for name, _ in searches),
            (el("th", f"{p} raised") for p in projections),
        )
        body = []
        for name, own in searches:
            raised = raised_by_projection(own)
            cells = [el("td", f"{agreement(own, other):.0%}") for _, other in searches]
            cells += [el("td", f"{raised.get(p, 0.0):.0%}") for p in projections]
            body.append(el("tr", el("td", name), cells))
        parts.append(scroll_table(head, body))
    if not parts:
        return None
    note = "Shares of the weights; first seed of each. “as”: same format as that search gives."
    return [*parts, el("p", note, cls="note")]
