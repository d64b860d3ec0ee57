"""Shared scale of a block: from its amax, by four rules in use, or by its squared error.

With K = floor(log2 amax), all in exact integer arithmetic on the bits of float32 amax:

    floor   K - emax                                      OCP MX v1.0, section 6.3; the default
    ceil    ceil(log2 amax) - emax
    even    floor(log2 of amax rounded, half up, to the element's mantissa bits) - emax
    rceil   ceil(log2(amax / max_normal))                 no block value saturates

clamped to [-127, 127]. `floor` saturates up to a factor of two below the next binade; the others
trade that for coarser steps. Peers: compressed-tensors uses `even`, torchao offers all of them.

    mse     of the exponents floor - 1 ... floor + 2 the one with the least squared error of the block,
            ties to the larger; for weights, which are quantized once

These four reach every exponent that another rule may choose, and one below. Sums of errors decide, so their
order is part of the definition: neighbours first, (x0 + x1), (x2 + x3), ..., then neighbouring sums.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from dmx.formats import (
    E8M0,
    SCALE_RULES,
    WEIGHT_RULES,
    ElementFormat,
    ScaleRule,
    check_choice,
)
from dmx.numerics.rounding import (
    FP32_MANTISSA_BITS,
    exact_power_of_two,
    float_exponent,
    round_to_element,
)

MSE_OFFSETS = (2, 1, 0, -1)
"""From the floor rule's exponent; a later one wins only where it is better."""
_MANTISSA_MASK = (1 << FP32_MANTISSA_BITS) - 1


def amax_to_scale_exponent(
    amax: Tensor, element: ElementFormat, scale_rule: ScaleRule = "floor"
) -> Tensor:
    """Unbiased exponent of each block's scale.

    Args:
        amax: float32, >= 0, finite (the caller masks blocks with NaN or Inf).
        element: supplies emax, mantissa bits and max_normal.

    Returns:
        int32, shape of amax, in [-127, 127]; amax == 0 gives -127.

    Raises:
        TypeError: amax is not float32; half precision would round before the floor.
        FormatError: unknown rule, or one that looks at more than amax.
    """
    if amax.dtype != torch.float32:
        raise TypeError(f"amax must be float32, got {amax.dtype}")
    check_choice(scale_rule, SCALE_RULES, "scale_rule")
    bits = amax.view(torch.int32)
    # Subnormal amax reads as exponent -127 and mantissa rules may be off there; every rule
    # subtracts at least 2, so the clamp to -127 makes that invisible.
    if scale_rule == "even":
        bits = bits + (1 << (FP32_MANTISSA_BITS - element.mantissa_bits - 1))
    exponent = float_exponent(bits.view(torch.float32)) - element.emax
    if scale_rule == "ceil":
        exponent = exponent + ((bits & _MANTISSA_MASK) != 0)
    elif scale_rule == "rceil":
        top = element.max_mantissa << (FP32_MANTISSA_BITS - element.mantissa_bits)
        exponent = exponent + ((bits & _MANTISSA_MASK) > top)
    return exponent.clamp(-E8M0.bias, E8M0.bias).to(torch.int32)


def block_to_scale_exponent(
    blocks: Tensor, element: ElementFormat, scale_rule: ScaleRule = "floor"
) -> Tensor:
    """Unbiased exponent of each block's scale, by any rule.

    Args:
        blocks: (..., n) float32, n a power of two, finite.

    Returns:
        int32 (...), in [-127, 127]; a block of zeros gives -127.

    Raises:
        As `amax_to_scale_exponent`.
    """
    check_choice(scale_rule, WEIGHT_RULES, "scale_rule")
    amax = blocks.abs().amax(-1)
    if scale_rule != "mse":
        return amax_to_scale_exponent(amax, element, scale_rule)
    best, least = torch.zeros_like(amax, dtype=torch.int32), torch.full_like(amax, torch.inf)
    for exponent, _, error in mse_candidates(blocks, element):
        is_better = error < least
        best, least = torch.where(is_better, exponent, best), torch.where(is_better, error, least)
    return torch.where(amax > 0, best, -E8M0.bias).to(torch.int32)


def mse_exponents(floor: Tensor) -> list[Tensor]:
    """The exponents that the rule `mse` chooses from, in the order of MSE_OFFSETS; int32, as the floor rule's."""
    return [(floor + offset).clamp(-E8M0.bias, E8M0.bias) for offset in MSE_OFFSETS]


def mse_candidates(
    blocks: Tensor, element: ElementFormat
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """What the rule `mse` chooses from, in the order of MSE_OFFSETS.

    Args:
        blocks: (..., n) float32, n a power of two, finite.

    Yields:
        exponent int32 (...); quantized values (..., n) float32; their squared error (...) float32, in units
        of the square of the floor rule's scale.
    """
    for exponent, values, error in scale_candidates(blocks, element):
        yield exponent, values, sum_by_pairs(error.square())


def scale_candidates(
    blocks: Tensor, element: ElementFormat
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """As `mse_candidates`, with the error (..., n) of each value, in units of the floor rule's scale."""
    floor = amax_to_scale_exponent(blocks.abs().amax(-1), element)
    # In units of the floor scale squares neither overflow nor vanish where they matter.
    unit = exact_power_of_two(floor)[..., None]
    x = blocks * exact_power_of_two(-floor)[..., None]
    for exponent in mse_exponents(floor):
        step = exact_power_of_two(exponent - floor)[..., None]
        rounded = round_to_element(x / step, element) * step
        yield exponent, rounded * unit, x - rounded


def sum_by_pairs(x: Tensor) -> Tensor:
    """Sum over the last axis, a power of two long, in the order that the rule defines."""
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x.squeeze(-1)
