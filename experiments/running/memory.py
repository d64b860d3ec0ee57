"""Memory of a process that computes on the CPU."""

import ctypes
import platform

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
KEPT_BYTES = 1 << 30


def keep_freed_memory() -> bool:
    """Tensors of up to 1 GiB take memory that the process freed before; whether this was possible.

    By default glibc gives a block of 32 MiB or more back to the system when it is freed, and the
    next one costs a page fault for every 4 KiB: 30 ms for the logits of 768 tokens of SmolLM2 in
    bf16, whose losses take 17 ms (one thread). At most 1 GiB more is kept than is in use.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(option, KEPT_BYTES) for option in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD))
