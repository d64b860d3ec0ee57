"""What all backends must know of a tensor's memory."""

from torch import Tensor

from dmx.formats import BLOCK_SIZE


def writable_in_place(x: Tensor, out: Tensor) -> bool:
    """Whether a kernel that reads x may write to `out`: it is x itself, or lies apart from it."""
    same = out.data_ptr() == x.data_ptr() and x.is_contiguous()
    apart = out.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    return out.is_contiguous() and (same or apart)


def rows_of(x: Tensor, block_size: int = BLOCK_SIZE) -> tuple[int, int, int]:
    """Rows along the last axis, their length, and the blocks of all of them (short ones too)."""
    n = x.shape[-1]
    rows = x.numel() // n if n else 0
    return rows, n, rows * -(-n // block_size)
