"""AdamW where masters or moments are kept in fewer bits than float32, with what rounds them stochastically.

    m = b1 m + (1 - b1) g,   v = b2 v + (1 - b2) g^2
    w = w - rate * m / (root * sqrt(v) + eps)                       no decay

in float32, each operation on its own. A step is smaller than half a unit in the last place of most weights, and
rounding it to nearest would lose it: bfloat16 and 8-bit numbers are rounded up or down with the chance that keeps
the mean. What is drawn is a hash of an element's index, so it is the same on every device and for every order of
work.

Moments in 8 bits are codes of a dynamic table, with one scale for each 256 elements. The table has seven decades
below the largest value of a block, and more codes in the higher ones. The second moment is kept as its square
root, and what is not 0 never becomes 0: a step is divided by it.

Source: AdamW, arXiv 1711.05101; stochastic rounding, arXiv 2010.06192; 8-bit optimizers by block-wise
quantization, arXiv 2110.02861 (table and blocks; the rounding and the root are ours).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256
"""Elements of one scale."""
DECADES = 7
CHUNK = 1 << 22
"""Elements that the reference updates together: a dozen float32 tensors of so many exist meanwhile. Whole blocks."""
SHIFTS, FACTORS = (16, 15, 16), (0x7FEB352D, 0x846CA68B)
"""Of the hash: x ^= x >> 16, x *= ..., x ^= x >> 15, x *= ..., x ^= x >> 16, of 32 bits."""
_WORD = 0xFFFFFFFF


class StepNumbers(NamedTuple):
    """What one step is made with, besides tensors."""

    beta1: float
    beta2: float
    rest1: float
    """1 - beta1"""
    rest2: float
    rate: float
    """Learning rate / (1 - beta1^t)"""
    root: float
    """1 / sqrt(1 - beta2^t)"""
    epsilon: float
    keys: tuple[int, int, int]
    """Of what is drawn for masters, first and second moments; 32 bits."""


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
    """(n,) values of one sign or both in a byte each, zeros at first.

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

    def write(self, start: int, values: Tensor, bits: Tensor) -> None:
        """Put float32 values in a range that starts with a block; rounded by `bits`, int32 (n,)."""
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
        drawn = ((bits >> 8) & 0xFFFFFF).float() * 2.0**-24
        codes = low + (drawn < chance)
        if not self.signed:
            codes = torch.maximum(codes, (values > 0).int())
        self.codes[start : start + n] = codes.to(torch.uint8)


Moments = Tensor | Moments8
"""float32, bfloat16, or 8 bits."""


def hashed(word: int) -> int:
    """32 bits of 32 bits."""
    word ^= word >> SHIFTS[0]
    word = (word * FACTORS[0]) & _WORD
    word ^= word >> SHIFTS[1]
    word = (word * FACTORS[1]) & _WORD
    return word ^ (word >> SHIFTS[2])


def step_keys(seed: int, step: int) -> tuple[int, int, int]:
    """Of `StepNumbers`."""
    own = hashed(hashed(seed & _WORD) ^ (step & _WORD))
    first, second, third = (hashed(own ^ (i + 1)) for i in range(3))
    return first, second, third


def signed_word(word: int) -> int:
    """The int32 of these 32 bits."""
    return word - (1 << 32) if word >> 31 else word


def random_bits(start: int, n: int, key: int, device: torch.device) -> Tensor:
    """int32 (n,), all 32 bits drawn: of each element from `start` on, which do not go beyond a multiple of 2**31.

    hash(low word of the index ^ hash(key + high word))
    """
    salt = hashed((key + (start >> 32)) & _WORD)
    x = torch.arange(n, dtype=torch.int32, device=device) + signed_word(start & _WORD)
    x ^= signed_word(salt)
    for shift, factor in zip(SHIFTS, (*FACTORS, None), strict=True):
        x ^= (x >> shift) & (_WORD >> shift)
        if factor is not None:
            x *= signed_word(factor)
    return x


def round_stochastically(x: Tensor, bits: Tensor) -> Tensor:
    """float32 to bfloat16: up or down with the chance that keeps the mean; exact values stay.

    Args:
        bits: int32, shape of x, drawn; its upper half counts.
    """
    noise = (bits >> 16) & 0xFFFF
    return ((x.view(torch.int32) + noise) & -(1 << 16)).view(torch.float32).to(torch.bfloat16)


def narrow_adamw(
    masters: Tensor,
    gradient: Tensor,
    factor: Tensor,
    first: Moments,
    second: Moments,
    numbers: StepNumbers,
) -> None:
    """One step along `factor * gradient`; masters and moments are changed in place.

    Args:
        masters: (n,) float32 or bfloat16. gradient: (n,) of any floating dtype. factor: (1,) float32.
        first, second: (n,) moments, of one kind.
    """
    for start in range(0, len(masters), CHUNK):
        end = min(start + CHUNK, len(masters))
        own = slice(start, end)
        wide = gradient[own].float() * factor
        m = _read(first, start, end)
        m = m.mul_(numbers.beta1).add_(wide * numbers.rest1)
        v = _read(second, start, end)
        if isinstance(second, Moments8):
            v = v.square_()
        v = v.mul_(numbers.beta2).add_(wide.square_().mul_(numbers.rest2))
        root = (
            v.double().sqrt().float()
        )  # rounded as IEEE says, which float32's own is not everywhere
        step = (m / (root * numbers.root).add_(numbers.epsilon)).mul_(numbers.rate)
        kept = ((masters, masters[own].float() - step), (first, m))
        second_kept = (second, root if isinstance(second, Moments8) else v)
        for key, (target, value) in zip(numbers.keys, (*kept, second_kept), strict=True):
            _write(target, start, value, key)


def _read(moments: Moments, start: int, end: int) -> Tensor:
    if isinstance(moments, Moments8):
        return moments.read(start, end)
    return moments[start:end].to(torch.float32, copy=True)


def _write(target: Moments, start: int, value: Tensor, key: int) -> None:
    if isinstance(target, Tensor) and target.dtype == torch.float32:
        target[start : start + len(value)] = value
        return
    bits = random_bits(start, len(value), key, value.device)
    if isinstance(target, Moments8):
        target.write(start, value, bits)
    else:
        target[start : start + len(value)] = round_stochastically(value, bits)
