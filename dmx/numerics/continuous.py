"""The continuous quantizer: a real offset b in [0, 2] moves between the formats of a family.

Families whose neighbours have a common element path move along it, described here; between others, or
where scale rules are not floor, it is the straight line of `dmx.numerics.line`. A row of parameters says
by its length which of the two it is for.

With real exponent bits e(b), mantissa bits m(b) and a cap on the top mantissa, K = floor(log2 amax)
of the block, E_max = 2**(e-1), E_min = 2 - 2**(e-1), S = max(K - E_max, -127):

    step = 2**(max(floor(log2|x|), S + E_min) - m)
    top  = 2**(S + E_max) * min(2 - 2**-m, cap)
    y    = clamp(step * rne(x / step), -top, top)

| family              | e                 | m               | cap                      |
|---------------------|-------------------|-----------------|--------------------------|
| mxfp8_mxfp4         | 2 + b             | 1 + b           | 1.75                     |
| mxfp6_mxfp4         | 2                 | 1 + b           | 1.875                    |
| mxfp8_mxfp6_mxfp4   | 2 + 2 max(b-1, 0) | 1 + 2 min(b, 1) | 1.875 - 0.125 max(b-1,0) |

It is aligned at the top of the block, so nothing jumps at fractional formats (the published
quantizer doubles its scale there), and at the stops it equals the MX formats bit for bit.

Derivatives are straight-through: rounding has slope one and floors are constants, so
dy/dx = 1 inside and 0 where clamped, dy/db = (rne(r) - r) dstep/db with r = x/step inside and
sign(x) dtop/db where clamped. Blocks with NaN or Inf give NaN and have both gradients zero.

Everything per element happens in units of 2**K, where it depends on b alone, through the eight
float32 numbers of `path_parameters`: computed once a step for all units, in float64, because
exp2 has to be exact at the stops.

Source: dMX, arXiv 2606.04115 (the path in b); top alignment and the third family are ours.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dmx.formats import AskedPath, Family, ScaleRule, get_family, soft_path
from dmx.numerics.line import (
    N_LINE_PARAMETERS,
    line_derivatives,
    line_fake_quant,
    line_parameters,
    stated_rules,
)
from dmx.numerics.mixed_line import N_MIXED_PARAMETERS, mixed_derivatives, mixed_fake_quant
from dmx.numerics.mx import check_input, from_blocks, to_blocks
from dmx.numerics.rounding import FP32_MANTISSA_BITS, exact_power_of_two, float_exponent

LN2 = math.log(2.0)
N_PATH_PARAMETERS = 8


class PathParameters(NamedTuple):
    """What the quantizer needs of one offset; float32, in units of 2**K of the block."""

    inv_step: Tensor
    """2**m: steps per binade base."""
    step: Tensor
    """2**-m"""
    e_max: Tensor
    """E_max; only blocks with K < E_max - 127 need it."""
    low: Tensor
    """2**(E_min - E_max): below this binade the step stops shrinking."""
    top: Tensor
    """Largest value: min(2 - 2**-m, cap)."""
    dlog_step: Tensor
    """d ln(2**m)/db = ln2 * dm/db"""
    dlog_emax: Tensor
    """ln2 * dE_max/db"""
    dtop: Tensor
    """d top/db"""


def path_parameters(offsets: Tensor, family: str | Sequence[str] | Family) -> Tensor:
    """Parameters of every offset at once, on the element path.

    Args:
        offsets: (...) float32 in [0, 2]; not differentiated through.

    Returns:
        (..., 8) float32, fields in the order of `PathParameters`. At b = 1 of the three-stop
        family the derivatives are the right-hand ones.

    Raises:
        FormatError: a family without an element path.
    """
    family = get_family(family)
    soft_path(family, stated_rules(family, None), "element")
    b = offsets.detach().to(torch.float64)
    one, zero = torch.ones_like(b), torch.zeros_like(b)
    if family.name == "mxfp8_mxfp4":
        e, de, m, dm, cap, dcap = 2 + b, one, 1 + b, one, 1.75 * one, zero
    elif family.name == "mxfp6_mxfp4":
        e, de, m, dm, cap, dcap = 2 * one, zero, 1 + b, one, 1.875 * one, zero
    else:
        upper = (b - 1).clamp(min=0)
        right = (b >= 1).to(torch.float64)
        e, de, m, dm = 2 + 2 * upper, 2 * right, 1 + 2 * b.clamp(max=1), 2 * (1 - right)
        cap, dcap = 1.875 - 0.125 * upper, -0.125 * right
    e_max = torch.exp2(e - 1)
    free_top = 2 - torch.exp2(-m)
    capped = free_top >= cap
    fields = PathParameters(
        inv_step=torch.exp2(m),
        step=torch.exp2(-m),
        e_max=e_max,
        low=torch.exp2(2 - 2 * e_max),
        top=torch.where(capped, cap, free_top),
        dlog_step=LN2 * dm,
        dlog_emax=LN2 * LN2 * e_max * de,
        dtop=torch.where(capped, dcap, LN2 * dm * torch.exp2(-m)),
    )
    return torch.stack(fields, dim=-1).to(torch.float32)


def continuous_parameters(
    offsets: Tensor,
    family: str | Sequence[str] | Family,
    rules: Sequence[ScaleRule | None] | None = None,
    path: AskedPath = "auto",
) -> Tensor:
    """Parameters of every offset at once, on the path that is asked for.

    Args:
        offsets: (...) float32 in [0, 2]; not differentiated through.
        rules: scale rule of each format; None: the usual one.
        path: auto = the element path where there is one, else the straight line.

    Returns:
        (..., 8), (..., 12) or (..., 6) float32: `path_parameters` or `line_parameters`.

    Raises:
        FormatError: there is no element path.
    """
    family = get_family(family)
    stated = stated_rules(family, rules)
    if soft_path(family, stated, path) == "line":
        return line_parameters(offsets, family, stated)
    return path_parameters(offsets, family)


def is_line(parameters: Tensor) -> bool:
    """Whether a row of parameters is of the straight line between MX formats."""
    return parameters.shape[-1] == N_LINE_PARAMETERS


def is_mixed(parameters: Tensor) -> bool:
    """Whether a row of parameters is of the straight line to or from another than an MX format."""
    return parameters.shape[-1] == N_MIXED_PARAMETERS


class _Blocks(NamedTuple):
    """Intermediate values in units of 2**K: (..., n_blocks, 32), `exponent`/`finite` without 32."""

    rounded: Tensor
    ratio: Tensor
    step: Tensor
    is_low: Tensor
    clamped: Tensor
    top: Tensor
    widening: Tensor
    exponent: Tensor
    finite: Tensor
    sign: Tensor


def _quantize_blocks(x: Tensor, parameters: Tensor) -> _Blocks:
    p = PathParameters(*parameters.unbind(-1))
    blocks = to_blocks(x, -1)
    finite = blocks.isfinite().all(-1)
    clean = torch.where(finite[..., None], blocks, 0.0)
    exponent = float_exponent(clean.abs().amax(-1))
    # A block whose scale exponent would fall below -127 keeps S = -127: low and top widen.
    # float64, so that every backend rounds the power to the same float32.
    excess = (p.e_max - 127 - exponent).clamp(min=0).to(torch.float64)
    widening = torch.exp2(excess).to(torch.float32)[..., None]
    u = clean * exact_power_of_two(-exponent)[..., None]
    binade = (u.abs().view(torch.int32) & ~((1 << FP32_MANTISSA_BITS) - 1)).view(torch.float32)
    low = p.low * widening
    is_low = binade < low
    binade = torch.where(is_low, low, binade)
    ratio = u * ((1.0 / binade) * p.inv_step)
    step = binade * p.step
    rounded = torch.round(ratio)
    top = p.top * widening
    return _Blocks(
        rounded,
        ratio,
        step,
        is_low,
        (rounded * step).abs() > top,
        top,
        widening,
        exponent,
        finite,
        torch.sign(u),
    )


def continuous_fake_quant(
    x: Tensor, parameters: Tensor, *, amax: Tensor | float | None = None
) -> Tensor:
    """Values of the continuous quantizer, blocks along the last axis, without autograd.

    Args:
        x: (..., n) fp32, bf16 or fp16.
        parameters: (8,) float32, one row of `path_parameters`, or (12,) or (6,), one of `line_parameters`.
        amax: of formats with other scales than powers of two, as of `dmx.numerics.quantize`.

    Returns:
        Shape and dtype of x.
    """
    if is_mixed(parameters):
        return mixed_fake_quant(x, parameters, amax)
    if is_line(parameters):
        return line_fake_quant(x, parameters)
    check_input(x)
    q = _quantize_blocks(x, parameters)
    top = q.top.expand_as(q.ratio)
    u = torch.where(q.clamped, torch.copysign(top, q.ratio), q.rounded * q.step)
    values = torch.where(
        q.finite[..., None], u * exact_power_of_two(q.exponent)[..., None], torch.nan
    )
    return from_blocks(values, x.shape, x.ndim - 1).to(x.dtype)


def continuous_derivatives(
    x: Tensor, parameters: Tensor, *, amax: Tensor | float | None = None
) -> tuple[Tensor, Tensor]:
    """dy/dx in [0, 1] and dy/db of each element, both float32 with the shape of x."""
    if is_mixed(parameters):
        return mixed_derivatives(x, parameters, amax)
    if is_line(parameters):
        return line_derivatives(x, parameters)
    check_input(x)
    p = PathParameters(*parameters.unbind(-1))
    q = _quantize_blocks(x, parameters)
    is_widened = q.widening > 1
    # In the lowest binade the step also moves with S + E_min: twice E_max, once where S is held.
    dlog_low = torch.where(is_widened, p.dlog_emax, 2 * p.dlog_emax)
    dlog = p.dlog_step + torch.where(q.is_low, dlog_low, torch.zeros_like(q.ratio))
    inside = (q.ratio - q.rounded) * (q.step * dlog)
    dtop = p.dtop * q.widening + torch.where(is_widened, q.top * p.dlog_emax, 0.0)
    db = torch.where(q.clamped, q.sign * dtop, inside)
    finite = q.finite[..., None]
    db = torch.where(finite, db * exact_power_of_two(q.exponent)[..., None], 0.0)
    dx = (finite & ~q.clamped).to(torch.float32)
    axis = x.ndim - 1
    return from_blocks(dx, x.shape, axis), from_blocks(db, x.shape, axis)


def continuous_fake_quant_backward(
    grad: Tensor, x: Tensor, parameters: Tensor, *, amax: Tensor | float | None = None
) -> tuple[Tensor, Tensor]:
    """Gradients by x and by the offset.

    Args:
        grad: gradient by the output; shape and dtype of x.

    Returns:
        grad_x (shape and dtype of x) and grad_offset (0-d float32, summed in float32).
    """
    return gradients_of(grad, *continuous_derivatives(x, parameters, amax=amax))


def gradients_of(grad: Tensor, dx: Tensor, db: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients by x and by the offset, of the derivatives of each element."""
    wide = grad.to(torch.float32)
    # Where dx is 0 the gradient is 0 even if grad is not finite.
    grad_x = torch.where(dx > 0, wide * dx, 0.0).to(grad.dtype)
    return grad_x, (wide * db).sum()
