# mypy: allow-untyped-defs
"""AdamW with masters or moments in few bits on a GPU, equal to the reference bit for bit. `ops.py` is the door.

Formulas are those of `dmx.numerics.moments`. One pass: each tensor is read once and written once, and what is drawn is
a hash made on the way. Codes are found in the table by halving, which lies in the nearest cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmx.numerics.moments import (
    BLOCK,
    FACTORS,
    SHIFTS,
    Moments,
    Moments8,
    StepNumbers,
    signed_word,
)

BLOCKS, WARPS = 4, 4
"""Blocks of 256 elements that a program takes, and its warps."""

SIZE = tl.constexpr(BLOCK)
SHIFT0, SHIFT1, SHIFT2 = (tl.constexpr(s) for s in SHIFTS)
FACTOR0, FACTOR1 = (tl.constexpr(f) for f in FACTORS)
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


@triton.jit
def _hashed(x):
    x ^= x >> SHIFT0
    x *= FACTOR0
    x ^= x >> SHIFT1
    x *= FACTOR1
    return x ^ (x >> SHIFT2)


@triton.jit
def _random_bits(at, key):
    """uint32 of each index, int64."""
    high = (at >> 32).to(tl.uint32)
    low = (at & 0xFFFFFFFF).to(tl.uint32)
    return _hashed(low ^ _hashed(high + key.to(tl.uint32)))


@triton.jit
def _put(to_ptr, at, value, mask, key):
    """Stored as it is, or rounded stochastically to bfloat16."""
    if to_ptr.dtype.element_ty == tl.bfloat16:
        noise = (_random_bits(at, key) >> 16).to(tl.int32)
        bits = (value.to(tl.int32, bitcast=True) + noise) & -0x10000
        tl.store(to_ptr + at, bits.to(tl.float32, bitcast=True).to(tl.bfloat16), mask=mask)
    else:
        tl.store(to_ptr + at, value, mask=mask)


@triton.jit
def _codes(value, scale, table_ptr, at, key, SIGNED: tl.constexpr):
    """Codes (BLOCKS, 256) of values under the scales of their blocks; see `Moments8.write`."""
    shares = tl.div_rn(value, tl.zeros_like(value) + tl.maximum(scale, TINY)[:, None])
    shares = tl.minimum(tl.maximum(shares, -1.0), 1.0)
    low = tl.zeros(value.shape, tl.int32)
    for i in tl.static_range(8):
        middle = low + (128 >> i)
        low = tl.where(tl.load(table_ptr + middle) > shares, low, middle)
    low = tl.minimum(low, 254)
    below, above = tl.load(table_ptr + low), tl.load(table_ptr + low + 1)
    chance = tl.div_rn(shares - below, above - below)
    drawn = (_random_bits(at, key) >> 8).to(tl.float32) * (1.0 / 16777216.0)
    codes = low + (drawn < chance).to(tl.int32)
    if not SIGNED:
        codes = tl.maximum(codes, (value > 0).to(tl.int32))
    return codes.to(tl.uint8)


@triton.jit(do_not_specialize=["key0", "key1", "key2"])
def _narrow_adamw_kernel(
    masters_ptr, gradient_ptr, factor_ptr, first_ptr, second_ptr,
    first_scales_ptr, second_scales_ptr, first_table_ptr, second_table_ptr,
    n, beta1, beta2, rest1, rest2, rate, root, epsilon, key0, key1, key2,
    IS_8BIT: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    at = block[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    mask, has_scale = at < n, block * SIZE < n
    master = tl.load(masters_ptr + at, mask=mask, other=0.0).to(tl.float32)
    gradient = tl.load(gradient_ptr + at, mask=mask, other=0.0).to(tl.float32)
    gradient *= tl.load(factor_ptr)
    first, second = (
        tl.load(first_ptr + at, mask=mask, other=0),
        tl.load(second_ptr + at, mask=mask, other=0),
    )
    if IS_8BIT:
        m_scale = tl.load(first_scales_ptr + block, mask=has_scale, other=0.0)
        v_scale = tl.load(second_scales_ptr + block, mask=has_scale, other=0.0)
        m = tl.load(first_table_ptr + first.to(tl.int32)) * m_scale[:, None]
        v = tl.load(second_table_ptr + second.to(tl.int32)) * v_scale[:, None]
        v = v * v
    else:
        m, v = first.to(tl.float32), second.to(tl.float32)
    m = m * beta1 + gradient * rest1
    v = v * beta2 + (gradient * gradient) * rest2
    deviation = tl.sqrt_rn(v)
    step = tl.div_rn(m, deviation * root + epsilon) * rate
    _put(masters_ptr, at, master - step, mask, key0)
    if IS_8BIT:
        m = tl.where(mask, m, 0.0)
        deviation = tl.where(mask, deviation, 0.0)
        m_scale, v_scale = tl.max(tl.abs(m), axis=1), tl.max(deviation, axis=1)
        tl.store(first_scales_ptr + block, m_scale, mask=has_scale)
        tl.store(second_scales_ptr + block, v_scale, mask=has_scale)
        m_codes = _codes(m, m_scale, first_table_ptr, at, key1, True)
        v_codes = _codes(deviation, v_scale, second_table_ptr, at, key2, False)
        tl.store(first_ptr + at, m_codes, mask=mask)
        tl.store(second_ptr + at, v_codes, mask=mask)
    else:
        _put(first_ptr, at, m, mask, key1)
        _put(second_ptr, at, v, mask, key2)


def narrow_adamw(
    masters: Tensor,
    gradient: Tensor,
    factor: Tensor,
    first: Moments,
    second: Moments,
    numbers: StepNumbers,
) -> None:
    """See `dmx.numerics.moments.narrow_adamw`; all without gaps."""
    n = len(masters)
    if not n:
        return
    kept = [
        (m.codes, m.scales, m.table) if isinstance(m, Moments8) else (m, masters, masters)
        for m in (first, second)
    ]
    (first_own, first_scales, first_table), (second_own, second_scales, second_table) = kept
    with torch.cuda.device(masters.device):
        _narrow_adamw_kernel[(triton.cdiv(n, BLOCKS * BLOCK),)](
            masters,
            gradient,
            factor,
            first_own,
            second_own,
            first_scales,
            second_scales,
            first_table,
            second_table,
            n,
            numbers.beta1,
            numbers.beta2,
            numbers.rest1,
            numbers.rest2,
            numbers.rate,
            numbers.root,
            numbers.epsilon,
            *map(signed_word, numbers.keys),
            IS_8BIT=isinstance(first, Moments8),
            BLOCKS=BLOCKS,
            num_warps=WARPS,
            enable_fp_fusion=False,
        )
