"""The projection of a choice onto a budget.

`average <= limit` holds for every projected choice, and it is maximal: no single raise of a unit
to its next candidate with a gain > 0 still fits.
"""

import heapq
from collections.abc import Sequence

import numpy as np

from dmx.assignment.budget import Budget
from dmx.assignment.space import SearchSpace


def project(
    space: SearchSpace,
    budget: Budget,
    choice: Sequence[int] | np.ndarray,
    preference: np.ndarray,
    *,
    gain: np.ndarray | None = None,
) -> np.ndarray:
    """Nearest choice within the budget that no single useful raise would leave within it.

    Over budget, the step with the smallest preference is taken back; then, while there is room,
    the step with the largest preference that still fits is taken. Ties go by unit name.

    Args:
        choice: (U,) candidate index of each unit.
        preference: (U, F-1), how much unit u wants the step from candidate s to s+1.
        gain: (U, F-1), estimated gain of the step; steps with gain <= 0 are not taken to fill
            room. None: every step gains.

    Returns:
        (U,) int64.

    Raises:
        BudgetError: the budget is below the cheapest choice.
    """
    space.check_budget(budget, warn=False)
    chosen = np.array(choice, dtype=np.int64).tolist()
    top = len(space.formats) - 1
    # Sums of costs are exact, in any order: a running sum equals `space.average` to the bit.
    costs = space.costs(budget.unit)
    total = float(costs[np.arange(len(chosen)), chosen].sum()) + space.fixed_bits(budget.unit)
    cost = np.diff(costs, axis=1).tolist()
    wish = preference.tolist()
    # Rank breaks ties: an earlier name is raised first and lowered last.
    rank = space.name_rank.tolist()

    def fits(weighted_bits: float) -> bool:
        return weighted_bits / space.total_weight <= budget.limit

    lowest = [(wish[u][c - 1], -rank[u], u) for u, c in enumerate(chosen) if c > 0]
    heapq.heapify(lowest)
    while not fits(total):
        unit = heapq.heappop(lowest)[2]
        chosen[unit] -= 1
        total -= cost[unit][chosen[unit]]
        if chosen[unit] > 0:
            heapq.heappush(lowest, (wish[unit][chosen[unit] - 1], -rank[unit], unit))

    def is_useful(unit: int) -> bool:
        return chosen[unit] < top and (gain is None or gain[unit, chosen[unit]] > 0)

    highest = [(-wish[u][c], rank[u], u) for u, c in enumerate(chosen) if is_useful(u)]
    heapq.heapify(highest)
    while highest:
        unit = heapq.heappop(highest)[2]
        raised = total + cost[unit][chosen[unit]]
        if not fits(raised):
            continue  # nor will it later: the room only shrinks
        chosen[unit], total = chosen[unit] + 1, raised
        if is_useful(unit):
            heapq.heappush(highest, (-wish[unit][chosen[unit]], rank[unit], unit))
    return np.array(chosen, dtype=np.int64)


def is_maximal(
    space: SearchSpace, budget: Budget, choice: np.ndarray, *, gain: np.ndarray | None = None
) -> bool:
    """Whether the choice meets the budget and no single raise with a gain > 0 still does."""
    if space.average(choice, budget.unit) > budget.limit:
        return False
    for unit in np.flatnonzero(np.asarray(choice) < len(space.formats) - 1):
        if gain is not None and gain[unit, choice[unit]] <= 0:
            continue
        raised = np.array(choice)
        raised[unit] += 1
        if space.average(raised, budget.unit) <= budget.limit:
            return False
    return True
