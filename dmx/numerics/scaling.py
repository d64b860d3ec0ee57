"""Shared scale of a block from its amax, for the four scale rules in use.

With K = floor(log2 amax), all in exact integer arithmetic on the bits of float32 amax:

    floor   K - emax                                      OCP MX v1.0, section 6.3; the default
    ceil    ceil(log2 amax) - emax
    even    floor(log2 of amax rounded, half up, to the element's mantissa bits) - emax
    rceil   ceil(log2(amax / max_normal))                 no block value saturates

clamped to [-127, 127]. `floor` saturates up to a factor of two below the next binade; the others
trade that for coarser steps. Peers: compressed-tensors uses `even`, torchao offers all of them.
"""

import torch
from torch import Tensor

from dmx.formats import E8M0, SCALE_RULES, ElementFormat, ScaleRule, check_choice
from dmx.numerics.rounding import FP32_MANTISSA_BITS, float_exponent

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
        FormatError: unknown rule.
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
