"""The best of docs/results in one table: every setting of the main model, and the rows that README shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..groups import Group, budget_cell, group_rows
from ..markdown import markdown
from ..pooling import Table, Tables, main_place, ordered, unquantized
from ..record import Limit, Method, Record
from .cells import best_heuristic, mean_perplexity, references, runs_text


def main_tables(tables: Tables) -> dict[Table, Sequence[Group]]:
    """Of the main model and text, what is unusual in transform and weights alone."""
    place = main_place(tables)
    return {
        table: groups for table, groups in ordered(tables)
        if (table.model, table.text) == place and table.is_usual("transform", "weights")
    }  # fmt: skip


def budgets_of(tables: Tables) -> list[Limit]:
    """All budgets of some tables, the smallest first."""
    return sorted({g.budget for groups in tables.values() for g in groups if g.budget})


def overview(tables: Tables) -> list[str]:
    """Of the main model and text: in each table the best heuristic and dMX, by budget."""
    shown = main_tables(tables)
    budgets = budgets_of(shown)
    rows = []
    for table, groups in shown.items():
        best = [best_heuristic(budget, groups) for budget in budgets]
        if any(best):
            cells = [runs_text(g, g.method.short_label if g else "") for g in best]
            rows.append([table.setting, "best heuristic", *cells])
        for label in dict.fromkeys(g.method.short_label for g in groups if g.method.is_dmx):
            of = {g.budget: g for g in groups if g.method.short_label == label}
            rows.append([table.setting, label, *(runs_text(of.get(b)) for b in budgets)])
    if not rows:
        return []
    full = references(unquantized(tables, *main_place(tables)))
    note = "Mean perplexity, runs in brackets; lower is better. Plain: no transform, weights rounded to nearest."
    head = ["setting", "method", *map(budget_cell, budgets)]
    return [*markdown(head, rows), "", f"{note} {full}." if full else note]


# --- README ----------------------------------------------------------------------------------------

README_LIMITS = (4.5, 5.0, 5.5)
"""element_bits of the budgets that README shows."""
_DMX = Method(search="differentiable", quantized="W+A", units="layer")
README_METHODS = (
    _DMX,
    replace(_DMX, polish=True),
    replace(_DMX, weights="gptq"),
    replace(_DMX, transform="hadamard_block", weights="gptq"),
    replace(_DMX, transform="learned", weights="gptq"),
)
README_FORMATS = ("mxfp4", "mxfp6_e2m3")
"""Of the uniform formats those that searches choose from."""


def readme_table(tables: Tables, uniform: Record | None) -> list[str]:
    """Perplexity by element bits: bf16 and uniform formats at theirs, searches at three budgets.

    Args:
        uniform: a record with one format everywhere, of the same model and text.
    """
    place, shown = main_place(tables), main_tables(tables)
    full = unquantized(tables, *place)[:1]
    flat = group_rows(uniform.rows) if uniform else []
    flat = [g for g in flat if g.method.format in README_FORMATS]
    lines: list[tuple[str, dict[float, float]]] = []
    lines += [("bf16", {16.0: mean_perplexity(g)}) for g in full]
    lines += [
        (g.label, {g.statistic("element_bits").mean or 0.0: mean_perplexity(g)}) for g in flat
    ]
    usual = next((groups for table, groups in shown.items() if table.is_usual()), ())
    best = {x: best_heuristic(Limit(x, "element_bits"), usual) for x in README_LIMITS}
    lines.append(("best heuristic", {x: mean_perplexity(g) for x, g in best.items() if g}))
    every = {(g.budget, g.label): g for groups in shown.values() for g in groups}
    for label in (method.label for method in README_METHODS):
        of = {x: every.get((Limit(x, "element_bits"), label)) for x in README_LIMITS}
        lines.append((label, {x: mean_perplexity(g) for x, g in of.items() if g}))
    bits = sorted({x for _, values in lines for x in values})
    rows = [[name, *(_cell(values.get(x)) for x in bits)] for name, values in lines if values]
    note = (
        f"Perplexity of {place[0]} on {place[1]} by bits an element, scales not counted, of weights and "
        "inputs; lower is better. The heuristic is the best of those that were run at each budget."
    )
    if uniform is not None and flat and full:
        own = next(g for g in group_rows(uniform.rows) if g.method.is_unquantized)
        tokens = {"uniform": flat[0].rows[0].tokens, "others": full[0].rows[0].tokens}
        note += (
            f" Uniform formats were measured on {tokens['uniform']:,} tokens of this text instead of "
            f"{tokens['others']:,} (bf16 there {mean_perplexity(own):.2f})."
        ) * (tokens["uniform"] != tokens["others"])
    return [*markdown(["", *(f"{x:g} bits" for x in bits)], rows), "", note]


def _cell(perplexity: float | None) -> str:
    return "" if perplexity is None else f"{perplexity:.{1 if perplexity >= 100 else 2}f}"
