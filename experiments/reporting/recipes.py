"""Recipes of mor against BF16, by the loss at the end of training. Numbers and a sentence."""

from __future__ import annotations

from collections.abc import Iterable

from .groups import group_recipes
from .record import RecipeComparison, TrainingRow

TOLERANCE = 0.005
"""Share of BF16's loss by which MoR may be worse and count as equal."""
BASELINE = "bf16"


def comparison(rows: Iterable[TrainingRow]) -> list[RecipeComparison]:
    """Final validation loss of each recipe against bf16's, on the seeds that both have.

    Within the tolerance is what is worse by no more than the larger of `TOLERANCE` and two standard
    errors of the difference of means over seeds (known from two seeds each), or is better. A recipe
    whose loss is not finite on a seed where the baseline's is, is outside. Empty without a baseline.
    """
    groups = group_recipes(rows)
    base = next((g for g in groups if g.label == BASELINE), None)
    entries: list[RecipeComparison] = []
    for group in groups:
        if base is None or group is base:
            continue
        finite = {row.seed for row in base.rows if row.nll is not None}
        seeds = tuple(sorted({row.seed for row in group.rows} & finite))
        lost = [row.seed for row in group.rows if row.seed in finite and row.nll is None]
        ours, theirs = (g.on_seeds(seeds).statistic("nll") for g in (group, base))
        if lost or ours.mean is None or theirs.mean is None:
            reason = f"no seed in common with {BASELINE}"
            if lost:
                reason = f"seed {', '.join(map(str, lost))}: loss is not finite"
            elif not finite:
                reason = f"the loss of {BASELINE} is not finite"
            entries.append(
                RecipeComparison(recipe=group.label, seeds=seeds, within=not lost, reason=reason)
            )
            continue
        stderr = None
        if ours.spread is not None and theirs.spread is not None:
            stderr = (ours.spread**2 / ours.count + theirs.spread**2 / theirs.count) ** 0.5
        allowed = max(TOLERANCE * theirs.mean, 2 * (stderr or 0.0))
        difference = ours.mean - theirs.mean
        entries.append(RecipeComparison(
            recipe=group.label, seeds=seeds, within=difference <= allowed, difference_nats=difference,
            difference_share=difference / theirs.mean, stderr_nats=stderr, allowed_nats=allowed,
            baseline_nats=theirs.mean,
        ))  # fmt: skip
    return entries


def comparison_text(entry: RecipeComparison) -> str:
    """One sentence."""
    if entry.difference_nats is None or entry.difference_share is None:
        if entry.within:
            return f"{entry.recipe}: no comparison with {BASELINE} ({entry.reason})."
        return f"{entry.recipe} is outside the tolerance of {BASELINE}: {entry.reason}."
    verb = "is within" if entry.within else "is outside"
    spread = "" if entry.stderr_nats is None else f" ± {entry.stderr_nats:.4f}"
    return (
        f"{entry.recipe} {verb} the tolerance of {BASELINE}: {entry.difference_nats:+.4f}{spread} "
        f"nats/token ({100 * entry.difference_share:+.2f} %), allowed {entry.allowed_nats:+.4f}."
    )
