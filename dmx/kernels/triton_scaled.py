# mypy: allow-untyped-defs
"""Quantization to nvfp4 and fp8 on a GPU, equal to the reference bit for bit. `ops.py` is the door.

Formulas are those of `dmx.numerics.scaled`, rounding is that of `triton_mx`. A tensor is read once and written
once where its largest magnitude is known (inputs in nvfp4, by calibration) or belongs to a row that one program
holds (fp8). Else it is read twice: first for the amax of the tensor, or of rows too long to be held. Nothing is
read on the host, so all of it can stand in a CUDA graph.

Quotients of blocks are rounded as IEEE says (`div_rn`), which would take half the time of a pass were it done for
each element. There a product with the inverse of the scale is corrected once by its remainder, with fused
multiply-adds: not always the nearest float32, but on the same side of every midpoint between two elements, which is
what decides. That was tried out for all 2**23 mantissas of a scale, the midpoints of E2M1 and the two floats
around them on either side; likewise, with three floats on either side, for those of E4M3.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmx.formats import ALL_RULES, E2M1, E4M3, NVFP4, BlockFormat, ScaleRule
from dmx.kernels.buffers import rows_of, writable_in_place
from dmx.kernels.triton_mx import offsets_of_blocks, power_of_two
from dmx.numerics.rounding import FP32_BIAS
from dmx.numerics.scaled import LEAST_AMAX, LEAST_ROW_SCALE, MSE_CODES

# By bytes of an element: blocks that a program takes, and warps; see `triton_mx`.
NVFP4_TILE = {4: (128, 4), 2: (128, 4)}
AMAX_TILE = {4: (256, 8), 2: (256, 8)}
AMAX_PROGRAMS = 1024
"""That share the blocks of a tensor: each ends with one atomic maximum."""
ROW_TILE = 4096
"""Elements that a program takes of short rows, at least."""
ROW_LIMIT = 16384
"""Elements of the longest row that one program holds."""
ELEMENTS_A_THREAD = 16

INFINITY = tl.constexpr(0x7F800000)
"""Bits of float32 Inf: the magnitudes from here on are not finite."""
FP4_EMIN, FP4_M, FP4_TOP = (
    tl.constexpr(v) for v in (E2M1.emin, E2M1.mantissa_bits, E2M1.max_normal)
)
FP8_EMIN, FP8_M, FP8_TOP = (
    tl.constexpr(v) for v in (E4M3.emin, E4M3.mantissa_bits, E4M3.max_normal)
)
FP8_LEAST, FP8_NORMAL = tl.constexpr(E4M3.min_subnormal), tl.constexpr(E4M3.min_normal)
FP8_NORMAL_CODE = tl.constexpr(1 << E4M3.mantissa_bits)
FP8_MAX_CODE = tl.constexpr(E4M3.max_code)
CODE_SHIFT = tl.constexpr(23 - E4M3.mantissa_bits)
CODE_BIAS = tl.constexpr((FP32_BIAS - E4M3.bias) << E4M3.mantissa_bits)
"""What the codes of E4M3 lack to be the upper bits of float32."""
GLOBAL_TOP = tl.constexpr(E2M1.max_normal * E4M3.max_normal)
BY_AMAX, MSE, ALL_DIGITS = (
    tl.constexpr(ALL_RULES.index(rule)) for rule in ("amax/6", "mse", "amax/448_float32")
)
SMALL, LIFT = tl.constexpr(2.0**-60), tl.constexpr(2.0**64)
LEAST, LEAST_SCALE = tl.constexpr(LEAST_AMAX), tl.constexpr(LEAST_ROW_SCALE)
FIRST_CODE, N_CODES = tl.constexpr(MSE_CODES[0]), tl.constexpr(len(MSE_CODES))
assert tuple(range(MSE_CODES[0], MSE_CODES[-1] - 1, -1)) == MSE_CODES


@triton.jit
def divided(x, by):
    """x / by as IEEE rounds it."""
    return tl.div_rn(x, tl.zeros_like(x) + by)


@triton.jit
def round_beyond(scaled, emin, mantissa):
    """As `dmx.numerics.rounding.unclamped_round`, of magnitudes; far beyond the grid NaN, which a minimum drops."""
    binade = tl.maximum(scaled.to(tl.int32, bitcast=True) & 0x7F800000, (emin + 127) << 23)
    c = (binade + ((23 - mantissa) << 23)).to(tl.float32, bitcast=True)
    return (scaled + c) - c


@triton.jit
def inverse_global_scale(amax):
    """6 * 448 / amax of a tensor."""
    return divided(tl.full((1,), GLOBAL_TOP, tl.float32), tl.where(amax < LEAST, LEAST, amax))


@triton.jit
def _mapped_to(LARGEST: tl.constexpr, amax, inv_global):
    """E4M3 scales that map the amax of each block to LARGEST."""
    # A product in float64 is nearer to the quotient than that is to any midpoint of float32.
    share = (amax.to(tl.float64) * (1.0 / LARGEST)).to(tl.float32)
    rounded = tl.minimum(round_beyond(share * inv_global, FP8_EMIN, FP8_M), FP8_TOP)
    rounded = tl.maximum(rounded, FP8_LEAST)
    return tl.where(amax > 0, rounded, 0.0)


@triton.jit
def _near(stored, step):
    """The E4M3 number `step` codes above; a positive one."""
    code = (stored.to(tl.int32, bitcast=True) >> CODE_SHIFT) - CODE_BIAS
    small = (stored * (1.0 / FP8_LEAST)).to(tl.int32)
    code = tl.where(stored < FP8_NORMAL, small, code) + step
    code = tl.minimum(tl.maximum(code, 1), FP8_MAX_CODE)
    normal = ((code + CODE_BIAS) << CODE_SHIFT).to(tl.float32, bitcast=True)
    small = code.to(tl.float32) * FP8_LEAST
    return tl.where(code < FP8_NORMAL_CODE, small, normal)


@triton.jit
def _squared_error(x, stored, inv_global, unit, BLOCKS: tl.constexpr):
    """Of blocks (BLOCKS, 16), magnitudes in units, under E4M3 scales; summed as `sum_by_pairs` does."""
    scale = (divided(stored, inv_global) * unit)[:, None]
    safe = tl.where(scale > 0, scale, 1.0)
    rounded = tl.minimum(round_beyond(_quotient(x, safe), FP4_EMIN, FP4_M), FP4_TOP)
    error = x - rounded * scale
    a, b = tl.split(tl.reshape(error * error, (BLOCKS, 8, 2)))
    a, b = tl.split(tl.reshape(a + b, (BLOCKS, 4, 2)))
    a, b = tl.split(tl.reshape(a + b, (BLOCKS, 2, 2)))
    a, b = tl.split(a + b)
    return a + b


@triton.jit
def _unit(amax):
    """2**-floor(log2 amax); subnormal ones count as 2**-127."""
    return power_of_two(127 - (amax.to(tl.int32, bitcast=True) >> 23))


@triton.jit
def nvfp4_stored(magnitude, amax, inv_global, rule, BLOCKS: tl.constexpr):
    """E4M3 scales of blocks by a rule, an index in ALL_RULES; see `dmx.numerics.scaled`.

    magnitude: (BLOCKS, 16) bits of |x|. amax: (BLOCKS,) float32, 0 of blocks that are not finite.
    """
    usual = _mapped_to(FP4_TOP, amax, inv_global)
    best = usual
    if rule != BY_AMAX:
        unit = _unit(amax)
        x = magnitude.to(tl.float32, bitcast=True) * unit[:, None]
        by_four = _mapped_to(4.0, amax, inv_global)
        least = tl.full((BLOCKS,), float("inf"), tl.float32)
        # No unrolled loop: the quotients of each round are a lot to compile.
        i, rounds = 0, tl.where(rule == MSE, N_CODES, 2)
        while i < rounds:
            of_two = tl.where(i == 0, usual, by_four)
            candidate = tl.where(rule == MSE, _near(usual, FIRST_CODE - i), of_two)
            error = _squared_error(x, candidate, inv_global, unit, BLOCKS)
            best = tl.where((error < least) | (i == 0), candidate, best)
            least = tl.where(error < least, error, least)
            i += 1
        best = tl.where(amax > 0, best, 0.0)
    return best


@triton.jit
def row_scale(amax, rule):
    """Scales of rows of fp8 by a rule, an index in ALL_RULES: amax / 448, which one of them rounds to bfloat16."""
    scale = divided(amax, FP8_TOP)
    if rule != ALL_DIGITS:
        bits = scale.to(tl.int32, bitcast=True)
        bits = (bits + (0x7FFF + ((bits >> 16) & 1))) & -0x10000
        scale = bits.to(tl.float32, bitcast=True)
    return tl.where(amax > 0, tl.maximum(scale, LEAST_SCALE), 0.0)


@triton.jit
def finite_or_zero(amax):
    """float32 of the bits of a largest magnitude, 0 where it is not finite."""
    return tl.where(amax < INFINITY, amax, 0).to(tl.float32, bitcast=True)


@triton.jit
def _quotient(x, scale):
    """x / scale, of magnitudes and positive scales that can be broadcast; see above."""
    inverse = tl.div_rn(tl.zeros_like(scale) + 1.0, scale)
    # A mantissa of ones is the one exception: its inverse is rounded up by half a unit.
    bits = scale.to(tl.int32, bitcast=True)
    exact = (0x7E800000 - (bits & 0x7F800000)).to(tl.float32, bitcast=True)
    correcting = tl.where((bits & 0x7FFFFF) == 0x7FFFFF, exact, inverse)
    near = x * inverse
    zeros = tl.zeros_like(x)
    return tl.fma(tl.fma(-near, zeros + scale, x), zeros + correcting, near)


@triton.jit
def quantized(magnitude, scale, emin, mantissa, max_normal):
    """|Q(x)| under scales that can be broadcast, NaN where these are, and whether it is not clamped."""
    # A scale of 0 is that of zeros. Remainders of small numbers would be rounded.
    lifted = tl.where(scale < SMALL, LIFT, 1.0)
    safe = tl.where(scale > 0, scale, 1.0) * lifted
    ratio = _quotient(magnitude * lifted, safe)
    rounded = round_beyond(ratio, emin, mantissa)
    return tl.minimum(rounded, max_normal) * scale, rounded <= max_normal


@triton.jit
def signed(value, bits):
    """Magnitudes with the sign bits of `bits`, float32."""
    return (value.to(tl.int32, bitcast=True) | (bits & -0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def tensor_amax(x_ptr, largest_ptr, n, n_blocks, RAGGED: tl.constexpr, BLOCKS: tl.constexpr):
    """Raises largest_ptr, int32 bits, to the largest magnitude of the finite blocks of 16 of all programs."""
    largest = tl.zeros((BLOCKS,), tl.int32)
    first = tl.program_id(0).to(tl.int64) * BLOCKS
    while first < n_blocks:
        block = first + tl.arange(0, BLOCKS)
        offsets, mask = offsets_of_blocks(block, n, n_blocks, RAGGED, 16)
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0)
        amax = tl.max(x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
        largest = tl.maximum(largest, tl.where(amax < INFINITY, amax, 0))
        first += tl.num_programs(0).to(tl.int64) * BLOCKS
    tl.atomic_max(largest_ptr, tl.max(largest, axis=0))


@triton.jit(do_not_specialize=["n", "n_blocks"])
def _tensor_amax_kernel(
    x_ptr, largest_ptr, n, n_blocks, RAGGED: tl.constexpr, BLOCKS: tl.constexpr
):
    tensor_amax(x_ptr, largest_ptr, n, n_blocks, RAGGED, BLOCKS)


@triton.jit
def row_amax(x_ptr, row, n, COLUMNS: tl.constexpr):
    """Bits of the largest magnitude of a row."""
    largest = tl.zeros((COLUMNS,), tl.int32)
    for start in range(0, n, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        x = tl.load(x_ptr + row * n + column, mask=column < n, other=0.0)
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        largest = tl.maximum(largest, bits & 0x7FFFFFFF)
    return tl.max(largest, axis=0)


@triton.jit(do_not_specialize=["n", "n_blocks"])
def _nvfp4_kernel(
    x_ptr,
    out_ptr,
    amax_ptr,
    number,
    n,
    n_blocks,
    IS_NUMBER: tl.constexpr,
    RULE: tl.constexpr,
    RAGGED: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    offsets, mask = offsets_of_blocks(block, n, n_blocks, RAGGED, 16)
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0)
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    amax_bits = tl.max(magnitude, axis=1)
    inv_global = inverse_global_scale(number if IS_NUMBER else tl.load(amax_ptr))
    stored = nvfp4_stored(magnitude, finite_or_zero(amax_bits), inv_global, RULE, BLOCKS)
    scale = tl.where(amax_bits < INFINITY, divided(stored, inv_global), float("nan"))
    x = magnitude.to(tl.float32, bitcast=True)
    value, _inside = quantized(x, scale[:, None], FP4_EMIN, FP4_M, FP4_TOP)
    y = signed(value, bits)
    tl.store(out_ptr + offsets, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _fp8_kernel(
    x_ptr,
    out_ptr,
    amax_ptr,
    rows,
    n,
    IS_GIVEN: tl.constexpr,
    RULE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (column < n)[None, :]
    offsets = (row * n)[:, None] + column[None, :]
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0)
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    magnitude = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    amax_bits = tl.max(bits & 0x7FFFFFFF, axis=1)
    if IS_GIVEN:
        amax = tl.load(amax_ptr + row, mask=row < rows, other=0.0)
    else:
        amax = finite_or_zero(amax_bits)
    scale = tl.where(amax_bits < INFINITY, row_scale(amax, RULE), float("nan"))
    value, _inside = quantized(magnitude, scale[:, None], FP8_EMIN, FP8_M, FP8_TOP)
    y = signed(value, bits)
    tl.store(out_ptr + offsets, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _fp8_long_kernel(
    x_ptr,
    out_ptr,
    amax_ptr,
    n,
    IS_GIVEN: tl.constexpr,
    RULE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A row a program, read twice."""
    row = tl.program_id(0).to(tl.int64)
    amax_bits = row_amax(x_ptr, row, n, COLUMNS) + tl.zeros((1,), tl.int32)
    if IS_GIVEN:
        amax = tl.load(amax_ptr + row) + tl.zeros((1,), tl.float32)
    else:
        amax = finite_or_zero(amax_bits)
    scale = tl.where(amax_bits < INFINITY, row_scale(amax, RULE), float("nan"))
    for start in range(0, n, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        x = tl.load(x_ptr + row * n + column, mask=column < n, other=0.0)
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        magnitude = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
        value, _inside = quantized(magnitude, scale, FP8_EMIN, FP8_M, FP8_TOP)
        y = signed(value, bits).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row * n + column, y, mask=column < n)


class TensorAmax(NamedTuple):
    """What the global scale of a tensor is made for, where kernels find it."""

    place: Tensor
    """(1,) float32; any tensor where `number` says it"""
    number: float
    is_number: bool


def known_amax(x: Tensor, amax: Tensor | float) -> TensorAmax:
    """An amax that was fixed before: a number of the host, or 0-d."""
    if isinstance(amax, Tensor):
        there = amax.to(device=x.device, dtype=torch.float32).reshape(1)
        return TensorAmax(there, 0.0, is_number=False)
    return TensorAmax(x, float(amax), is_number=True)


def launch_amax(kernel: Any, x: Tensor, *extra: Any) -> TensorAmax:
    """kernel(x, largest, *extra, n, n_blocks), which ends in `tensor_amax`, on a contiguous tensor."""
    largest = torch.zeros(1, dtype=torch.int32, device=x.device)
    _rows, n, n_blocks = rows_of(x, NVFP4.block_size)
    blocks, warps = AMAX_TILE[x.element_size()]
    programs = min(AMAX_PROGRAMS, triton.cdiv(n_blocks, blocks))
    kernel[(programs,)](
        x,
        largest,
        *extra,
        n,
        n_blocks,
        RAGGED=n % NVFP4.block_size != 0,
        BLOCKS=blocks,
        num_warps=warps,
    )
    return TensorAmax(largest.view(torch.float32), 0.0, is_number=False)


def _launch_nvfp4(
    x: Tensor, out: Tensor, scale_rule: ScaleRule, amax: Tensor | float | None
) -> None:
    known = launch_amax(_tensor_amax_kernel, x) if amax is None else known_amax(x, amax)
    _rows, n, n_blocks = rows_of(x, NVFP4.block_size)
    blocks, warps = NVFP4_TILE[x.element_size()]
    _nvfp4_kernel[(triton.cdiv(n_blocks, blocks),)](
        x,
        out,
        known.place,
        known.number,
        n,
        n_blocks,
        IS_NUMBER=known.is_number,
        RULE=ALL_RULES.index(scale_rule),
        RAGGED=n % NVFP4.block_size != 0,
        BLOCKS=blocks,
        num_warps=warps,
        enable_fp_fusion=False,
    )


def warps_for(elements: int) -> int:
    """Of a program that holds so many, a power of two."""
    return min(max(elements // (32 * ELEMENTS_A_THREAD), 1), 16)


def _launch_fp8(x: Tensor, out: Tensor, scale_rule: ScaleRule, amax: Tensor | float | None) -> None:
    rows, n, _ = rows_of(x)
    given = x
    if isinstance(amax, Tensor):
        there = amax.to(device=x.device, dtype=torch.float32)
        given = there.expand((*x.shape[:-1], 1)).contiguous()
    elif amax is not None:
        given = torch.full((rows,), amax, dtype=torch.float32, device=x.device)
    columns = triton.next_power_of_2(n)
    if columns > ROW_LIMIT:
        _fp8_long_kernel[(rows,)](
            x,
            out,
            given,
            n,
            IS_GIVEN=amax is not None,
            RULE=ALL_RULES.index(scale_rule),
            COLUMNS=ROW_TILE,
            num_warps=warps_for(ROW_TILE),
            enable_fp_fusion=False,
        )
        return
    together = max(1, ROW_TILE // columns)
    _fp8_kernel[(triton.cdiv(rows, together),)](
        x,
        out,
        given,
        rows,
        n,
        IS_GIVEN=amax is not None,
        RULE=ALL_RULES.index(scale_rule),
        ROWS=together,
        COLUMNS=columns,
        num_warps=warps_for(together * columns),
        enable_fp_fusion=False,
    )


def fake_quant_to(
    x: Tensor,
    out: Tensor,
    block_format: BlockFormat,
    scale_rule: ScaleRule,
    amax: Tensor | float | None = None,
) -> Tensor:
    """See `ops.fake_quant_to`; arguments are checked by the door. A tensor `amax` as of
    `dmx.numerics.quantize`, along the last axis."""
    if x.numel():
        with torch.cuda.device(x.device):
            if block_format.block_size:
                _launch_nvfp4(x, out, scale_rule, amax)
            else:
                _launch_fp8(x, out, scale_rule, amax)
    return out


def fake_quant(
    x: Tensor,
    block_format: BlockFormat,
    axis: int,
    scale_rule: ScaleRule,
    amax: Tensor | float | None,
    out: Tensor | None,
) -> Tensor:
    """See `dmx.numerics.fake_quant`; arguments are checked by the door.

    The last axis is fast; another axis, or a tensor with gaps, goes through a contiguous copy.
    """
    last = x.movedim(axis, -1).contiguous()
    direct = out is not None and axis == x.ndim - 1 and writable_in_place(x, out)
    target = out if direct and out is not None else torch.empty_like(last)
    fake_quant_to(last, target, block_format, scale_rule, amax)
    if direct:
        return target
    result = target.movedim(-1, axis)
    return result.contiguous() if out is None else out.copy_(result)
