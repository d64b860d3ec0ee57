"""Triton kernels of `mor.policy`'s block policies: two reads of the tensor, nothing full-size beside
the result.

First the amax of every block, then, with the group's amax known, a program a block: errors of E4M3
and E5M2, the decision, and the values. The block is read twice there, the second time from cache.
"""

# mypy: disable-error-code="no-untyped-def"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mor.config import ELEMENTS, FLOAT8, FORMATS, LARGEST_BF16_IN_FP16
from mor.scaling import MAX_EXPONENT, MAX_INV_SCALE, MIN_EXPONENT

_CHUNK = 4096
"""Elements that a program holds at a time."""
LARGEST_BLOCK = 1 << 17
"""Elements of a block that one program still does in good time."""
_LARGEST_GRID_COLUMNS = 65535
"""CUDA's limit of a grid's second axis."""
E4M3, E5M2, BF16 = (tl.constexpr(FORMATS.index(name)) for name in ("e4m3", "e5m2", "bf16"))
_LARGEST = tl.constexpr(LARGEST_BF16_IN_FP16)


class Blocks(NamedTuple):
    """What the kernels say of a matrix of B1 x B2 blocks.

    values: as the matrix, contiguous. decision: (B1, B2) uint8. sums: (2, B1, B2) float64, relative
    errors of E4M3 and E5M2. counts: (B1, B2) float64, values that are not zero.
    """

    values: Tensor
    decision: Tensor
    sums: Tensor
    counts: Tensor


@triton.jit
def _load(x_ptr, row, column, rows, columns, row_stride, column_stride, first_row, block_rows,
          first_column, block_columns):  # fmt: skip
    inside_rows = (row < first_row + block_rows) & (row < rows)
    inside_columns = (column < first_column + block_columns) & (column < columns)
    mask = inside_rows[:, None] & inside_columns[None, :]
    at = row.to(tl.int64)[:, None] * row_stride + column.to(tl.int64)[None, :] * column_stride
    return tl.load(x_ptr + at, mask=mask, other=0.0), mask


@triton.jit
def _amax_kernel(
    x_ptr, amax_ptr, rows, columns, row_stride, column_stride, block_rows, block_columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    first_row, first_column = tl.program_id(0) * block_rows, tl.program_id(1) * block_columns
    column = first_column + tl.arange(0, COLUMNS)
    largest = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, block_rows, ROWS):
        row = first_row + start + tl.arange(0, ROWS)
        x, _ = _load(x_ptr, row, column, rows, columns, row_stride, column_stride, first_row,
                     block_rows, first_column, block_columns)  # fmt: skip
        size = tl.abs(x.to(tl.float32))
        # The comparison is false for NaN too, which max would drop.
        largest = tl.maximum(largest, tl.where(size < float("inf"), size, float("inf")))
    block = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(amax_ptr + block, tl.max(tl.max(largest, 1), 0))


@triton.jit
def _plain_inv_scale(amax, TOP: tl.constexpr, MAX_INV_SCALE: tl.constexpr):
    top = tl.full((), TOP, tl.float32)
    inv_scale = tl.minimum(tl.div_rn(top, tl.where(amax > 0, amax, top)), MAX_INV_SCALE)
    return tl.where(amax > 0, inv_scale, MAX_INV_SCALE)


@triton.jit
def _gam_inv_scale(
    amax, group_amax, TOP: tl.constexpr, MAX_INV_SCALE: tl.constexpr, LOW: tl.constexpr,
    HIGH: tl.constexpr,
):  # fmt: skip
    """See `mor.scaling.amax_to_gam_inv_scale`; all plain ones are normal numbers."""
    group = _plain_inv_scale(group_amax, TOP, MAX_INV_SCALE).to(tl.int32, bitcast=True)
    own = _plain_inv_scale(amax, TOP, MAX_INV_SCALE).to(tl.int32, bitcast=True)
    mantissa = group & 0x7FFFFF
    exponent = (own >> 23) - 127 - (mantissa > (own & 0x7FFFFF)).to(tl.int32)
    exponent = tl.where(amax > 0, exponent, (group >> 23) - 127)
    exponent = tl.where(group_amax > 0, exponent, 0)
    mantissa = tl.where(group_amax > 0, mantissa, 0)
    exponent = tl.minimum(tl.maximum(exponent, LOW), HIGH)
    return (((exponent + 127) << 23) | mantissa).to(tl.float32, bitcast=True)


@triton.jit
def _through(x, inv_scale, codes_ptr):
    codes = (x * inv_scale).to(codes_ptr.dtype.element_ty)
    return tl.div_rn(codes.to(tl.float32), inv_scale + x * 0)


@triton.jit
def _block_kernel(
    x_ptr, amax_ptr, group_ptr, values_ptr, decision_ptr, sum_ptr, count_ptr, e4m3_ptr, e5m2_ptr,
    rows, columns, row_stride, column_stride, block_rows, block_columns, RANGE: tl.constexpr,
    TOP4: tl.constexpr, TOP5: tl.constexpr, MAX_INV_SCALE: tl.constexpr, LOW: tl.constexpr,
    HIGH: tl.constexpr, THREE_WAY: tl.constexpr, FROZEN: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    blocks = tl.num_programs(0) * tl.num_programs(1)
    first_row, first_column = tl.program_id(0) * block_rows, tl.program_id(1) * block_columns
    column = first_column + tl.arange(0, COLUMNS)
    amax, group_amax = tl.load(amax_ptr + block), tl.load(group_ptr)
    is_finite = amax < float("inf")
    counted = tl.where(is_finite, amax, 0.0)
    inv_scale4 = _gam_inv_scale(counted, group_amax, TOP4, MAX_INV_SCALE, LOW, HIGH)
    inv_scale5 = _gam_inv_scale(counted, group_amax, TOP5, MAX_INV_SCALE, LOW, HIGH)
    error4 = tl.zeros((ROWS, COLUMNS), tl.float64)
    error5 = tl.zeros((ROWS, COLUMNS), tl.float64)
    count = tl.zeros((ROWS, COLUMNS), tl.float32)
    smallest = tl.full((ROWS, COLUMNS), float("inf"), tl.float32)
    for start in range(0, block_rows, ROWS):
        row = first_row + start + tl.arange(0, ROWS)
        raw, _ = _load(x_ptr, row, column, rows, columns, row_stride, column_stride, first_row,
                       block_rows, first_column, block_columns)  # fmt: skip
        x = raw.to(tl.float32)
        size, is_nonzero = tl.abs(x), x != 0
        safe = tl.where(is_nonzero, size, 1.0)
        part4 = tl.div_rn(tl.abs(x - _through(x, inv_scale4, e4m3_ptr)), safe)
        part5 = tl.div_rn(tl.abs(x - _through(x, inv_scale5, e5m2_ptr)), safe)
        error4 += tl.where(is_nonzero, part4, 0.0).to(tl.float64)
        error5 += tl.where(is_nonzero, part5, 0.0).to(tl.float64)
        count += is_nonzero.to(tl.float32)
        smallest = tl.minimum(smallest, tl.where(is_nonzero, size, float("inf")))
    total4, total5 = tl.sum(tl.sum(error4, 1), 0), tl.sum(tl.sum(error5, 1), 0)
    total = tl.sum(tl.sum(count, 1), 0)
    nan = tl.full((), float("nan"), tl.float64)
    tl.store(sum_ptr + block, tl.where(is_finite, total4, nan))
    tl.store(sum_ptr + blocks + block, tl.where(is_finite, total5, nan))
    tl.store(count_ptr + block, total.to(tl.float64))
    if FROZEN:
        decision = tl.load(decision_ptr + block).to(tl.int32)
    else:
        decision = tl.full((), BF16, tl.int32)
        if THREE_WAY:
            least = tl.min(tl.min(smallest, 1), 0).to(tl.float64)
            limit = tl.full((), RANGE, tl.float64) * least
            decision = tl.where(amax.to(tl.float64) <= limit, E5M2, decision)
        decision = tl.where((total4 < total5) | (total == 0), E4M3, decision)
    decision = tl.where(is_finite, decision, BF16)
    tl.store(decision_ptr + block, decision.to(tl.uint8))
    for start in range(0, block_rows, ROWS):
        row = first_row + start + tl.arange(0, ROWS)
        raw, mask = _load(x_ptr, row, column, rows, columns, row_stride, column_stride, first_row,
                          block_rows, first_column, block_columns)  # fmt: skip
        x = raw.to(tl.float32)
        if decision == E4M3:
            y = _through(x, inv_scale4, e4m3_ptr)
        elif decision == E5M2:
            y = _through(x, inv_scale5, e5m2_ptr)
        else:
            y = x.to(tl.bfloat16).to(tl.float32)
            if raw.dtype == tl.float16:
                nearest = tl.where(x < 0, -_LARGEST, _LARGEST)
                beyond = (tl.abs(y) > _LARGEST) & (tl.abs(x) < float("inf"))
                y = tl.where(beyond, nearest, y)
        at = row.to(tl.int64)[:, None] * columns + column[None, :]
        tl.store(values_ptr + at, y.to(raw.dtype), mask=mask)


def fits(block_rows: int, block_columns: int, columns: int) -> bool:
    """Whether the kernels do blocks of this size on so many columns; larger blocks, and more of
    them side by side than a grid takes, are left to the reference."""
    width = triton.next_power_of_2(block_columns)
    across = -(-columns // block_columns)
    return (
        width <= _CHUNK and block_rows * width <= LARGEST_BLOCK and across <= _LARGEST_GRID_COLUMNS
    )


def quantize_blocks(
    matrix: Tensor, block_rows: int, block_columns: int, *, e5m2_range: float, three_way: bool,
    frozen: Tensor | None,
) -> Blocks:  # fmt: skip
    """Decide on every block of a matrix and apply it.

    Args:
        matrix: (R, C) fp32, bf16 or fp16 on a GPU, not empty, of any strides.
        e5m2_range: largest amax over smallest magnitude that may go to E5M2 (three_way).
        frozen: (B1, B2) uint8 decisions to apply.
    """
    (rows, columns), device = matrix.shape, matrix.device
    grid = (-(-rows // block_rows), -(-columns // block_columns))
    width = triton.next_power_of_2(block_columns)
    height = min(triton.next_power_of_2(block_rows), _CHUNK // width)
    place = (rows, columns, *matrix.stride(), block_rows, block_columns)
    amax = torch.empty(grid, dtype=torch.float32, device=device)
    _amax_kernel[grid](matrix, amax, *place, height, width)
    group = amax.masked_fill(amax.isinf(), 0.0).amax()
    values = torch.empty(rows, columns, dtype=matrix.dtype, device=device)
    decision = torch.empty(grid, dtype=torch.uint8, device=device)
    if frozen is not None:
        decision.copy_(frozen)
    sums = torch.empty(2, *grid, dtype=torch.float64, device=device)
    counts = torch.empty(grid, dtype=torch.float64, device=device)
    # Never read: they say which FP8 types are meant.
    kinds = (torch.empty(0, dtype=FLOAT8[name], device=device) for name in ("e4m3", "e5m2"))
    _block_kernel[grid](
        matrix, amax, group, values, decision, sums, counts, *kinds, *place, e5m2_range,
        ELEMENTS["e4m3"].max_normal, ELEMENTS["e5m2"].max_normal, MAX_INV_SCALE, MIN_EXPONENT,
        MAX_EXPONENT, three_way, frozen is not None, height, width, num_warps=8,
    )  # fmt: skip
    return Blocks(values, decision, sums, counts)
