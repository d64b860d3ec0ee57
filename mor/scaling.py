"""GAM scaling: one mantissa for the group (the operand), one exponent for each block.

    s = Q / amax                      for the group and each block; Q = largest normal of the format
    S = mantissa(s of group) * 2**exponent, the inverse scale of the block
    q = cast(x * S),  y = q / S       each operation rounded to float32

A block's exponent is that of its own s, one less where the group's mantissa is the larger, so S
never exceeds the block's s and nothing saturates. One block of group size has S = s exactly.

Source: MoR, arXiv 2512.22804 (group amax mantissa). Limits at the ends of float32, zero blocks and
blocks that are not finite (left out of the group's amax) are our choice.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mor._base import (
    FP32_BIAS,
    FP32_MANTISSA_BITS,
    ElementFormat,
    exact_power_of_two,
    float_exponent,
    round_to_element,
)
from mor.partition import WITHIN_BLOCK, spread

MAX_INV_SCALE = 2.0**127
MIN_EXPONENT, MAX_EXPONENT = -126, 127
_MANTISSA_MASK = (1 << FP32_MANTISSA_BITS) - 1


class GamInvScale(NamedTuple):
    """Of the inverse scales. mantissa: 0-d float32 in [1, 2). exponent: int32, the block grid."""

    mantissa: Tensor
    exponent: Tensor

    @property
    def inv_scale(self) -> Tensor:
        """S of each block: float32, multiplies x; the scale, which dequantizes, is its inverse."""
        return self.mantissa * exact_power_of_two(self.exponent)


def block_amax(blocks: Tensor) -> Tensor:
    """Largest magnitude of each block, float32; NaN or Inf where the block is not finite.

    Args:
        blocks: float32 block view of `mor.partition`.
    """
    if blocks.numel() == 0:
        return blocks.new_zeros(blocks.shape[0], blocks.shape[2])
    return blocks.abs().amax(WITHIN_BLOCK)


def amax_to_gam_inv_scale(amax: Tensor, element: ElementFormat) -> GamInvScale:
    """Inverse scale of each block from its amax.

    Args:
        amax: (n_row_blocks, n_column_blocks) float32; blocks that are not finite count as zero.

    Returns:
        A zero block has the group's exponent; a zero group mantissa 1 and exponents 0.
    """
    amax = torch.where(amax.isfinite(), amax, 0.0)
    group_amax = amax.amax() if amax.numel() else amax.new_zeros(())
    group, own = _inv_scale(group_amax, element), _inv_scale(amax, element)
    mantissa, own_mantissa = _mantissa(group), _mantissa(own)
    exponent = float_exponent(own) - (mantissa > own_mantissa).to(torch.int32)
    exponent = torch.where(amax > 0, exponent, float_exponent(group))
    is_zero = group_amax == 0
    mantissa = torch.where(is_zero, 1.0, mantissa)
    exponent = torch.where(is_zero, 0, exponent).clamp(MIN_EXPONENT, MAX_EXPONENT)
    return GamInvScale(mantissa, exponent)


def gam_fake_quant(blocks: Tensor, inv_scale: GamInvScale, element: ElementFormat) -> Tensor:
    """y of the block view, float32 in and out."""
    factor = spread(inv_scale.inv_scale)
    return round_to_element(blocks * factor, element) / factor


def _inv_scale(amax: Tensor, element: ElementFormat) -> Tensor:
    # number / tensor would be a reciprocal and a product: two roundings.
    return (torch.full_like(amax, element.max_normal) / amax).clamp(max=MAX_INV_SCALE)


def _mantissa(x: Tensor) -> Tensor:
    bits = (x.view(torch.int32) & _MANTISSA_MASK) | (FP32_BIAS << FP32_MANTISSA_BITS)
    return bits.view(torch.float32)
