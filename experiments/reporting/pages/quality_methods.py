"""docs/results/quality_methods.md: every method at every budget, and where choices spend their bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..differences import is_alike
from ..groups import Group, budget_cell
from ..markdown import markdown
from ..pooling import Table, Tables, by_text, ordered, unquantized
from ..projections import PROJECTIONS
from .cells import by_budget, cheapest_format, formats_of, perplexity_text, references
from .glance import is_flat, only_format


def methods_page(tables: Tables, test: Tables) -> str:
    """Args:
    tables: all, for the rows in bf16.
    test: those that are shown.
    """
    lines = [
        "# quality: every method",
        "",
        "Appendix of [quality](quality.md), which says how it was measured. Perplexity ± standard deviation over "
        "seeds, runs in brackets; below, which layers have more than the cheapest format of their family, MXFP4 where "
        "nothing else is said.",
    ]
    for table, groups in ordered(test):
        line = references([*_uniform(test, table), *unquantized(tables, table.model, table.text)])
        lines += [
            "",
            f"## {table.title}",
            "",
            *([f"{line}.", ""] if line else []),
            *method_table(groups),
        ]
    for of, name in by_text(test):
        if part := kept_high(of):
            lines += ["", f"## Layers above the cheapest format, %: {name}", "", *part]
    return "\n".join(lines) + "\n"


def _uniform(tables: Tables, table: Table) -> list[Group]:
    """One format everywhere, of those that searches of the table choose from; of its own those too that no table has."""
    return [
        g
        for other, groups in tables.items()
        for g in groups
        if g.method.is_uniform and (other.model, other.text) == (table.model, table.text)
        if _chooses(table, g) or (other == table and not any(_chooses(t, g) for t in tables))
    ]


def _chooses(table: Table, uniform: Group) -> bool:
    """Whether searches of the table choose from formats with this one, with all else alike."""
    is_known = uniform.method.format in {f.name for f in formats_of(table.shared)}
    return is_known and is_alike(uniform.method, table.shared)


def method_table(groups: Sequence[Group]) -> list[str]:
    """Method x budget."""
    searched = [g for g in groups if g.budget is not None and g.method.is_searched]
    budgets = sorted({g.budget for g in searched if g.budget})
    cells = {(g.method.short_label, g.budget): g for g in searched}
    ours = {g.method.short_label: g.method.is_dmx for g in searched}
    rows = []
    for label in sorted(ours, key=lambda name: ours[name]):
        of = [cells.get((label, budget)) for budget in budgets]
        rows.append([label, *(_cell(g) if g else "–" for g in of)])
    return markdown(["method", *map(budget_cell, budgets)], rows)


def _cell(group: Group) -> str:
    """Says where all layers have one format: the search is then another name of it."""
    name = only_format(group)
    return f"{perplexity_text(group)} ({len(group.rows)}){f', all {name}' if name else ''}"


def kept_high(tables: Tables) -> list[str]:
    """Of one model: share of layers above the cheapest format by projection; mean over runs."""
    rows = []
    counted = [
        projection
        for groups in tables.values()
        for g in groups
        for row in g.rows
        for projection in (row.format_counts or {}).get("weight", {})
    ]
    usual = [p for p in PROJECTIONS.values() if p in counted]
    projections = [*usual, *(p for p in dict.fromkeys(counted) if p not in usual)]
    for table, groups in ordered(tables):
        if (
            table.shared.weights != "nearest" or table.shared.quantized == "W"
        ):  # the same choices again
            continue
        sides = ("weight", "input") if table.shared.choices == "separate" else ("weight",)
        for group in sorted(groups, key=by_budget):
            counts = [row.format_counts for row in group.rows if row.format_counts]
            if group.budget is None or not group.method.is_searched or not counts or is_flat(group):
                continue
            cheapest = cheapest_format(group.method).name
            for side in sides:
                shares = [
                    [
                        _share_above(cheapest, of)
                        for c in counts
                        if (of := c.get(side, c["weight"]).get(p))
                    ]
                    for p in projections
                ]
                if any(min(of, default=1) < 1 for of in shares):  # else nothing was chosen
                    side_text = f", {side}s" if len(sides) > 1 else ""
                    rows.append(
                        [
                            table.setting,
                            group.method.short_label,
                            budget_cell(group.budget) + side_text,
                            *(f"{100 * sum(of) / len(of):.0f}" if of else "–" for of in shares),
                        ]
                    )
    head = ("setting", "method", "budget", *projections)
    note = "Share of the layers of each projection, mean over runs."
    return [*markdown(head, rows), "", note] if rows else []


def _share_above(cheapest: str, formats: Mapping[str, int]) -> float:
    total = sum(formats.values())
    return 1 - formats.get(cheapest, 0) / total if total else 0.0
