"""docs/results/quality_ablation.md: settings of the search, on the validation text."""

from __future__ import annotations

from ..groups import budget_cell
from ..markdown import markdown
from ..pooling import Tables, by_text, unquantized
from ..texts import spread_text
from .cells import best_heuristic, by_budget, mean_perplexity, percent_text, references


def ablation_page(tables: Tables) -> str | None:
    """None without a search on a validation text."""
    shown = {t: g for t, g in tables.items() if t.is_validation and any(x.budget for x in g)}
    if not shown:
        return None
    lines = [
        "# quality: settings of the search",
        "",
        "Appendix of [quality](quality.md), which says how it was measured. On the validation text, the only one that "
        "settings were chosen on; a method's name says in what it differs from `search=exact` (with a learned "
        "rotation from `search=learned`).",
    ]
    for of, name in by_text(shown):
        first = next(iter(of))
        groups = [g for part in of.values() for g in part]
        line = references([*groups, *unquantized(tables, first.model, first.text)])
        lines += ["", f"## {name}", "", *([f"{line}.", ""] if line else []), *ablation(of)]
    return "\n".join(lines) + "\n"


def ablation(tables: Tables) -> list[str]:
    """Every method by setting and budget, the best first."""
    rows = []
    for table, groups in tables.items():
        for group in sorted(groups, key=lambda g: (by_budget(g)[0], mean_perplexity(g))):
            if group.budget is None or not group.method.is_searched:
                continue
            best = best_heuristic(group.budget, groups)
            seconds = group.statistic("search_seconds").mean
            rows.append(
                [
                    table.setting,
                    group.method.short_label,
                    budget_cell(group.budget),
                    len(group.rows),
                    spread_text(group.statistic("perplexity")),
                    "no heuristic" if best is None else percent_text(group, best),
                    "–" if seconds is None else f"{seconds:.0f}",
                ]
            )
    head = (
        "setting",
        "method",
        "budget",
        "runs",
        "perplexity",
        "minus best heuristic, %",
        "search, s",
    )
    return markdown(head, rows)
