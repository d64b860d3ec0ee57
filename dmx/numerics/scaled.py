"""Scales that are numbers and no powers of two: those of nvfp4 and of fp8.

    nvfp4   G = 6 * 448 / amax(tensor)          inverse global scale, float32
            s = E4M3(amax(block) / 6 * G)       nearest even; at least 2**-9 where the block is not zero
            value = E2M1(x / (s / G)) * (s / G)
    fp8     s = amax(row) / 448                 float32; of weights rounded to bf16
            value = E4M3(x / s) * s

Each operation is one of float32. In both the scale of a zero block is 0, and values beyond the largest one
saturate, which rounding s down leads to, or a tensor whose amax was fixed before (inputs: by calibration).
Zero blocks and NaN blocks count nothing in amax(tensor), which is taken as at least 2**-100: below, factors
would leave the normal float32 numbers.

Scale rules of nvfp4, the last two for weights, which are quantized once:

    amax/6    as above; the default
    4over6    that, or s = E4M3(amax(block) / 4 * G), whichever has the least squared error of the block, ties
              to amax/6
    mse       of the E4M3 numbers from two below to five above that of amax/6 the one with the least squared
              error, ties to the larger

Scale rules of fp8, whose scale follows from amax alone:

    amax/448           with the digits of bf16: what is left of a weight's scale in loaders that hold it in the
                       dtype of the model, whatever the file says; the usual one of weights
    amax/448_float32   with all digits, as runtimes scale the inputs that they quantize token by token; of inputs
                       alone, and their usual one

Errors are summed in the order that `dmx.numerics.scaling` says, in units of 2**floor(log2 amax(block)).

Peers. compressed-tensors 0.20 has these scales bit for bit for float32 tensors under the same G, which it takes as 2688
times the rounded reciprocal of amax: the last bit is another for 28 % of amaxes, here the quotient's. For bf16 tensors it rounds
amax(block) / 6 to bf16 before it multiplies by G, which is not followed. A scale that rounds to 0 is 0.125 there, 2**-9
here; one of a row below 2**-126 is subnormal there, 2**-126 here. Its fp8 scale has the dtype of the tensor, and transformers holds it in bf16 whatever the file says: amax/448
follows that for all dtypes, so that loaded weights are the same. vLLM's is amax/448_float32, and so is ModelOpt
0.47's, codes and scales bit for bit, a row or a tensor, but for subnormal scales. Of nvfp4 ModelOpt keeps 1/G and multiplies by it,
which differs in the last bit of float32.

Source: NVFP4 and FP8 dynamic as in compressed-tensors 0.20, `quantization/utils/helpers.py`; Four Over Six,
arXiv 2512.02010, for the rule of that name (with the global scale above).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dmx.formats import BlockFormat, ElementFormat, ScaleRule
from dmx.numerics.rounding import (
    codes_to_element,
    element_to_codes,
    exact_power_of_two,
    float_exponent,
    round_to_element,
)
from dmx.numerics.scaling import sum_by_pairs

LEAST_AMAX = 2.0**-100
"""Of a tensor, for its global scale."""
AMAX_RULES: tuple[ScaleRule, ...] = ("amax/6", "amax/448", "amax/448_float32")
"""Those that look at amax alone."""
LEAST_ROW_SCALE = 2.0**-126
"""Of a row that is not zero: the least normal float32."""
MSE_CODES = (5, 4, 3, 2, 1, 0, -1, -2)
"""From the code of amax/6; a later one wins only where it is better. Five reach what maps amax to 4: what was
rounded so is found again."""


class BlockScales(NamedTuple):
    """Scales of blocks: what values are multiplied by, and what is stored."""

    scale: Tensor
    """(...) float32: x is about element * scale; 0 for blocks of zeros"""
    stored: Tensor
    """(...) uint8 E4M3 codes, or float32"""
    inv_global: Tensor | None
    """0-d float32, G above; None where there is none."""


def block_scales(
    blocks: Tensor, block_format: BlockFormat, scale_rule: ScaleRule, amax: Tensor | float | None
) -> BlockScales:
    """Scales of blocks of a format whose scales are no powers of two.

    Args:
        blocks: (..., n) float32, finite; a whole tensor.
        scale_rule: one that the format has.
        amax: largest magnitude that scales are made for, instead of that of the blocks: of the tensor for
            nvfp4, of each row, shape (...), for fp8.
    """
    of_block = blocks.abs().amax(-1)
    if scale_rule in AMAX_RULES:
        return amax_scales(of_block, block_format, scale_rule, amax)
    usual = amax_scales(of_block, block_format, block_format.rules[0], amax)
    return _by_error(blocks, of_block, block_format, scale_rule, usual)


def amax_scales(
    of_block: Tensor,
    block_format: BlockFormat,
    scale_rule: ScaleRule,
    amax: Tensor | float | None,
) -> BlockScales:
    """Scales by the rules that look at amax alone.

    Args:
        of_block: (...) float32, finite, largest magnitude of each block. amax: as of `block_scales`.
        scale_rule: one of AMAX_RULES that the format has.
    """
    element, of_scale = block_format.element, block_format.scale.element
    if of_scale is None:
        of_row = of_block if amax is None else _like(of_block, amax)
        return _row_scales(of_row, element, scale_rule)
    if amax is None:
        amax = of_block.amax() if of_block.numel() else 0.0
    inv_global = inverse_global_scale(amax, element, of_scale).to(of_block.device)
    scales = _mapped_to(element.max_normal, of_block, of_scale, inv_global)
    return BlockScales(scales / inv_global, element_to_codes(scales, of_scale), inv_global)


def _mapped_to(
    largest: float, of_block: Tensor, of_scale: ElementFormat, inv_global: Tensor
) -> Tensor:
    """E4M3 scales, as float32, that map the amax of each block to `largest`."""
    rounded = round_to_element(_divided(of_block, largest) * inv_global, of_scale)
    return torch.where(of_block > 0, rounded.clamp(min=of_scale.min_subnormal), 0.0)


def _like(reference: Tensor, value: Tensor | float) -> Tensor:
    """A number, or a tensor that can be expanded, as a float32 tensor of this shape and device."""
    there = torch.as_tensor(value, dtype=torch.float32, device=reference.device)
    return there.expand(reference.shape)


def _divided(x: Tensor, by: float) -> Tensor:
    # By a tensor: on GPUs a division by a number is a product with its rounded inverse.
    return x / torch.full_like(x, by)


def _row_scales(amax: Tensor, element: ElementFormat, scale_rule: ScaleRule) -> BlockScales:
    scale = _divided(amax, element.max_normal)
    if scale_rule != "amax/448_float32":
        scale = scale.to(torch.bfloat16).float()
    scale = torch.where(amax > 0, scale.clamp(min=LEAST_ROW_SCALE), 0.0)
    return BlockScales(scale, scale, None)


def inverse_global_scale(
    amax: Tensor | float, element: ElementFormat, of_scale: ElementFormat
) -> Tensor:
    """0-d float32: 6 * 448 / amax of a tensor."""
    largest = torch.as_tensor(amax, dtype=torch.float32).clamp(min=LEAST_AMAX)
    return torch.full_like(largest, element.max_normal * of_scale.max_normal) / largest


def _by_error(
    blocks: Tensor,
    of_block: Tensor,
    block_format: BlockFormat,
    scale_rule: ScaleRule,
    usual: BlockScales,
) -> BlockScales:
    """Scales by 4over6 and by mse, from those by amax/6."""
    element, of_scale = block_format.element, block_format.scale.element
    inv_global = usual.inv_global
    assert of_scale is not None and inv_global is not None
    if scale_rule == "4over6":
        by_four = _mapped_to(4.0, of_block, of_scale, inv_global)
        candidates = [codes_to_element(usual.stored, of_scale), by_four]
    else:
        codes = usual.stored.to(torch.int32)
        near = [(codes + step).clamp(1, of_scale.max_code) for step in MSE_CODES]
        candidates = [codes_to_element(c.to(torch.uint8), of_scale) for c in near]
    best = _least_squares(blocks, of_block, candidates, element, inv_global)
    best = torch.where(of_block > 0, best, 0.0)
    return BlockScales(best / inv_global, element_to_codes(best, of_scale), inv_global)


def _least_squares(
    blocks: Tensor,
    of_block: Tensor,
    candidates: list[Tensor],
    element: ElementFormat,
    inv_global: Tensor,
) -> Tensor:
    """Of E4M3 scales for each block the one with the least squared error; the first of equal ones."""
    unit = exact_power_of_two(-float_exponent(of_block))
    x = blocks * unit[..., None]
    best, least = candidates[0], torch.full_like(of_block, torch.inf)
    for candidate in candidates:
        scale = (candidate / inv_global * unit)[..., None]
        error = sum_by_pairs((x - round_to_element(x / scale, element) * scale).square())
        is_better = error < least
        best, least = (
            torch.where(is_better, candidate, best),
            torch.where(is_better, error, least),
        )
    return best


def divided_by_scale(blocks: Tensor, scale: Tensor) -> Tensor:
    """blocks / scale, blocks whose scale is 0 as they are: zeros."""
    wide = scale[..., None]
    return torch.where(wide > 0, blocks / wide, blocks)
