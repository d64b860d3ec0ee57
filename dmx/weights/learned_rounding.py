"""Which neighbour each weight is rounded to, learned block by block while the weights stay.

    x     = w / s + v * step(w / s)        step: the distance of neighbouring values of the format there
    seen  = round(x) * s,   s = 2^e,   e by the scale rule from c * amax of the block
    v in [-1/2, 1/2], starts at 0; c in [0, 1], starts at 1

Both move by the sign of their gradient alone, straight through the rounding (v not where x lies beyond the largest
value), at a rate that falls from 1 / steps to 0 in a straight line, so that an offset can just go all the way. With
v = 0 and c = 1 weights are rounded to nearest by the assignment's rules.

What results are values of the format whose scales `mse` finds again, as of scales that learn
(`dmx.weights.learned_scales`).

Source: SignRound, arXiv 2309.05516. Ours: offsets in steps of the format's grid instead of its scale, the error of a
block relative to each token's power, and the last step in place of the best one.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from dmx.assignment.assignment import Assignment
from dmx.formats import BLOCK_SIZE
from dmx.numerics.rounding import exact_power_of_two, grid_step, round_to_element
from dmx.numerics.scaling import block_to_scale_exponent
from dmx.weights.learned_layers import Masters, Segment


def sign_rate(step: int, steps: int) -> float:
    """Rate of a step, 0 to steps - 1."""
    return (1 - step / steps) / steps


class RoundingOffsets(Masters):
    """Offsets of weights that stay, in the place of masters that move.

    Args:
        weights: as of `FlatWeights`, in MX formats and whole blocks.
        assignment: whose scale rules say what is rounded from.

    Attributes:
        values: offsets v, as the weights lie. factors: (blocks,) float32, c.
    """

    def __init__(self, weights: Mapping[str, Tensor], assignment: Assignment) -> None:
        super().__init__(weights, assignment, torch.float32)
        self.weights, self.values = self.values, torch.zeros_like(self.values)
        self.factors = self.values.new_ones(len(self.values) // BLOCK_SIZE)
        self._by_offset, self._by_scale = (torch.zeros_like(self.values) for _ in range(2))

    def _blocks(self, flat: Tensor, segment: Segment) -> Tensor:
        return segment.of(flat).view(-1, BLOCK_SIZE)

    @torch.no_grad()
    def quantize(self) -> None:
        """What products see, of offsets and factors as they now are."""
        for segment in self.segments:
            element = segment.block_format.element
            weight = self._blocks(self.weights, segment)
            first = segment.start // BLOCK_SIZE
            factor = self.factors[first : first + len(weight), None]
            exponent = block_to_scale_exponent(weight * factor, element, segment.scale_rule)[
                :, None
            ]
            units = weight * exact_power_of_two(-exponent)
            x = units + self._blocks(self.values, segment) * grid_step(units, element)
            rounded = round_to_element(x, element)
            # Blocks of zeros stay zeros.
            is_free = (x.abs() <= element.max_normal) & (weight != 0).any(1, keepdim=True)
            self._blocks(self._by_offset, segment).copy_(is_free)
            self._blocks(self._by_scale, segment).copy_(rounded - is_free * units)
            self._blocks(self.seen, segment).copy_(rounded * exact_power_of_two(exponent))

    @torch.no_grad()
    def move(self, rate: float) -> None:
        """A step against the signs of the gradients by v and c, of the gradient by what products saw."""
        gradient = self.gradient.float()
        self.values.sub_(rate * (gradient * self._by_offset).sign()).clamp_(-0.5, 0.5)
        by_factor = (gradient * self._by_scale).view(-1, BLOCK_SIZE).sum(1)
        self.factors.sub_(rate * by_factor.sign()).clamp_(0, 1)

    def take(self, kept: Tensor) -> None:
        """See what an earlier run kept."""
        self.seen.copy_(kept)
