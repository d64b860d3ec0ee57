# mypy: allow-untyped-defs
"""The continuous quantizer on a GPU: forward and fused backward. `ops.py` is the door.

Names and formulas are those of `dmx.numerics.continuous`, arithmetic is that of `cpu.cpp`. The path
parameters are read on the device, nothing is synchronized and nothing depends on their values, so
both can stand in a CUDA graph. The backward recomputes what it needs from x; the offset's gradient
is one partial sum per program, added up by a second small kernel in a fixed order.
"""

import triton
import triton.language as tl
from torch import Tensor

from dmx.kernels.triton_launch import launch_backward, launch_forward
from dmx.kernels.triton_mx import block_offsets, power_of_two

# By bytes of an input element: blocks a program takes and warps it has; see `triton_mx`.
FORWARD_TILE = {4: (64, 4), 2: (64, 4)}
BACKWARD_TILE = {4: (16, 1), 2: (16, 1)}


@triton.jit
def _widening(e_max, exponent):
    """2**max(0, E_max - 127 - K); float64 so that all backends round to the same float32.

    Hardly any tile has such a block, so the slow exponential sits behind a branch.
    """
    excess = (e_max - 127.0) - exponent.to(tl.float32)
    widening = tl.full(exponent.shape, 1.0, tl.float32)
    if tl.max(excess, axis=0) > 0.0:
        wide = tl.exp2(tl.maximum(excess, 0.0).to(tl.float64)).to(tl.float32)
        widening = tl.where(excess > 0.0, wide, 1.0)
    return widening


@triton.jit
def _round(magnitude, inv_step, step, low, inverse_low):
    """Steps of |x| (real and rounded), the step, and the binade, in units of 2**K."""
    binade = magnitude.to(tl.int32, bitcast=True) & 0x7F800000
    # 1/binade exactly; a binade below `low` has the larger reciprocal.
    inverse = (0x7F000000 - binade).to(tl.float32, bitcast=True) * inv_step
    ratio = magnitude * tl.minimum(inverse, inverse_low)
    binade = binade.to(tl.float32, bitcast=True)
    rounded = (ratio + 8388608.0) - 8388608.0
    return ratio, rounded, tl.maximum(binade, low) * step, binade


@triton.jit(do_not_specialize=["n", "n_blocks"])
def _forward_kernel(x_ptr, p_ptr, out_ptr, n, n_blocks, RAGGED: tl.constexpr, BLOCKS: tl.constexpr):
    offsets, mask, _block, _in_range = block_offsets(n, n_blocks, RAGGED, BLOCKS)
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0)
    inv_step, step, e_max = tl.load(p_ptr), tl.load(p_ptr + 1), tl.load(p_ptr + 2)
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    amax = tl.max(magnitude, axis=1)
    finite = amax < 0x7F800000
    exponent = tl.where(finite, (amax >> 23) - 127, 0)
    widening = _widening(e_max, exponent)
    low = tl.load(p_ptr + 3) * widening
    top = tl.load(p_ptr + 4) * widening
    inverse_low = tl.div_rn(tl.full(low.shape, 1.0, tl.float32), low) * inv_step
    magnitude = magnitude.to(tl.float32, bitcast=True) * power_of_two(-exponent)[:, None]
    _ratio, rounded, steps, _binade = _round(
        magnitude, inv_step, step, low[:, None], inverse_low[:, None]
    )
    value = tl.minimum(rounded * steps, top[:, None])
    scale = tl.where(finite, power_of_two(exponent), float("nan"))
    y = (value * scale[:, None]).to(tl.int32, bitcast=True) | (bits & -0x80000000)
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
    grad = tl.load(grad_ptr + offsets, mask=mask, other=0.0)
    inv_step, step, e_max = tl.load(p_ptr), tl.load(p_ptr + 1), tl.load(p_ptr + 2)
    dlog_step, dlog_emax = tl.load(p_ptr + 5), tl.load(p_ptr + 6)
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    amax = tl.max(magnitude, axis=1)
    finite = amax < 0x7F800000
    exponent = tl.where(finite, (amax >> 23) - 127, 0)
    widening = _widening(e_max, exponent)
    low = tl.load(p_ptr + 3) * widening
    top = tl.load(p_ptr + 4) * widening
    inverse_low = tl.div_rn(tl.full(low.shape, 1.0, tl.float32), low) * inv_step
    # In the lowest binade the step also moves with S + E_min: twice E_max, once where S is held.
    is_widened = widening > 1.0
    dlog_low = dlog_step + tl.where(is_widened, dlog_emax, 2 * dlog_emax)
    dtop = tl.load(p_ptr + 7) * widening + tl.where(is_widened, top * dlog_emax, 0.0)
    # Blocks that are not finite become NaN, which counts as clamped below, with slope zero.
    dtop = tl.where(finite, dtop, 0.0)
    inverse = tl.where(finite, power_of_two(-exponent), float("nan"))
    magnitude = magnitude.to(tl.float32, bitcast=True) * inverse[:, None]
    ratio, rounded, steps, binade = _round(
        magnitude, inv_step, step, low[:, None], inverse_low[:, None]
    )
    dlog = tl.where(binade < low[:, None], dlog_low[:, None], dlog_step)
    inside = rounded * steps <= top[:, None]  # False for NaN
    slope = tl.where(inside, (ratio - rounded) * (steps * dlog), dtop[:, None])
    slope = slope * power_of_two(exponent)[:, None]
    signed = slope.to(tl.int32, bitcast=True) ^ (bits & -0x80000000)
    products = grad.to(tl.float32) * signed.to(tl.float32, bitcast=True)
    tl.store(sums_ptr + tl.program_id(0), tl.sum(tl.sum(products, axis=1), axis=0))
    if NEEDS_GRAD_X:
        kept = tl.where(inside, grad, tl.zeros_like(grad))
        tl.store(grad_x_ptr + offsets, kept, mask=mask)


def continuous_fake_quant(x: Tensor, parameters: Tensor, out: Tensor | None) -> Tensor:
    """See `dmx.numerics.continuous_fake_quant`; arguments are checked by the door."""
    return launch_forward(_forward_kernel, FORWARD_TILE, x, parameters, out)


def continuous_fake_quant_backward(
    grad: Tensor, x: Tensor, parameters: Tensor, needs_grad_x: bool
) -> tuple[Tensor | None, Tensor]:
    """See `dmx.numerics.continuous_fake_quant_backward`; arguments are checked by the door."""
    return launch_backward(_backward_kernel, BACKWARD_TILE, grad, x, parameters, needs_grad_x)
