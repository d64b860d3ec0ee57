"""Moments of an optimizer in 8 bits: codes of a dynamic table, with one scale for each 256 elements.

The table has seven decades below the largest value of a block, and more codes in the higher ones. Codes are chosen
stochastically, so that the mean is kept: a moment moves by less than half a code in most steps. The second moment
is kept as its square root, and what is not 0 never becomes 0: a step is divided by it.

Source: 8-bit optimizers by block-wise quantization, arXiv 2110.02861 (table and blocks; the rounding and the root
are ours).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256
"""Elements of one scale."""
DECADES = 7


def dynamic_table(*, signed: bool) -> Tensor:
    """(256,) float32 in [-1, 1] or [0, 1], rising, with 0 and 1."""
    values = [0.0, 1.0]
    for i in range(DECADES):
        n = 2**i if signed else 2 ** (i + 1)
        edges = torch.linspace(0.1, 1, n + 1, dtype=torch.float64)
        decade = ((edges[1:] + edges[:-1]) / 2 * 10.0 ** (i + 1 - DECADES)).tolist()
        values += decade
        if signed:
            values += [-value for value in decade]
    return torch.tensor(sorted(values), dtype=torch.float32)


class Moments8:
    """(n,) values of one sign or both in a byte each.

    Args:
        like: (n,) whose length and device they have.
    """

    def __init__(self, like: Tensor, *, signed: bool) -> None:
        self.table = dynamic_table(signed=signed).to(like.device)
        zero = int((self.table == 0).nonzero())
        self.signed = signed
        self.codes = torch.full_like(like, zero, dtype=torch.uint8)
        self.scales = torch.zeros(-(-len(like) // BLOCK), device=like.device)

    def read(self, start: int, end: int) -> Tensor:
        """float32 values of a range that starts with a block."""
        values = self.table[self.codes[start:end].int()]
        scales = self.scales[start // BLOCK : -(-end // BLOCK)]
        return values * scales.repeat_interleave(BLOCK)[: end - start]

    def write(self, start: int, values: Tensor, generator: torch.Generator) -> None:
        """Put float32 values in a range that starts with a block; rounded stochastically."""
        n = len(values)
        blocks = F.pad(values, (0, -n % BLOCK)).view(-1, BLOCK)
        scales = blocks.abs().amax(1)
        self.scales[start // BLOCK : start // BLOCK + len(scales)] = scales
        shares = (blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).flatten()[:n]
        shares = shares.clamp(-1.0, 1.0)
        low = torch.bucketize(shares, self.table, right=True, out_int32=True).sub_(1)
        low.clamp_(0, len(self.table) - 2)
        below, above = self.table[low], self.table[low + 1]
        chance = (shares - below) / (above - below)
        drawn = torch.rand(n, device=values.device, generator=generator)
        codes = low + (drawn < chance)
        if not self.signed:
            codes = torch.maximum(codes, (values > 0).int())
        self.codes[start : start + n] = codes.to(torch.uint8)
