"""The best of docs/results in one table: every setting of the main model, and the rows that README shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..groups import Group, budget_cell, group_rows
from ..markdown import markdown
from ..pooling import (
    FINEST,
    Presets,
    Table,
    Tables,
    main_place,
    model_name,
    ordered,
    pooled,
    text_name,
    unquantized,
)
from ..record import USUAL_FAMILY, Limit, Method, Record
from ..stages import LEARNED
from .cells import best_heuristic, mean_perplexity, references, runs_text


def main_tables(tables: Tables) -> dict[Table, Sequence[Group]]:
    """Of the main model and text, what is unusual in family, scale rules, transform and weights alone."""
    place = main_place(tables)
    return {
        table: groups
        for table, groups in ordered(tables)
        if (table.model, table.text) == place and table.is_usual(*FINEST)
    }


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
_DMX = Method(search="differentiable", quantized="W+A", family=USUAL_FAMILY, units="layer")
_LEARNED = Method(
    search="joint",
    weights="learned",
    quantized="W+A",
    family=USUAL_FAMILY,
    units="layer",
    path="line",
    scale_rules="mxfp4 even",
)
README_METHODS = (
    _DMX,
    replace(_DMX, weights="gptq"),
    replace(_DMX, transform="hadamard_block", weights="gptq"),
    _LEARNED,
    replace(_LEARNED, transform="hadamard_block", stage="950 steps"),
)
README_FORMATS = ("mxfp4", "mxfp6_e2m3")
"""Of the uniform formats those that searches choose from."""


def readme_table(records: Sequence[Record], presets: Presets, uniform: Record | None) -> list[str]:
    """Perplexity by element bits: bf16 and uniform formats at theirs, searches at three budgets.

    Args:
        records: what is pooled.
        uniform: a record with one format everywhere, of the same model and text.
    """
    tables = pooled(records, presets)
    place, shown = main_place(tables), main_tables(tables)
    full = unquantized(tables, *place)[:1]
    lines: list[tuple[str, dict[float, float]]] = []
    lines += [("bf16", {16.0: mean_perplexity(g)}) for g in full]
    flat = group_rows(uniform.rows) if uniform else []
    known = {str(g.method.format): g for g in flat if g.method.format in README_FORMATS}
    bits = {g.statistic("element_bits").mean or 0.0: mean_perplexity(g) for g in known.values()}
    lines.append((f"uniform {', '.join(known)}", bits))
    every = {(g.budget, g.label): g for groups in shown.values() for g in groups}
    for method in README_METHODS:
        table = Table.of(*place, method)
        if method in (_DMX, _LEARNED):
            best = {
                x: best_heuristic(Limit(x, "element_bits"), shown.get(table, ()))
                for x in README_LIMITS
            }
            name = "best heuristic" if table.is_usual() else f"best heuristic, {table.setting}"
            lines.append((name, {x: mean_perplexity(g) for x, g in best.items() if g}))
        of = {x: every.get((Limit(x, "element_bits"), method.label)) for x in README_LIMITS}
        lines.append((method.label, {x: mean_perplexity(g) for x, g in of.items() if g}))
    columns = sorted({x for _, values in lines for x in values})
    rows = [[name, *(_cell(values.get(x)) for x in columns)] for name, values in lines if values]
    note = (
        f"Perplexity of {place[0]} on {place[1]} by bits an element, scales not counted, of weights and "
        "inputs; lower is better. The heuristic is the best of those that were run at each budget."
    )
    if any(name == _LEARNED.label and values for name, values in lines):
        note += f" Weights learned in {LEARNED['learned'].steps} steps where nothing else is said."
    text = next(r.data["evaluation"] for r in records if (model_name(r), text_name(r)) == place)
    if uniform is not None and (other := uniform.data["evaluation"]).sha256 != text.sha256:
        own = next(mean_perplexity(g) for g in flat if g.method.is_unquantized)
        note += (
            f" Uniform formats: of an earlier reading of the text, {other.tokens:,} tokens instead of "
            f"{text.tokens:,}; bf16 has {own:.2f} there."
        )
    return [*markdown(["", *(f"{x:g} bits" for x in columns)], rows), "", note]


def _cell(perplexity: float | None) -> str:
    return "" if perplexity is None else f"{perplexity:.{1 if perplexity >= 100 else 2}f}"
