"""What all backends must know of a tensor's memory."""

import ctypes
import mmap
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
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


MAPPED_ANEW = 32 << 20
"""Bytes from which glibc maps every allocation anew: nothing of an earlier one is in use again."""
HUGE_PAGE = 2 << 20


def fresh_like(x: Tensor) -> Tensor:
    """A contiguous tensor like x on the CPU, not written yet.

    The first write to a page of new memory costs several times what the write itself does, so large tensors ask for
    huge pages, where the system has them on demand.
    """
    fresh = torch.empty_like(x, memory_format=torch.contiguous_format)
    first = -(-fresh.data_ptr() // HUGE_PAGE) * HUGE_PAGE
    length = (fresh.data_ptr() + fresh.nbytes - first) // HUGE_PAGE * HUGE_PAGE
    advise = _advise()
    if advise is not None and fresh.nbytes >= MAPPED_ANEW and length > 0:
        advise(first, length, mmap.MADV_HUGEPAGE)  # refused: pages as they are elsewhere
    return fresh


@cache
def _advise() -> Callable[..., Any] | None:
    """madvise(address, bytes, advice) of the C library; None on systems without huge pages on demand."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return advise
