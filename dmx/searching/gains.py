"""What a polish knows of the steps of all units, and the choices that it proposes.

The additive model: near the choice at which they were measured, the differences of single steps add up. Its best
choice within the budget is found exactly, by `solve_knapsack`. What was measured of a step before counts half with
each new measurement on other batches: the differences of one choice are nearly those of the next, their noise is not.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from dmx.assignment.budget import Budget
from dmx.assignment.projection import project
from dmx.assignment.space import SearchSpace
from dmx.errors import BudgetError
from dmx.searching.knapsack import solve_knapsack

MEMORY = 0.5
"""Weight of what was known of a step against a new measurement on other batches."""
HANDFUL = 4
"""Changed units of the last proposals: two raises, each paid for by a lowering, or so."""
LAST_PROPOSALS = 16
"""How many of them are tried."""
STEP_RATIO = 16.0
"""What the gain of a step is divided by for the step above it: two more mantissa bits, a quarter of
the error, a sixteenth of its square. Only for steps that no measurement reaches."""


class Gains:
    """KL that each step of each unit saves, as measured so far.

    Args:
        remembers: False: each measurement replaces the last, as it is on the same batches.
    """

    def __init__(self, space: SearchSpace, budget: Budget, *, remembers: bool) -> None:
        self.space, self.budget, self.remembers = space, budget, remembers
        self.gain = np.zeros((len(space.units), len(space.formats) - 1))
        """(U, F-1), nats/token"""
        self.weight = np.zeros_like(self.gain)
        """(U, F-1) of the measurements in `gain`; 0: none, `gain` is extrapolated."""

    def learn(self, measured: np.ndarray) -> None:
        """Take (U, F-1) measured gains into `gain`. Steps that were never measured go on from the
        nearest of those that were, by STEP_RATIO."""
        is_new = np.isfinite(measured)
        old = self.weight * (MEMORY if self.remembers else 0.0)
        known = np.where(self.weight > 0, self.gain, np.nan)
        gain = np.where(is_new, (measured + old * self.gain) / (1.0 + old), known)
        self.weight = np.where(is_new, 1.0 + old, self.weight)
        for s in range(1, gain.shape[1]):
            above = np.where(gain[:, s - 1] > 0, gain[:, s - 1] / STEP_RATIO, gain[:, s - 1])
            gain[:, s] = np.where(np.isnan(gain[:, s]), above, gain[:, s])
        for s in reversed(range(gain.shape[1] - 1)):
            below = np.where(gain[:, s + 1] > 0, gain[:, s + 1] * STEP_RATIO, gain[:, s + 1])
            gain[:, s] = np.where(np.isnan(gain[:, s]), below, gain[:, s])
        self.gain = gain

    def scores(self, choice: np.ndarray) -> np.ndarray:
        """(U, F) by how much the KL rises with each unit at each candidate, the others as chosen, by
        `gain`; inf where that is extrapolated."""

        def to_own(values: np.ndarray) -> np.ndarray:
            """(U, F) sums of (U, F-1) steps between each candidate and a unit's own; negative below."""
            sums = np.concatenate([np.zeros((len(values), 1)), values.cumsum(axis=1)], axis=1)
            return sums - np.take_along_axis(sums, choice[:, None], axis=1)

        return np.where(to_own(self.weight == 0) == 0, -to_own(self.gain), np.inf)

    def preference(self) -> np.ndarray:
        """(U, F-1) KL saved per added bit, by `gain`."""
        preference: np.ndarray = self.gain / np.diff(self.space.costs(self.budget.unit), axis=1)
        return preference

    def maximal(self, choice: np.ndarray) -> np.ndarray:
        """The choice, within the budget and with the room used that `gain` says to use."""
        return project(self.space, self.budget, choice, self.preference(), gain=self.gain)

    def propose(
        self,
        choice: np.ndarray,
        scores: np.ndarray,
        size: int,
        excluded: Sequence[np.ndarray] = (),
    ) -> np.ndarray:
        """The best choice of the additive model with at most `size` units changed; not yet `maximal`."""
        return solve_knapsack(
            self.space, self.budget, scores, near=choice, most_changes=size, excluded=excluded
        )

    def next_best(self, choice: np.ndarray, scores: np.ndarray) -> Iterator[np.ndarray]:
        """Choices a handful of units away, in the order of the additive model."""
        excluded, seen = [choice], {tuple(choice)}
        for _ in range(LAST_PROPOSALS):
            try:
                excluded.append(self.propose(choice, scores, HANDFUL, excluded))
            except BudgetError:  # there is no other choice
                return
            candidate = self.maximal(excluded[-1])
            if tuple(candidate) not in seen:
                seen.add(tuple(candidate))
                yield candidate
