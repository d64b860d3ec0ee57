"""Triton kernels of `mor.fp8`: largest magnitude, cast (also transposed), cast with error.

One read of x for amax and one for the cast; the error comes out of the cast's registers. Sums go
through a partial result per tile in a fixed order, so two runs agree to the bit.

Host time decides at layers of 4096 and less: a launch takes longer than most of these kernels run.
So input and weight share every launch, the last step of a maximum is left to the kernels that read
it, and `_Kernel` keeps compiled kernels itself (Triton's own look-up takes 65 us).
"""

# mypy: disable-error-code="no-untyped-def"

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mor.config import ELEMENTS, FLOAT8, partials
from mor.scaling import MAX_INV_SCALE

_AMAX_BLOCK = 8192
_TILE_ROWS, _TILE_COLUMNS = 64, 128
_REDUCE_BLOCK = 1024
_SCALES = (4, 1)
"""Strides of the scales: the matrix product wants each at 16 bytes."""
SURELY_ZERO = tl.constexpr(2.0**-20)
"""Below half the smallest subnormal of E4M3 (2**-9) and E5M2 (2**-16)."""


class _Kernel:
    """A Triton kernel whose compiled forms are kept by what a call looks like."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.runners: dict[tuple[Any, ...], Any] = {}

    def launch(
        self, grid: int, a: Tensor, b: Tensor, others: Sequence[Tensor], numbers: tuple[int, ...],
        constants: tuple[Any, ...],
    ) -> None:  # fmt: skip
        """Arguments of the kernel in order. constants: its constexpr ones.

        Args:
            others: tensors that were allocated here, so aligned, and of dtypes that follow from
                `constants` and from the dtype of a and b.
        """
        aligned = (a.data_ptr() | b.data_ptr()) % 16
        key = (grid, numbers, constants, a.dtype, a.get_device(), aligned)
        runner = self.runners.get(key)
        if runner is None:
            compiled = self.function[(grid,)](a, b, *others, *numbers, *constants, num_warps=8)
            self.runners[key] = compiled[(grid, 1, 1)]
        else:
            runner(a, b, *others, *numbers, *constants)


@triton.jit
def _amax_part(x_ptr, largest_ptr, n, program, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    # A program strides over the tensor, so the number of partials does not grow with it.
    largest = tl.zeros((BLOCK,), tl.float32)
    for base in range(program.to(tl.int64) * BLOCK, n, PROGRAMS * BLOCK):
        index = base + tl.arange(0, BLOCK)
        x = tl.abs(tl.load(x_ptr + index, mask=index < n, other=0.0).to(tl.float32))
        # The comparison is false for NaN too, which max would drop.
        x = tl.where(x < float("inf"), x, float("inf"))
        largest = tl.maximum(largest, x)
    tl.store(largest_ptr + program, tl.max(largest, 0))


@_Kernel
@triton.jit
def _amax_kernel(
    a_ptr, b_ptr, largest_ptr, a_n, b_n, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    program = tl.program_id(0)
    if program < PROGRAMS:
        _amax_part(a_ptr, largest_ptr, a_n, program, PROGRAMS, BLOCK)
    else:
        _amax_part(b_ptr, largest_ptr + PROGRAMS, b_n, program - PROGRAMS, PROGRAMS, BLOCK)


@triton.jit
def _inv_scale(amax, TOP: tl.constexpr, MAX_INV_SCALE: tl.constexpr):
    top = tl.full((), TOP, tl.float32)
    inv_scale = tl.minimum(tl.div_rn(top, tl.where(amax > 0, amax, top)), MAX_INV_SCALE)
    return tl.where(amax < float("inf"), inv_scale, float("nan"))


@triton.jit
def _cast_tile(
    x_ptr, largest_ptr, codes_ptr, transposed_ptr, scale_ptr, sum_ptr, count_ptr, rows, columns,
    row_stride, column_stride, tile, TOP: tl.constexpr, MAX_INV_SCALE: tl.constexpr,
    PARTIALS: tl.constexpr, PLAIN: tl.constexpr, TRANSPOSED: tl.constexpr, MEASURED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    amax = tl.max(tl.load(largest_ptr + tl.arange(0, PARTIALS)), 0)
    inv_scale = _inv_scale(amax, TOP, MAX_INV_SCALE)
    if tile == 0:
        # In float64: the float32 division flushes a scale below 2**-126 to zero.
        scale = tl.full((), 1.0, tl.float64) / inv_scale.to(tl.float64)
        tl.store(scale_ptr, scale.to(tl.float32))
    across = tl.cdiv(columns, COLUMNS)
    row = ((tile // across) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = ((tile % across) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    source = x_ptr + row[:, None] * row_stride + column[None, :] * column_stride
    x = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    scaled = x * inv_scale
    codes = scaled.to(codes_ptr.dtype.element_ty)
    if TRANSPOSED:
        target = transposed_ptr + column[:, None] * rows + row[None, :]
        tl.store(target, tl.trans(codes), mask=(column < columns)[:, None] & (row < rows)[None, :])
    if PLAIN:
        tl.store(codes_ptr + row[:, None] * columns + column[None, :], codes, mask=mask)
    if MEASURED:
        # |x - y| / |x| in units of S, where nothing is subnormal: float32 rounds it elsewhere than
        # the reference does, by 1e-7 an element. What is surely cast to zero has the error 1.
        size = tl.abs(scaled)
        error = tl.abs(scaled - codes.to(tl.float32)) / tl.maximum(size, SURELY_ZERO)
        error = tl.where(size < SURELY_ZERO, 1.0, error)
        is_nonzero = x != 0
        error = tl.where(is_nonzero, error, 0.0)
        tl.store(sum_ptr + tile, tl.sum(tl.sum(error, 1), 0))
        # at most ROWS * COLUMNS: exact in float32
        tl.store(count_ptr + tile, tl.sum(tl.sum(is_nonzero.to(tl.int32), 1), 0).to(tl.float32))


@_Kernel
@triton.jit
def _cast_kernel(
    a_ptr, b_ptr, largest_ptr, a_codes_ptr, b_codes_ptr, a_transposed_ptr, b_transposed_ptr, scale_ptr,
    sum_ptr, a_rows, a_columns, a_row_stride, a_column_stride, a_tiles, b_rows, b_columns,
    b_row_stride, b_column_stride, b_tiles, TOP: tl.constexpr, MAX_INV_SCALE: tl.constexpr,
    PARTIALS: tl.constexpr, SCALES: tl.constexpr, PLAIN: tl.constexpr, TRANSPOSED: tl.constexpr,
    MEASURED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    count_ptr = sum_ptr + a_tiles + b_tiles
    if tile < a_tiles:
        _cast_tile(
            a_ptr, largest_ptr, a_codes_ptr, a_transposed_ptr, scale_ptr, sum_ptr, count_ptr, a_rows,
            a_columns, a_row_stride, a_column_stride, tile, TOP, MAX_INV_SCALE, PARTIALS, PLAIN, TRANSPOSED,
            MEASURED, ROWS, COLUMNS,
        )  # fmt: skip
    else:
        _cast_tile(
            b_ptr, largest_ptr + PARTIALS, b_codes_ptr, b_transposed_ptr, scale_ptr + SCALES,
            sum_ptr + a_tiles, count_ptr + a_tiles, b_rows, b_columns, b_row_stride,
            b_column_stride, tile - a_tiles, TOP, MAX_INV_SCALE, PARTIALS, PLAIN, TRANSPOSED, MEASURED,
            ROWS, COLUMNS,
        )  # fmt: skip


@_Kernel
@triton.jit
def _mean_kernel(
    largest_ptr, sum_ptr, error_ptr, a_tiles, b_tiles, PARTIALS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    which = tl.program_id(0)
    first_ptr = sum_ptr + which * a_tiles
    count_ptr = first_ptr + a_tiles + b_tiles
    n = tl.where(which == 0, a_tiles, b_tiles)
    total = tl.zeros((BLOCK,), tl.float64)
    count = tl.zeros((BLOCK,), tl.float64)
    for base in range(0, n, BLOCK):
        index = base + tl.arange(0, BLOCK)
        total += tl.load(first_ptr + index, mask=index < n, other=0.0).to(tl.float64)
        count += tl.load(count_ptr + index, mask=index < n, other=0.0).to(tl.float64)
    mean = tl.sum(total, 0) / tl.maximum(tl.sum(count, 0), 1.0)
    amax = tl.max(tl.load(largest_ptr + which * PARTIALS + tl.arange(0, PARTIALS)), 0)
    tl.store(error_ptr + which, tl.where(amax < float("inf"), mean, float("inf")))


def amax(tensors: Sequence[Tensor]) -> Tensor:
    """See `mor.fp8.amax`."""
    a, b = _dense(tensors[0]), _dense(tensors[-1])
    n, programs = len(tensors), partials(a.device)
    largest = torch.empty(n, programs, dtype=torch.float32, device=a.device)
    _amax_kernel.launch(
        n * programs, a, b, (largest,), (a.numel(), b.numel()), (programs, _AMAX_BLOCK)
    )
    return largest


def cast(
    tensors: Sequence[Tensor], largest: Tensor, format: str, *, plain: bool, transposed: bool,
    measured: bool, landing: Tensor | None,
) -> tuple[list[Tensor], list[Tensor], Sequence[Tensor], Tensor | None]:  # fmt: skip
    """Codes of the matrices, codes of their transposes (empty lists where not asked for),
    scales, and the errors ((n,) float64); see `mor.fp8.cast`."""
    a, b = tensors[0], tensors[-1]
    if plain and transposed and a.element_size() == 4:
        # Of float32 the transpose is cast apart: there the one-read form failed the bit-for-bit
        # test on a GPU (Triton 3.6), which 16-bit inputs pass.
        codes, _, scales_of_codes, errors = cast(
            tensors,
            largest,
            format,
            plain=True,
            transposed=False,
            measured=measured,
            landing=landing,
        )
        other = cast(
            tensors, largest, format, plain=False, transposed=True, measured=False, landing=None
        )[1]
        return codes, other, scales_of_codes, errors
    n, device, dtype = len(tensors), a.device, FLOAT8[format]
    codes = [torch.empty(x.shape, dtype=dtype, device=device) for x in tensors if plain]
    other = [torch.empty(x.shape[::-1], dtype=dtype, device=device) for x in tensors if transposed]
    scales = torch.empty_strided((n, 1), _SCALES, dtype=torch.float32, device=device)
    a_tiles, b_tiles = _tiles(a), _tiles(b) if n > 1 else 0
    sums = scales
    if measured:
        sums = torch.empty(2 * (a_tiles + b_tiles), dtype=torch.float32, device=device)
    if not a_tiles or (n > 1 and not b_tiles):
        scales.fill_(1.0)  # an empty matrix has no tile that writes its scale
    if a_tiles + b_tiles:
        to, to_transposed = codes or other, other or codes
        _cast_kernel.launch(
            a_tiles + b_tiles, a, b,
            (largest, to[0], to[-1], to_transposed[0], to_transposed[-1], scales, sums),
            (*a.shape, *a.stride(), a_tiles, *b.shape, *b.stride(), b_tiles),
            (ELEMENTS[format].max_normal, MAX_INV_SCALE, largest.shape[1], _SCALES[0], plain, transposed,
             measured, _TILE_ROWS, _TILE_COLUMNS),
        )  # fmt: skip
    errors = None
    if measured:
        errors = landing
        if errors is None:
            errors = torch.empty(n, dtype=torch.float64, device=device)
        _mean_kernel.launch(
            n, largest, sums, (errors,), (a_tiles, b_tiles), (largest.shape[1], _REDUCE_BLOCK)
        )
    return codes, other, scales.unbind(0), errors


def _tiles(x: Tensor) -> int:
    rows, columns = x.shape
    return -(-rows // _TILE_ROWS) * -(-columns // _TILE_COLUMNS)


def _dense(x: Tensor) -> Tensor:
    """x in some contiguous order: for a maximum a transposed matrix need not be copied."""
    return x.t() if x.ndim == 2 and x.t().is_contiguous() else x.contiguous()
