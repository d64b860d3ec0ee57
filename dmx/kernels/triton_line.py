# mypy: allow-untyped-defs
"""The straight line between two block formats on a GPU: forward and fused backward. `ops.py` is the door.

Names and formulas are those of `dmx.numerics.line`, arithmetic is that of `triton_mx`, with both formats
and their scale rules read on the device: a launch in a CUDA graph follows an offset from one pair of
neighbours to the next. Each pass reads its tensors once; the offset's gradient is one partial sum per
program, added up by a second small kernel in a fixed order.
"""

import triton
import triton.language as tl
from torch import Tensor

from dmx.formats import WEIGHT_RULES
from dmx.kernels.triton_launch import launch_backward, launch_forward
from dmx.kernels.triton_mx import (
    block_offsets,
    least_squares_exponent,
    power_of_two,
    round_magnitude,
)

# By bytes of an input element: blocks a program takes and warps it has; see `triton_mx`.
FORWARD_TILE = {4: (32, 4), 2: (32, 4)}
BACKWARD_TILE = {4: (16, 2), 2: (16, 2)}

CEIL, EVEN, RCEIL, MSE = (
    tl.constexpr(WEIGHT_RULES.index(rule)) for rule in ("ceil", "even", "rceil", "mse")
)
LOW, HIGH = tl.constexpr(2), tl.constexpr(7)
"""Where the fields of a neighbour begin in a row of parameters."""


@triton.jit
def _neighbour(p_ptr):
    """Fields of a neighbour: emin, emax, mantissa bits, max_normal, rule."""
    emin, emax = tl.load(p_ptr).to(tl.int32), tl.load(p_ptr + 1).to(tl.int32)
    mantissa = tl.load(p_ptr + 2).to(tl.int32)
    return emin, emax, mantissa, tl.load(p_ptr + 3), tl.load(p_ptr + 4).to(tl.int32)


@triton.jit
def shared_exponent(magnitude, amax, emin, emax, mantissa, max_normal, rule, BLOCKS: tl.constexpr):
    """Shared exponent (BLOCKS,) by a rule that is known on the device; see `dmx.numerics.scaling`."""
    lifted = amax + tl.where(rule == EVEN, 1 << (22 - mantissa), 0)
    exponent = (lifted >> 23) - 127 - emax
    fraction = amax & 0x7FFFFF
    top = max_normal.to(tl.int32, bitcast=True) & 0x7FFFFF
    exponent += ((rule == CEIL) & (fraction != 0)).to(tl.int32)
    exponent += ((rule == RCEIL) & (fraction > top)).to(tl.int32)
    exponent = tl.minimum(tl.maximum(exponent, -127), 127)
    if rule == MSE:
        exponent = least_squares_exponent(magnitude, exponent, emin, mantissa, max_normal, BLOCKS)
    return exponent


@triton.jit
def _quantized(magnitude, amax, p_ptr, BLOCKS: tl.constexpr):
    """|Q(x)| (BLOCKS, 32) of a neighbour, and whether it is not clamped.

    magnitude: bits of |x|. amax: (BLOCKS,) its maximum; blocks that are not finite give numbers without
    meaning.
    """
    emin, emax, mantissa, max_normal, rule = _neighbour(p_ptr)
    exponent = shared_exponent(magnitude, amax, emin, emax, mantissa, max_normal, rule, BLOCKS)
    scaled = magnitude.to(tl.float32, bitcast=True) * power_of_two(-exponent)[:, None]
    rounded = round_magnitude(scaled, emin, mantissa, float("inf"))
    value = tl.minimum(rounded, max_normal) * power_of_two(exponent)[:, None]
    return value, rounded <= max_normal


@triton.jit(do_not_specialize=["n", "n_blocks"])
def _forward_kernel(x_ptr, p_ptr, out_ptr, n, n_blocks, RAGGED: tl.constexpr, BLOCKS: tl.constexpr):
    offsets, mask, _block, _in_range = block_offsets(n, n_blocks, RAGGED, BLOCKS)
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0)
    share = tl.load(p_ptr)
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    amax = tl.max(magnitude, axis=1)
    low, _low_inside = _quantized(magnitude, amax, p_ptr + LOW, BLOCKS)
    high, _high_inside = _quantized(magnitude, amax, p_ptr + HIGH, BLOCKS)
    # A product with 0 would make NaN of Inf, which rules other than floor reach.
    mixed = (1.0 - share) * low + share * high
    mixed = tl.where(share == 0.0, low, tl.where(share == 1.0, high, mixed))
    value = tl.where((amax < 0x7F800000)[:, None], mixed, float("nan"))
    y = value.to(tl.int32, bitcast=True) | (bits & -0x80000000)
    y = y.to(tl.float32, bitcast=True).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + offsets, y, mask=mask)


@triton.jit(do_not_specialize=["n", "n_blocks"])
def _backward_kernel(
    grad_ptr,
    x_ptr,
    p_ptr,
    grad_x_ptr,
    sums_ptr,
    n,
    n_blocks,
    NEEDS_GRAD_X: tl.constexpr,
    RAGGED: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    offsets, mask, _block, _in_range = block_offsets(n, n_blocks, RAGGED, BLOCKS)
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0)
    grad = tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    share, slope = tl.load(p_ptr), tl.load(p_ptr + 1)
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    amax = tl.max(magnitude, axis=1)
    finite = (amax < 0x7F800000)[:, None]
    low, low_inside = _quantized(magnitude, amax, p_ptr + LOW, BLOCKS)
    high, high_inside = _quantized(magnitude, amax, p_ptr + HIGH, BLOCKS)
    difference = tl.where((low == high) | (finite == 0), 0.0, high - low)
    signed = difference.to(tl.int32, bitcast=True) ^ (bits & -0x80000000)
    products = grad * signed.to(tl.float32, bitcast=True)
    total = tl.sum(tl.sum(products, axis=1), axis=0)
    tl.store(sums_ptr + tl.program_id(0), total * slope)
    if NEEDS_GRAD_X:
        dx = tl.where(low_inside, 1.0 - share, 0.0) + tl.where(high_inside, share, 0.0)
        dx = tl.where(finite, dx, 0.0)
        # Where dx is 0 the gradient is 0 even if grad is not finite.
        kept = tl.where(dx > 0.0, grad * dx, 0.0)
        tl.store(grad_x_ptr + offsets, kept.to(grad_x_ptr.dtype.element_ty), mask=mask)


def continuous_fake_quant(x: Tensor, parameters: Tensor, out: Tensor | None) -> Tensor:
    """See `dmx.numerics.line`; arguments are checked by the door."""
    return launch_forward(_forward_kernel, FORWARD_TILE, x, parameters, out)


def continuous_fake_quant_backward(
    grad: Tensor, x: Tensor, parameters: Tensor, needs_grad_x: bool
) -> tuple[Tensor | None, Tensor]:
    """See `dmx.numerics.continuous_fake_quant_backward`; arguments are checked by the door."""
    return launch_backward(_backward_kernel, BACKWARD_TILE, grad, x, parameters, needs_grad_x)
