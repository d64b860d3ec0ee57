"""Searches without gradient steps: same inputs, same budget, same projection, same result.

    uniform      the largest uniform format that fits
    random       steps in a random order
    kl           the dMX paper's opponent: KL(reference, model) of the logits, token mean, with one
                 unit low and the rest unquantized; raise in the order of KL
    kl_per_bit   the same measurement for every candidate; raise by KL saved per added bit
    fisher       sum over tokens and outputs of (gradient of the summed cross entropy)^2 times
                 (output error)^2, for every candidate; exact knapsack
    aumann_shapley   what each unit adds to KL(reference, model) while all go from candidate to candidate
                 together, by gradients along the way; exact knapsack
    weight_mse   squared error of the weights, for every candidate; exact knapsack

The reference is the unquantized model, and a unit's score quantizes its weights and inputs
together (weight_mse knows no inputs), or the one of them that a unit of separate choices is about.
With three candidates a step needs the one before it.
"""

import numpy as np

from dmx.assignment.budget import Budget
from dmx.assignment.projection import project
from dmx.assignment.space import SearchSpace
from dmx.searching.config import SearchConfig
from dmx.searching.knapsack import solve_knapsack
from dmx.searching.scan import Scan


def uniform_choice(space: SearchSpace, budget: Budget) -> np.ndarray:
    """The largest candidate that, given to every unit, fits; (U,) int64."""
    space.check_budget(budget, warn=False)
    n = len(space.units)
    fitting = [
        i for i in range(len(space.formats)) if space.average([i] * n, budget.unit) <= budget.limit
    ]
    return np.full(n, fitting[-1], dtype=np.int64)


def random_preference(space: SearchSpace, seed: int) -> np.ndarray:
    """(U, F-1) uniform draws; a unit's later step never ranks above its earlier one."""
    draws = np.random.default_rng(seed).random((len(space.units), len(space.formats) - 1))
    return np.sort(draws, axis=1)[:, ::-1]


def heuristic_choice(
    scan: Scan, space: SearchSpace, budget: Budget, config: SearchConfig
) -> tuple[np.ndarray, np.ndarray]:
    """Choice (U,) and preference (U, F-1) of a search that takes no gradient steps."""
    n_units, n_formats = len(space.units), len(space.formats)
    lowest = np.zeros(n_units, dtype=np.int64)
    if config.name == "uniform":
        preference = np.zeros((n_units, n_formats - 1))
        return uniform_choice(space, budget), preference
    gain = None
    if config.name == "random":
        preference = random_preference(space, config.seed)
    elif config.name == "kl":
        preference = scan.kl(range(n_formats - 1))
    else:
        measure = {
            "fisher": scan.fisher,
            "aumann_shapley": scan.aumann_shapley,
            "weight_mse": scan.weight_mse,
        }
        scores = measure.get(config.name, lambda: scan.kl(range(n_formats)))()
        gain = scores[:, :-1] - scores[:, 1:]
        preference = gain / np.diff(space.costs(budget.unit), axis=1)
        if config.name != "kl_per_bit":
            lowest = solve_knapsack(space, budget, scores)
    return project(space, budget, lowest, preference, gain=gain), preference
