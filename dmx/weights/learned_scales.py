"""Block scales that learn while the weights stay: each MX block chooses one of the exponents of the rule `mse`.

    choice        of block b the candidate k with the largest preference; products see Q_k(w_b) alone
    gradient      with p = softmax(preferences of b) and d_k = <gradient by what is seen, Q_k(w_b)>:
                  p_k (d_k - sum_j p_j d_j), that of the mixture sum_k p_k Q_k(w_b), straight through the choice
    start         -PRIOR log(squared error of k / least error), so the choice that `mse` makes

What results are values of the format whose scales `mse` finds again: the assignment has that rule for its weights,
and every export carries them. Preferences take the place of the masters of learned weights in everything else.

Source: straight-through choices among candidates as in Gumbel-softmax (arXiv 1611.01144), without noise; the
candidates and the start are ours.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from dmx.assignment.assignment import Assignment
from dmx.errors import AssignmentError
from dmx.formats import BLOCK_SIZE
from dmx.numerics.scaling import MSE_OFFSETS, mse_candidates
from dmx.weights.learned_layers import FlatWeights

PRIOR = 0.3
"""Of the squared error: how much a block prefers the scale of its least error to begin with."""
LOWEST = -10.0
"""Preference that a candidate starts with at least: one that is far worse can still be found."""
CHUNK = 1 << 26
"""Elements whose float32 copies exist at a time."""


def with_block_scales(assignment: Assignment, train: str) -> Assignment:
    """The assignment under the rule that finds learned scales again.

    Args:
        train: what learns, as `learn.train` says it.

    Raises:
        AssignmentError: a format without a power of two for each block, or rows of no whole blocks.
    """
    for name, block_format in assignment.block_formats("weight").items():
        columns = assignment.shapes[name][1]
        if not block_format.is_mx or columns % BLOCK_SIZE:
            raise AssignmentError(
                f"learn.train={train}: {name} is in {block_format} with {columns} columns, and only MX "
                f"formats, in whole blocks of {BLOCK_SIZE}, have a power of two for each block to choose. "
                "Use learn.train=weights, or leave it out of the search (search.exclude)."
            )
    return assignment.with_rule("weight", "mse")


class LearnedScales(FlatWeights):
    """Weights that stay, seen by products in the scales that their blocks prefer.

    Args:
        weights: as of `FlatWeights`.

    Attributes:
        values: (blocks * 4,) float32 preferences.
    """

    def __init__(self, weights: Mapping[str, Tensor], assignment: Assignment) -> None:
        formats = assignment.block_formats("weight")
        super().__init__(weights, next(iter(weights.values())).dtype)
        count = len(MSE_OFFSETS)
        shape = (count, len(self.values) // BLOCK_SIZE, BLOCK_SIZE)
        self.candidates = self.values.new_zeros(shape)
        preferences = torch.zeros(shape[1], count, dtype=torch.float32, device=self.values.device)
        for name, (start, (rows, columns)) in self.places.items():
            part = slice(start // BLOCK_SIZE, (start + rows * columns) // BLOCK_SIZE)
            blocks = self.view_of(self.values, name).reshape(-1, BLOCK_SIZE).float()
            found = list(mse_candidates(blocks, formats[name].element))
            for candidate, (_, values, _) in zip(self.candidates, found, strict=True):
                candidate[part] = values
            errors = torch.stack([error for _, _, error in found], 1)
            least = errors.amin(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
            preferences[part] = (-PRIOR * (errors / least).clamp(min=1.0).log()).clamp(min=LOWEST)
        self.values = preferences.flatten()

    def choice(self) -> Tensor:
        """(blocks,) int64, index into MSE_OFFSETS; the first of several that are preferred alike."""
        return self.values.view(-1, len(MSE_OFFSETS)).argmax(1)

    @torch.no_grad()
    def quantize(self) -> None:
        """What products see, of the preferences as they now are."""
        index = self.choice()[None, :, None].expand(1, -1, BLOCK_SIZE)
        torch.gather(self.candidates, 0, index, out=self.seen.view(1, -1, BLOCK_SIZE))

    @torch.no_grad()
    def descent(self) -> Tensor:
        """Gradient by the preferences, shape of `values`."""
        seen = self.gradient.view(-1, BLOCK_SIZE)
        products = torch.empty(len(seen), len(MSE_OFFSETS), device=seen.device)
        rows = CHUNK // BLOCK_SIZE
        for start in range(0, len(seen), rows):
            part = slice(start, start + rows)
            gradient = seen[part].float()
            for k, candidate in enumerate(self.candidates):
                products[part, k] = (gradient * candidate[part]).sum(1)
        shares = self.values.view_as(products).softmax(1)
        mean = (shares * products).sum(1, keepdim=True)
        return (shares * (products - mean)).flatten()

    def result(self, name: str) -> Tensor:
        """(out, in) weight of a layer that is to be stored."""
        return self.view_of(self.seen, name)
