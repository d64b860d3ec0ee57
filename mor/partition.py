"""An operand cut into the regions that share a scale, and in block policies a decision.

Operands are matrices: leading axes are folded into rows, a vector is one row. A matrix (R, C) is
seen as (n_row_blocks, block_rows, n_column_blocks, block_columns), zero-padded where it is no
multiple; zeros change no amax and are no part of any error.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

WITHIN_BLOCK = (1, 3)
"""Axes of the block view that lie inside a block."""


class BlockShape(NamedTuple):
    """Rows and columns of a block; None is the whole axis."""

    rows: int | None
    columns: int | None

    def of(self, matrix: Tensor) -> tuple[int, int]:
        """Block size on this matrix; at least 1 x 1, so that empty matrices have a grid too."""
        rows, columns = matrix.shape
        return (
            max(rows, 1) if self.rows is None else self.rows,
            max(columns, 1) if self.columns is None else self.columns,
        )

    def grid(self, matrix: Tensor) -> torch.Size:
        """Rows and columns of blocks on this matrix: the shape of its decisions."""
        rows, columns = self.of(matrix)
        return torch.Size((-(-matrix.shape[0] // rows), -(-matrix.shape[1] // columns)))


def parse_partition(partition: str) -> BlockShape:
    """Block shape of a partition that `MorConfig` has checked."""
    named = {
        "tensor": BlockShape(None, None),
        "row": BlockShape(1, None),
        "column": BlockShape(None, 1),
    }
    if partition in named:
        return named[partition]
    rows, columns = partition.split("x")
    return BlockShape(int(rows), int(columns))


def to_matrix(x: Tensor) -> Tensor:
    """(..., C) as (R, C); a vector or a number has one row."""
    if x.ndim < 2:
        return x.reshape(1, -1)
    return x.flatten(0, -2)


def to_blocks(matrix: Tensor, shape: BlockShape) -> Tensor:
    """(R, C) as (n_row_blocks, block_rows, n_column_blocks, block_columns), same dtype."""
    rows, columns = shape.of(matrix)
    pad_rows, pad_columns = -matrix.shape[0] % rows, -matrix.shape[1] % columns
    if pad_rows or pad_columns:
        matrix = F.pad(matrix, (0, pad_columns, 0, pad_rows))
    return matrix.reshape(matrix.shape[0] // rows, rows, matrix.shape[1] // columns, columns)


def from_blocks(blocks: Tensor, like: Tensor) -> Tensor:
    """Inverse of `to_blocks`: the padding cut off, in the shape of `like`."""
    n_rows, rows, n_columns, columns = blocks.shape
    matrix = blocks.reshape(n_rows * rows, n_columns * columns)
    size = to_matrix(like).shape
    return matrix[: size[0], : size[1]].reshape(like.shape)


def spread(per_block: Tensor) -> Tensor:
    """(n_row_blocks, n_column_blocks) broadcast over the block view."""
    return per_block[:, None, :, None]
