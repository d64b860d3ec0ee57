"""What a run claims: each dMX result against the best heuristic at its budget, in a sentence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .differences import Difference, alike_in, paired_difference, reference_of
from .groups import Group, group_rows
from .record import HEURISTICS, Record, Row, Verdict, budget_text
from .texts import nats_text, spread_text, with_minus

STRONG = ("kl_per_bit", "fisher")
"""The heuristics that come out best nearly everywhere; a claim without them says little."""


def verdicts(rows: Iterable[Row]) -> list[Verdict]:
    """One verdict per dMX group that has a heuristic at its budget (`reference_of`); `beats` only
    beyond SIGNIFICANT standard errors."""
    groups = group_rows(rows)
    made = []
    for group in groups:
        reference = reference_of(group, groups)
        if not group.method.is_dmx or isinstance(reference, str):
            continue
        difference = paired_difference(group, reference)
        made.append(
            Verdict(
                text=_sentence(
                    group, reference, difference, len(alike_in(group, groups, HEURISTICS))
                ),
                difference_nats=difference.mean,
                stderr_nats=difference.stderr,
                beats=bool(difference.is_clear and (difference.mean or 0.0) < 0),
                budget=group.budget,
                against=reference.label,
            )
        )
    return made


def verdict_texts(record: Record) -> list[str]:
    """What a record's rows say, one for each dMX result; its stored verdict where they say nothing."""
    every = verdicts(record.rows) or filter(None, [record.verdict])
    return [verdict.text for verdict in every]


def worse_than_uniform(rows: Iterable[Row]) -> list[str]:
    """A warning for each searched row that one format everywhere beats on the same text at no more bits."""
    rows = list(rows)
    return [
        text for row in rows if row.method.is_searched and (text := _beaten(row, rows)) is not None
    ]


def _beaten(row: Row, rows: Sequence[Row]) -> str | None:
    if row.nll is None or row.element_bits is None:
        return None
    better = [
        other
        for other in rows
        if other.method.search == "uniform"
        and (other.method.quantized, other.method.net) == (row.method.quantized, row.method.net)
        and other.nll is not None
        and other.element_bits is not None
        and other.element_bits <= row.element_bits
        and other.nll < row.nll
    ]
    if not better:
        return None
    best = min(better, key=lambda other: other.nll or 0.0)
    seed = "" if row.seed is None else f", seed {row.seed}"
    return (
        f"{row.label} at {row.element_bits:.3f} element_bits{seed} has perplexity {row.perplexity:.4f}, worse than "
        f"{best.label} at {best.element_bits:.3f} with {best.perplexity:.4f}. Take that one, or give the search more "
        "calibration text or steps."
    )


def strongest_notes(groups: Sequence[Group]) -> list[str]:
    """`strongest_note` of all dMX results, each text once."""
    notes = [strongest_note(group, groups) for group in groups if group.method.is_dmx]
    return list(dict.fromkeys(note for note in notes if note))


def strongest_note(group: Group, groups: Sequence[Group]) -> str | None:
    """What the verdict on a dMX result leaves out: another search that is stronger than any heuristic, or that
    the strong heuristics were not run; None where it leaves out nothing."""
    others = [
        g
        for g in groups
        if g.place == group.place
        and g.method.is_searched
        and not g.method.is_dmx
        and g.statistic("perplexity").mean is not None
    ]
    best = min(others, key=lambda g: g.statistic("perplexity").mean or 0.0, default=None)
    if best is None:
        return None
    if best.method.is_heuristic:  # then it is the verdict's
        is_strong = any(g.method.search in STRONG for g in others)
        return (
            None if is_strong else f"{' and '.join(STRONG)}, which are stronger, were not run here."
        )
    difference = paired_difference(group, best)
    amount = with_minus(nats_text(difference.mean, difference.stderr))
    return f"Against {best.name}{budget_suffix(group)}, the strongest other search: {amount} nats/token."


def budget_suffix(group: Group) -> str:
    """`, ≤ 5 element_bits`; nothing without a budget."""
    return f", ≤ {group.budget}" if group.budget else ""


def _sentence(group: Group, reference: Group, difference: Difference, heuristics: int) -> str:
    where = f" at {budget_text(group.budget)}" if group.budget else ""
    opponent = reference.name
    if heuristics > 1:
        opponent += f", best of {heuristics} heuristics that were run,"
    ours, theirs = group.statistic("perplexity"), reference.statistic("perplexity")
    against = f"perplexity {spread_text(ours)} against {spread_text(theirs)}"
    if difference.mean is None or difference.stderr is None:
        claim = f"{group.name} and {opponent}{where} cannot be compared"
        return f"{claim}: {difference.reason}; {against}."
    side = "lower" if difference.mean < 0 else "higher"
    amount = f"{abs(difference.mean):.4f} ± {difference.stderr:.4f} nats/token {side}"
    if difference.mean == 0:
        amount = "equal"
    if not difference.is_clear:
        claim = f"tie: {group.name} and {opponent} cannot be told apart{where}"
    elif difference.mean < 0:
        claim = f"{group.name} beats {opponent}{where}"
    else:
        claim = f"{group.name} does not beat {opponent}{where}"
    seeds = min(len(group.seeds), len(reference.seeds))
    sample = f"{difference.windows} windows, {'one seed' if seeds == 1 else f'{seeds} seeds'}"
    return f"{claim}: loss {amount} (paired over {sample}), {against}."
