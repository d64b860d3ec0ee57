# mypy: allow-untyped-defs
"""MX quantization on a GPU, equal to `dmx.numerics.mx` bit for bit. `ops.py` is the door.

A program takes BLOCKS blocks of 32 as one tile, reads it once and writes it once. Arithmetic as in
`cpu.cpp`: on magnitudes in float32, rounding by adding and subtracting 2**23 steps; the sign bit is
put back at the end. Launches use enable_fp_fusion=False: a fused multiply-add changes bits.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmx.formats import BLOCK_SIZE, BlockFormat, ElementFormat, ScaleRule
from dmx.kernels.buffers import rows_of, writable_in_place
from dmx.numerics.mx import QuantizedTensor
from dmx.numerics.packing import pack_codes

# By bytes of an input element: blocks a program takes and warps it has. Best of those that
# `python -m scripts.benchmarks.kernels --tune` tries on an H100.
FAKE_QUANT_TILE = {4: (64, 4), 2: (64, 4)}
QUANTIZE_TILE = {4: (32, 1), 2: (32, 1)}


@triton.jit
def power_of_two(exponent):
    """2**exponent for int32 exponents in [-127, 127]; -127 is a subnormal float32."""
    bits = tl.where(exponent > -127, (exponent + 127) << 23, 1 << 22)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def offsets_of_blocks(block, n, n_blocks, RAGGED: tl.constexpr, SIZE: tl.constexpr):
    """Element offsets (BLOCKS, SIZE) of blocks, int64 (BLOCKS,), and their mask.

    RAGGED: rows of n values whose last block is short; else n_blocks blocks follow each other.
    """
    lane = tl.arange(0, SIZE)
    in_range = block < n_blocks
    if RAGGED:
        per_row = (n + (SIZE - 1)) // SIZE
        column = (block % per_row)[:, None] * SIZE + lane[None, :]
        offsets = (block // per_row)[:, None] * n + column
        mask = in_range[:, None] & (column < n)
    else:
        offsets = block[:, None] * SIZE + lane[None, :]
        mask = in_range[:, None]
    return offsets, mask


@triton.jit
def block_offsets(n, n_blocks, RAGGED: tl.constexpr, BLOCKS: tl.constexpr):
    """`offsets_of_blocks` of the blocks of 32 of this program, and the block indices with their mask."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    offsets, mask = offsets_of_blocks(block, n, n_blocks, RAGGED, 32)
    return offsets, mask, block, block < n_blocks


@triton.jit
def scale_exponent(
    amax, EMAX: tl.constexpr, M: tl.constexpr, TOP_MANTISSA: tl.constexpr, RULE: tl.constexpr
):
    """Shared exponent from the bits of amax; see `dmx.numerics.scaling`."""
    if RULE == "even":
        amax = amax + (1 << (22 - M))
    exponent = (amax >> 23) - 127 - EMAX
    if RULE == "ceil":
        exponent += ((amax & 0x7FFFFF) != 0).to(tl.int32)
    if RULE == "rceil":
        exponent += ((amax & 0x7FFFFF) > TOP_MANTISSA).to(tl.int32)
    return tl.minimum(tl.maximum(exponent, -127), 127)


@triton.jit
def round_magnitude(scaled, EMIN: tl.constexpr, M: tl.constexpr, MAX_NORMAL: tl.constexpr):
    """Nearest value of the element grid for magnitudes in units of the scale."""
    binade = tl.maximum(scaled.to(tl.int32, bitcast=True) & 0x7F800000, (EMIN + 127) << 23)
    c = (binade + ((23 - M) << 23)).to(tl.float32, bitcast=True)
    return tl.minimum((scaled + c) - c, MAX_NORMAL)


@triton.jit
def least_squares_exponent(
    magnitude,
    floor,
    EMIN: tl.constexpr,
    M: tl.constexpr,
    MAX_NORMAL: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The rule `mse`; see `dmx.numerics.scaling`, also for the order of the sums.

    magnitude: (BLOCKS, 32) bits of |x|. floor: (BLOCKS,) exponent of the floor rule.
    """
    x = magnitude.to(tl.float32, bitcast=True) * power_of_two(-floor)[:, None]
    best = floor
    least = tl.full((BLOCKS,), float("inf"), tl.float32)
    for i in tl.static_range(4):
        exponent = tl.minimum(tl.maximum(floor + (2 - i), -127), 127)
        scaled = x * power_of_two(floor - exponent)[:, None]
        rounded = round_magnitude(scaled, EMIN, M, MAX_NORMAL)
        error = x - rounded * power_of_two(exponent - floor)[:, None]
        a, b = tl.split(tl.reshape(error * error, (BLOCKS, 16, 2)))
        a, b = tl.split(tl.reshape(a + b, (BLOCKS, 8, 2)))
        a, b = tl.split(tl.reshape(a + b, (BLOCKS, 4, 2)))
        a, b = tl.split(tl.reshape(a + b, (BLOCKS, 2, 2)))
        a, b = tl.split(a + b)
        total = a + b
        best = tl.where(total < least, exponent, best)
        least = tl.minimum(total, least)
    return tl.where(tl.max(magnitude, axis=1) > 0, best, -127)


@triton.jit(do_not_specialize=["n", "n_blocks"])
def _fake_quant_kernel(
    x_ptr,
    out_ptr,
    n,
    n_blocks,
    EMIN: tl.constexpr,
    EMAX: tl.constexpr,
    M: tl.constexpr,
    MAX_NORMAL: tl.constexpr,
    TOP_MANTISSA: tl.constexpr,
    RULE: tl.constexpr,
    RAGGED: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    offsets, mask, _block, _in_range = block_offsets(n, n_blocks, RAGGED, BLOCKS)
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0)
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    amax = tl.max(magnitude, axis=1)
    exponent = scale_exponent(amax, EMAX, M, TOP_MANTISSA, RULE)
    if RULE == "mse":
        exponent = least_squares_exponent(magnitude, exponent, EMIN, M, MAX_NORMAL, BLOCKS)
    # A NaN scale makes the whole block NaN.
    scale = tl.where(amax < 0x7F800000, power_of_two(exponent), float("nan"))
    scaled = magnitude.to(tl.float32, bitcast=True) * power_of_two(-exponent)[:, None]
    rounded = round_magnitude(scaled, EMIN, M, MAX_NORMAL)
    value = (rounded * scale[:, None]).to(tl.int32, bitcast=True) | (bits & -0x80000000)
    y = value.to(tl.float32, bitcast=True).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + offsets, y, mask=mask)


@triton.jit(do_not_specialize=["n", "n_blocks"])
def _quantize_kernel(
    x_ptr,
    codes_ptr,
    scale_ptr,
    n,
    n_blocks,
    EMIN: tl.constexpr,
    EMAX: tl.constexpr,
    M: tl.constexpr,
    BITS: tl.constexpr,
    MAX_NORMAL: tl.constexpr,
    MAX_CODE: tl.constexpr,
    NAN_CODE: tl.constexpr,
    TOP_MANTISSA: tl.constexpr,
    RULE: tl.constexpr,
    PACKED: tl.constexpr,
    RAGGED: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    offsets, mask, block, in_range = block_offsets(n, n_blocks, RAGGED, BLOCKS)
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0)
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    amax = tl.max(magnitude, axis=1)
    finite = amax < 0x7F800000
    exponent = scale_exponent(amax, EMAX, M, TOP_MANTISSA, RULE)
    if RULE == "mse":
        exponent = least_squares_exponent(magnitude, exponent, EMIN, M, MAX_NORMAL, BLOCKS)
    tl.store(scale_ptr + block, tl.where(finite, exponent + 127, 255).to(tl.uint8), mask=in_range)
    scaled = magnitude.to(tl.float32, bitcast=True) * power_of_two(-exponent)[:, None]
    LOW: tl.constexpr = (EMIN + 127) << 23
    above = tl.maximum(scaled.to(tl.int32, bitcast=True) & 0x7F800000, LOW) - LOW
    c = above + (LOW + ((23 - M) << 23))
    total = (scaled + c.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
    # total - c counts steps; a carry out of the mantissa reaches the next binade by itself.
    codes = tl.minimum((total - c) + (above >> (23 - M)), MAX_CODE)
    codes = codes | ((bits >> (32 - BITS)) & (1 << (BITS - 1)))
    codes = tl.where(finite[:, None], codes, NAN_CODE)
    if PACKED and BITS == 4:
        shifts = (tl.arange(0, 8) * 4)[None, None, :]
        words = tl.sum(tl.reshape(codes, (BLOCKS, 4, 8)) << shifts, axis=2)
        at = block[:, None] * 4 + tl.arange(0, 4)[None, :]
        tl.store(codes_ptr.to(tl.pointer_type(tl.int32)) + at, words, mask=in_range[:, None])
    elif PACKED and BITS == 6:
        # Four codes make 24 bits, four of those make three words.
        shifts = (tl.arange(0, 4) * 6)[None, None, :]
        quads = tl.sum(tl.reshape(codes, (BLOCKS, 8, 4)) << shifts, axis=2)
        even, odd = tl.split(tl.reshape(quads, (BLOCKS, 2, 2, 2)))
        q0, q2 = tl.split(even)
        q1, q3 = tl.split(odd)
        at = block[:, None] * 6 + tl.arange(0, 2)[None, :] * 3
        words_ptr = codes_ptr.to(tl.pointer_type(tl.int32)) + at
        tl.store(words_ptr, q0 | (q1 << 24), mask=in_range[:, None])
        tl.store(words_ptr + 1, (q1 >> 8) | (q2 << 16), mask=in_range[:, None])
        tl.store(words_ptr + 2, (q2 >> 16) | (q3 << 8), mask=in_range[:, None])
    else:
        tl.store(codes_ptr + offsets, codes.to(tl.uint8), mask=mask)


def top_mantissa(element: ElementFormat) -> int:
    """Mantissa bits of max_normal as in float32."""
    return element.max_mantissa << (23 - element.mantissa_bits)


def fake_quant(
    x: Tensor, block_format: BlockFormat, axis: int, scale_rule: ScaleRule, out: Tensor | None
) -> Tensor:
    """See `dmx.numerics.fake_quant`; arguments are checked by the door.

    The last axis is fast; another axis, or a tensor with gaps, goes through a contiguous copy.
    """
    last = x.movedim(axis, -1).contiguous()
    direct = out is not None and axis == x.ndim - 1 and writable_in_place(x, out)
    target = out if direct and out is not None else torch.empty_like(last)
    fake_quant_to(last, target, block_format, scale_rule)
    if direct:
        return target
    result = target.movedim(-1, axis)
    return result.contiguous() if out is None else out.copy_(result)


def fake_quant_to(
    x: Tensor, out: Tensor, block_format: BlockFormat, scale_rule: ScaleRule
) -> Tensor:
    """See `ops.fake_quant_to`; arguments are checked by the door."""
    element = block_format.element
    _rows, n, n_blocks = rows_of(x)
    if n_blocks:
        blocks, warps = FAKE_QUANT_TILE[x.element_size()]
        with torch.cuda.device(x.device):
            _fake_quant_kernel[(triton.cdiv(n_blocks, blocks),)](
                x,
                out,
                n,
                n_blocks,
                EMIN=element.emin,
                EMAX=element.emax,
                M=element.mantissa_bits,
                MAX_NORMAL=element.max_normal,
                TOP_MANTISSA=top_mantissa(element),
                RULE=scale_rule,
                RAGGED=n % BLOCK_SIZE != 0,
                BLOCKS=blocks,
                num_warps=warps,
                enable_fp_fusion=False,
            )
    return out


def _launch_quantize(
    last: Tensor,
    codes: Tensor,
    scale_codes: Tensor,
    element: ElementFormat,
    scale_rule: ScaleRule,
    packed: bool,
) -> None:
    _rows, n, n_blocks = rows_of(last)
    if not n_blocks:
        return
    blocks, warps = QUANTIZE_TILE[last.element_size()]
    options: dict[str, Any] = {"num_warps": warps, "enable_fp_fusion": False}
    with torch.cuda.device(last.device):
        _quantize_kernel[(triton.cdiv(n_blocks, blocks),)](
            last,
            codes,
            scale_codes,
            n,
            n_blocks,
            EMIN=element.emin,
            EMAX=element.emax,
            M=element.mantissa_bits,
            BITS=element.bits,
            MAX_NORMAL=element.max_normal,
            MAX_CODE=element.max_code,
            NAN_CODE=element.nan_block_code,
            TOP_MANTISSA=top_mantissa(element),
            RULE=scale_rule,
            PACKED=packed,
            RAGGED=n % BLOCK_SIZE != 0,
            BLOCKS=blocks,
            **options,
        )


def _empty_scales(last: Tensor) -> Tensor:
    shape = (*last.shape[:-1], -(-last.shape[-1] // BLOCK_SIZE))
    return torch.empty(shape, dtype=torch.uint8, device=last.device)


def quantize(
    x: Tensor, block_format: BlockFormat, axis: int, scale_rule: ScaleRule
) -> QuantizedTensor:
    """See `dmx.numerics.quantize`; arguments are checked by the door."""
    last = x.movedim(axis, -1).contiguous()
    codes = torch.empty(last.shape, dtype=torch.uint8, device=x.device)
    scale_codes = _empty_scales(last)
    _launch_quantize(last, codes, scale_codes, block_format.element, scale_rule, packed=False)
    codes, scale_codes = (t.movedim(-1, axis).contiguous() for t in (codes, scale_codes))
    return QuantizedTensor(codes, scale_codes, block_format, axis, x.dtype)


def quantize_packed(
    x: Tensor, block_format: BlockFormat, scale_rule: ScaleRule
) -> tuple[Tensor, Tensor]:
    """Packed codes and scales along the last axis; arguments are checked by the door."""
    element = block_format.element
    last = x.contiguous()
    if last.shape[-1] % BLOCK_SIZE:
        # Rows that end within a word: the codes are packed in a second step.
        quantized = quantize(x, block_format, x.ndim - 1, scale_rule)
        return pack_codes(quantized.codes, element.bits), quantized.scale_codes
    shape = (*last.shape[:-1], last.shape[-1] * element.bits // 8)
    packed = torch.empty(shape, dtype=torch.uint8, device=x.device)
    scale_codes = _empty_scales(last)
    _launch_quantize(last, packed, scale_codes, element, scale_rule, packed=True)
    return packed, scale_codes
