"""Mixtures of experts in quality.md: those of a block as one unit beside every expert as its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from dmx.searching.unreached import FEW_TOKENS

from ..groups import Group, budget_cell
from ..markdown import markdown
from ..pooling import Table, Tables, ordered, unquantized
from .cells import best_heuristic, by_budget, mean_perplexity, percent_text, references, runs_text


def experts_tables(tables: Tables, everything: Tables) -> list[str]:
    """Methods under both kinds of units, and the tokens that reached the experts; nothing where no row counted such
    tokens.

    Args:
        tables: of one model.
        everything: all, for its rows in bf16.
    """
    rows, full, known = [], [], []
    for table, groups in ordered(tables):
        alike = _of_blocks(table, tables)
        for group in sorted((g for g in groups if tokens_of(g)), key=by_budget):
            full = unquantized(everything, table.model, table.text)
            known.append(group)
            rows.append(
                [
                    "one unit" if table.shared.experts is None else "each a unit",
                    group.method.short_label,
                    budget_cell(group.budget),
                    units_of_experts(group),
                    f"{group.statistic('element_bits').mean:.3f}",
                    runs_text(group),
                    percent_text(group, full[0]) if full else "–",
                    percent_text(group, alike.get((group.method.short_label, group.budget))),
                ]
            )
    if not rows:
        return []
    head = (
        "experts of a block", "method", "budget", "their units", "element_bits", "perplexity", "minus bf16, %",
        "minus one unit, %",
    )  # fmt: skip
    line = references(full)
    note = [f"Perplexity, runs in brackets. {_units_text(known)}", _spread(tables)]
    lines = [*([f"{line}.", ""] if line else []), *markdown(head, rows), ""]
    return [*lines, " ".join([*note, *_unreached(known)]), "", *_tokens_table(known[0])]


def tokens_of(group: Group) -> Mapping[str, Sequence[int]] | None:
    """By block, of the first run: seeds draw other batches of the same text, which moves the counts a little."""
    return group.rows[0].expert_tokens


def _counts(group: Group) -> list[int]:
    """Of every expert."""
    return [count for counts in (tokens_of(group) or {}).values() for count in counts]


def units_of_experts(group: Group) -> int:
    """Choices that are made for experts: two a block, or of every expert that a token reached."""
    if group.method.experts is None:
        return 2 * len(tokens_of(group) or {})
    parts = 3 if _are_apart(group) else 2
    return parts * sum(count > 0 for count in _counts(group))


def _are_apart(group: Group) -> bool:
    """Whether gate and up of an expert are units of their own; those of a block are one layer."""
    return group.method.experts is not None and group.method.units != "fused"


def _units_text(groups: Sequence[Group]) -> str:
    text = "Units: one for gate/up, one for down"
    if any(map(_are_apart, groups)):
        text += "; of an expert whose layers choose by themselves one each for gate, up and down"
    return f"{text}."


def _of_blocks(table: Table, tables: Tables) -> dict[tuple[object, ...], Group]:
    """For a table of experts that choose: the groups of the same setting whose experts share their choices."""
    if table.shared.experts is None:
        return {}
    alike = tables.get(replace(table, shared=replace(table.shared, experts=None)), ())
    return {(g.method.short_label, g.budget): g for g in alike}


def _spread(tables: Tables) -> str:
    """How far dMX and the best heuristic of the same units, and all choices, are apart."""
    pairs = [
        (mean_perplexity(group), mean_perplexity(best))
        for groups in tables.values()
        for group in groups
        if group.method.is_dmx and (best := best_heuristic(group.budget, groups)) is not None
    ]
    if not pairs:
        return ""
    apart = 100 * max(abs(ours / theirs - 1) for ours, theirs in pairs)
    return f"dMX and the best heuristic of the same units are {apart:.2f} % apart at most."


def _unreached(groups: Sequence[Group]) -> list[str]:
    """What sets the two kinds of units apart besides their number."""
    said = []
    bits: dict[bool, list[float]] = {True: [], False: []}
    for group in groups:
        mean = group.statistic("element_bits").mean
        if mean is not None:
            bits[group.method.experts is None].append(mean)
    if all(bits.values()) and min(bits[True]) < min(bits[False]):
        said.append(
            f"Units of a block are coarse: choices reach {min(bits[True]):.3f} bits where those for each expert reach "
            f"{min(bits[False]):.3f}, so the two are not of equal bits."
        )
    lost = next((n for g in groups if g.method.experts and (n := _counts(g).count(0))), 0)
    if lost:
        said.append(
            f"Experts without a token: {lost}. As units of their own they stay in BF16, outside the budget; in a block's "
            "unit they have its format."
        )
    return said


def _tokens_table(group: Group) -> list[str]:
    rows = [
        [
            path.removesuffix(".experts"),
            *(f"{number:,.0f}" for number in (min(counts), median(counts), max(counts))),
            sum(count < FEW_TOKENS for count in counts),
        ]
        for path, counts in (tokens_of(group) or {}).items()
    ]
    head = ("block", "fewest", "median", "most", f"experts with fewer than {FEW_TOKENS}")
    note = f"Calibration tokens that reached an expert, of {len(_counts(group))} experts; a token counts for each that it goes to."
    return [*markdown(head, rows), "", note]
