"""The best choice of an additive model within a budget, exactly: a mixed integer program for scipy's HiGHS."""

from collections.abc import Sequence

import numpy as np

from dmx.assignment.budget import Budget
from dmx.assignment.space import SearchSpace
from dmx.errors import BudgetError


def solve_knapsack(
    space: SearchSpace,
    budget: Budget,
    scores: np.ndarray,
    *,
    near: np.ndarray | None = None,
    most_changes: int | None = None,
    excluded: Sequence[np.ndarray] = (),
) -> np.ndarray:
    """The choice with the least sum of scores within the budget, exactly.

    Args:
        scores: (U, F) float64, score of each unit at each candidate; inf is never chosen.
        near, most_changes: only choices that differ from `near` (U,) in so many units at most.
        excluded: choices that may not come out.

    Returns:
        (U,) int64.

    Raises:
        BudgetError: no choice fits.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # a second that few commands need

    space.check_budget(budget, warn=False)
    n_units, n_formats = scores.shape
    costs = space.costs(budget.unit)
    cost = costs - costs[:, :1]
    room = (
        budget.limit * space.total_weight
        - space.average([0] * n_units, budget.unit) * space.total_weight
    )
    # In units of the largest cost, so that the solver's absolute tolerance means something.
    unit_cost = cost.max() or 1.0
    one_each = np.kron(np.eye(n_units), np.ones(n_formats))
    # Scores span many decades; the solver's tolerances are absolute.
    allowed = np.isfinite(scores)
    saved = np.where(allowed, scores.min(1, keepdims=True) - scores, 0.0)
    constraints = [
        LinearConstraint(cost.ravel()[None] / unit_cost, -np.inf, room / unit_cost),
        LinearConstraint(one_each, 1, 1),
    ]
    agreement = [(near, n_units - (most_changes or 0), n_units)] if near is not None else []
    for choice, low, high in [*agreement, *((other, 0, n_units - 1) for other in excluded)]:
        same = np.eye(n_formats)[choice].ravel()[None]  # times the solution: units that agree
        constraints.append(LinearConstraint(same, low, high))
    result = milp(
        -(saved / (np.abs(saved).max() or 1.0)).ravel(),
        constraints=constraints,
        integrality=np.ones(scores.size),
        bounds=Bounds(0, allowed.ravel().astype(float)),
        options={"mip_rel_gap": 0.0},
    )
    if result.x is None:
        raise BudgetError(
            f"budget.limit={budget.limit}: the solver found no choice ({result.message})"
        )
    return result.x.reshape(n_units, n_formats).argmax(1).astype(np.int64)
