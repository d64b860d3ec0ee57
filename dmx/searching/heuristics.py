"""Searches without gradients: same inputs, same budget, same projection, same result.

    uniform     the largest uniform format that fits
    random      steps in a random order
    kl          the dMX paper's opponent: a unit's score is KL(reference, model) of the logits,
                token mean, with this one unit low (weights and inputs) and the rest unquantized;
                units are raised in the order of their scores

Every score comes from all batches. The blocks before the disturbed one are not run again.
"""

import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from dmx.budget import Budget, SearchSpace, project
from dmx.numerics.errors import kl_divergence
from dmx.searching.config import SearchConfig
from dmx.searching.objective import model_logits
from dmx.searching.offsets import searching_model
from dmx.progress import progress
from dmx.searching.replay import PrefixReplay, prefix_replay_is_exact


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


@torch.no_grad()
def kl_scan(
    model: nn.Module,
    batches: Sequence[Tensor],
    space: SearchSpace,
    config: SearchConfig,
    candidates: Sequence[int],
) -> np.ndarray:
    """KL of each unit alone at each candidate format; (U, len(candidates)) float64, nats/token."""
    device = next(model.parameters()).device
    scores = np.zeros((len(space.units), len(candidates)))
    total = len(batches) * scores.size
    with (
        searching_model(model, space, config.format_family, config.scale_rule) as bank,
        progress("kl scan", total) as advance,
    ):
        bank.set_full()
        replay = PrefixReplay(model)
        exact = prefix_replay_is_exact(model, batches[0][:1].to(device))
        # A fused group lies in one block; take the first of its layers' blocks all the same.
        first_block = [
            min(replay.block_of(layer) for layer in unit.layers) if exact else 0
            for unit in space.units
        ]
        for batch in batches:
            tokens = batch.to(device)
            bank.set_full()
            reference = replay.reference(tokens) if exact else model_logits(model, tokens)
            for u in range(len(space.units)):
                for c, candidate in enumerate(candidates):
                    formats = [None] * len(space.units)
                    bank.set_formats([*formats[:u], space.formats[candidate], *formats[u + 1 :]])
                    logits = replay.logits(tokens, first_block[u])
                    scores[u, c] += float(kl_divergence(reference, logits)) / len(batches)
                    advance("")
    return scores


def heuristic_choice(
    model: nn.Module,
    batches: Sequence[Tensor],
    space: SearchSpace,
    budget: Budget,
    config: SearchConfig,
) -> tuple[np.ndarray, np.ndarray, float]:
    """Choice, preference (U, F-1) and seconds of a search that takes no gradient steps."""
    start = time.perf_counter()
    lowest = np.zeros(len(space.units), dtype=np.int64)
    if config.name == "uniform":
        preference = np.zeros((len(space.units), len(space.formats) - 1))
        return uniform_choice(space, budget), preference, time.perf_counter() - start
    if config.name == "random":
        preference = random_preference(space, config.seed)
    else:
        preference = kl_scan(model, batches, space, config, range(len(space.formats) - 1))
    choice = project(space, budget, lowest, preference)
    return choice, preference, time.perf_counter() - start
