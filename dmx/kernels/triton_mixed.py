# mypy: allow-untyped-defs
"""The straight line to or from nvfp4, fp8 or bf16 on a GPU: forward and fused backward. `ops.py` is the door.

Names and formulas are those of `dmx.numerics.mixed_line`, arithmetic is that of `triton_scaled` and `triton_line`.
Both formats and their rules are read on the device: a launch in a CUDA graph follows an offset from one pair of
neighbours to the next. A program holds a row, whose amax is the scale of fp8; only of rows that are too long, and
of tensors in nvfp4 without an amax that was fixed before, a first kernel finds it, which ends at once where
neither neighbour asks for it. The offset's gradient is one partial sum per program, added up by a second small
kernel in a fixed order.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmx.formats import BF16, BLOCK_SIZE, FP8, NVFP4
from dmx.kernels.buffers import rows_of, writable_in_place
from dmx.kernels.triton_line import shared_exponent
from dmx.kernels.triton_mx import power_of_two
from dmx.kernels.triton_scaled import (
    INFINITY,
    ROW_TILE,
    TensorAmax,
    divided,
    finite_or_zero,
    inverse_global_scale,
    known_amax,
    launch_amax,
    nvfp4_stored,
    quantized,
    row_amax,
    row_scale,
    signed,
    tensor_amax,
    warps_for,
)
from dmx.numerics.mixed_line import Side, format_index

AT_NVFP4, AT_FP8, AT_BF16 = (tl.constexpr(format_index(f)) for f in (NVFP4, FP8, BF16))
LOW, HIGH = tl.constexpr(2), tl.constexpr(2 + len(Side._fields))
"""Where the fields of a side begin in a row of parameters."""
FEWEST_BLOCKS = 4
ROW_PART = 128
"""Blocks that a program has of a row that none holds."""
TILE = {4: (128, 8, 16), 2: (256, 8, 16)}
"""By bytes of an input element: the most blocks of a row that a program holds (more would leave the registers), the
elements of a thread, and the most warps, whose threads have more elements then."""


@triton.jit
def _is_among(p_ptr, FORMAT: tl.constexpr):
    """Whether a format is one of the two."""
    low, high = tl.load(p_ptr + LOW).to(tl.int32), tl.load(p_ptr + HIGH).to(tl.int32)
    return (low == FORMAT) | (high == FORMAT)


@triton.jit(do_not_specialize=["n", "n_blocks"])
def _tensor_amax_kernel(
    x_ptr, largest_ptr, p_ptr, n, n_blocks, RAGGED: tl.constexpr, BLOCKS: tl.constexpr
):
    if _is_among(p_ptr, AT_NVFP4):
        tensor_amax(x_ptr, largest_ptr, n, n_blocks, RAGGED, BLOCKS)


@triton.jit
def _row_amax_kernel(x_ptr, largest_ptr, p_ptr, n, COLUMNS: tl.constexpr):
    if _is_among(p_ptr, AT_FP8):
        row = tl.program_id(0).to(tl.int64)
        tl.store(largest_ptr + row, row_amax(x_ptr, row, n, COLUMNS))


@triton.jit
def _mx_scale(magnitude, amax_bits, rule, emin, emax, mantissa, max_normal, BLOCKS: tl.constexpr):
    """Scales of halves of MX blocks (2 BLOCKS,), NaN where a block is not finite.

    amax_bits: (2 BLOCKS,) of halves.
    """
    whole = tl.max(tl.reshape(amax_bits, (BLOCKS, 2)), axis=1)
    blocks = tl.reshape(magnitude, (BLOCKS, 32))
    exponent = shared_exponent(blocks, whole, emin, emax, mantissa, max_normal, rule, BLOCKS)
    scale = tl.where(whole < INFINITY, power_of_two(exponent), float("nan"))
    return tl.reshape(tl.broadcast_to(scale[:, None], (BLOCKS, 2)), (BLOCKS * 2,))


@triton.jit
def _side(magnitude, p_ptr, inv_global, of_row, BLOCKS: tl.constexpr):
    """|Q(x)| of one format, NaN where a block is not finite, and whether it is not clamped.

    magnitude: (2 BLOCKS, 16) bits of |x|. of_row: bits of the largest magnitude of the row.
    """
    kind, rule = tl.load(p_ptr).to(tl.int32), tl.load(p_ptr + 1).to(tl.int32)
    emin, emax = tl.load(p_ptr + 2).to(tl.int32), tl.load(p_ptr + 3).to(tl.int32)
    mantissa, max_normal = tl.load(p_ptr + 4).to(tl.int32), tl.load(p_ptr + 5)
    x = magnitude.to(tl.float32, bitcast=True)
    value, inside = x, magnitude >= 0
    if kind != AT_BF16:
        amax_bits = tl.max(magnitude, axis=1)
        scale = tl.zeros((BLOCKS * 2,), tl.float32)
        if kind == AT_NVFP4:
            amax = finite_or_zero(amax_bits)
            stored = nvfp4_stored(magnitude, amax, inv_global, rule, BLOCKS * 2)
            scale = tl.where(amax_bits < INFINITY, divided(stored, inv_global), float("nan"))
        elif kind == AT_FP8:
            of_token = row_scale(finite_or_zero(of_row), rule)
            scale += tl.where(of_row < INFINITY, of_token, float("nan"))
        else:
            scale = _mx_scale(magnitude, amax_bits, rule, emin, emax, mantissa, max_normal, BLOCKS)
        value, inside = quantized(x, scale[:, None], emin, mantissa, max_normal)
    return value, inside


@triton.jit
def _place(n, BLOCKS: tl.constexpr):
    """Row of this program, int64, its columns by halves of blocks, (2 BLOCKS, 16), and their mask."""
    half = tl.program_id(1) * BLOCKS * 2 + tl.arange(0, BLOCKS * 2)
    column = half[:, None] * 16 + tl.arange(0, 16)[None, :]
    return tl.program_id(0).to(tl.int64), column, column < n


@triton.jit
def _both(
    magnitude, p_ptr, amax_ptr, number, rows_ptr, row,
    IS_NUMBER: tl.constexpr, HOLDS_ROW: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """`_side` of both formats."""
    inv_global = inverse_global_scale(number if IS_NUMBER else tl.load(amax_ptr))
    of_row = tl.max(tl.max(magnitude, axis=1), axis=0) if HOLDS_ROW else tl.load(rows_ptr + row)
    low, high = tl.zeros_like(magnitude).to(tl.float32), tl.zeros_like(magnitude).to(tl.float32)
    low_inside, high_inside = magnitude >= 0, magnitude >= 0
    # A loop keeps the registers of one side. What it carries must be four tensors: names of one tensor are one.
    for side in range(2):
        low, low_inside = high, high_inside
        side_ptr = p_ptr + LOW + side * (HIGH - LOW)
        high, high_inside = _side(magnitude, side_ptr, inv_global, of_row, BLOCKS)
    return low, high, low_inside, high_inside


@triton.jit
def _forward_kernel(
    x_ptr, p_ptr, amax_ptr, number, rows_ptr, out_ptr, n,
    IS_NUMBER: tl.constexpr, HOLDS_ROW: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row, column, mask = _place(n, BLOCKS)
    x = tl.load(x_ptr + row * n + column, mask=mask, other=0.0)
    share = tl.load(p_ptr)
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    low, high, _low_inside, _high_inside = _both(
        bits & 0x7FFFFFFF, p_ptr, amax_ptr, number, rows_ptr, row, IS_NUMBER, HOLDS_ROW, BLOCKS
    )
    # A product with 0 would make NaN of Inf.
    mixed = (1.0 - share) * low + share * high
    mixed = tl.where(share == 0.0, low, tl.where(share == 1.0, high, mixed))
    y = signed(mixed, bits).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * n + column, y, mask=mask)


@triton.jit
def _backward_kernel(
    grad_ptr, x_ptr, p_ptr, amax_ptr, number, rows_ptr, grad_x_ptr, sums_ptr, n,
    NEEDS_GRAD_X: tl.constexpr,
    IS_NUMBER: tl.constexpr, HOLDS_ROW: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row, column, mask = _place(n, BLOCKS)
    x = tl.load(x_ptr + row * n + column, mask=mask, other=0.0)
    grad = tl.load(grad_ptr + row * n + column, mask=mask, other=0.0).to(tl.float32)
    share, slope = tl.load(p_ptr), tl.load(p_ptr + 1)
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    low, high, low_inside, high_inside = _both(
        bits & 0x7FFFFFFF, p_ptr, amax_ptr, number, rows_ptr, row, IS_NUMBER, HOLDS_ROW, BLOCKS
    )
    # Both comparisons are false of NaN: there both derivatives are 0.
    is_number = (low == low) & (high == high)
    difference = tl.where((low == high) | (is_number == 0), 0.0, high - low)
    flipped = difference.to(tl.int32, bitcast=True) ^ (bits & -0x80000000)
    products = grad * flipped.to(tl.float32, bitcast=True)
    total = tl.sum(tl.sum(products, axis=1), axis=0)
    program = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(sums_ptr + program, total * slope)
    if NEEDS_GRAD_X:
        dx = tl.where(low_inside, 1.0 - share, 0.0) + tl.where(high_inside, share, 0.0)
        # Where dx is 0 the gradient is 0 even if grad is not finite.
        kept = tl.where(is_number & (dx > 0.0), grad * dx, 0.0)
        grad_x = kept.to(grad_x_ptr.dtype.element_ty)
        tl.store(grad_x_ptr + row * n + column, grad_x, mask=mask)


def _amax_of(x: Tensor, parameters: Tensor, amax: Tensor | float | None) -> TensorAmax:
    return launch_amax(_tensor_amax_kernel, x, parameters) if amax is None else known_amax(x, amax)


def _of_rows(x: Tensor, parameters: Tensor) -> tuple[Tensor, tuple[int, int], dict[str, Any]]:
    """Largest magnitudes of rows that no program holds, the grid, and how kernels are launched."""
    rows, n, _ = rows_of(x)
    most_blocks, elements, most_warps = TILE[x.element_size()]
    blocks = max(triton.next_power_of_2(-(-n // BLOCK_SIZE)), FEWEST_BLOCKS)
    largest, holds_row = x, blocks <= most_blocks
    if not holds_row:
        blocks = ROW_PART
        largest = torch.empty(rows, dtype=torch.int32, device=x.device)
        warps = warps_for(ROW_TILE)
        _row_amax_kernel[(rows,)](x, largest, parameters, n, COLUMNS=ROW_TILE, num_warps=warps)
    options = {
        "HOLDS_ROW": holds_row,
        "BLOCKS": blocks,
        "num_warps": min(max(blocks * BLOCK_SIZE // (32 * elements), 1), most_warps),
        "enable_fp_fusion": False,
    }
    return largest, (rows, triton.cdiv(n, blocks * BLOCK_SIZE)), options


def continuous_fake_quant(
    x: Tensor, parameters: Tensor, amax: Tensor | float | None, out: Tensor | None
) -> Tensor:
    """See `dmx.numerics.mixed_line.mixed_fake_quant`; arguments are checked by the door."""
    last, row = x.contiguous(), parameters.contiguous()
    direct = out is not None and writable_in_place(x, out)
    target = out if direct and out is not None else torch.empty_like(last)
    if last.numel():
        with torch.cuda.device(x.device):
            known = _amax_of(last, row, amax)
            largest, grid, options = _of_rows(last, row)
            _forward_kernel[grid](
                last,
                row,
                known.place,
                known.number,
                largest,
                target,
                last.shape[-1],
                IS_NUMBER=known.is_number,
                **options,
            )
    return target if direct or out is None else out.copy_(target)


def continuous_fake_quant_backward(
    grad: Tensor,
    x: Tensor,
    parameters: Tensor,
    amax: Tensor | float | None,
    needs_grad_x: bool,
) -> tuple[Tensor | None, Tensor]:
    """See `dmx.numerics.continuous_fake_quant_backward`; arguments are checked by the door."""
    last, row = x.contiguous(), parameters.contiguous()
    grad_x = torch.empty_like(last) if needs_grad_x else None
    if not last.numel():
        return grad_x, torch.zeros((), device=x.device)
    with torch.cuda.device(x.device):
        known = _amax_of(last, row, amax)
        largest, grid, options = _of_rows(last, row)
        sums = torch.empty(grid[0] * grid[1], dtype=torch.float32, device=x.device)
        _backward_kernel[grid](
            grad.contiguous(),
            last,
            row,
            known.place,
            known.number,
            largest,
            last if grad_x is None else grad_x,
            sums,
            last.shape[-1],
            NEEDS_GRAD_X=needs_grad_x,
            IS_NUMBER=known.is_number,
            **options,
        )
    return grad_x, sums.sum()
