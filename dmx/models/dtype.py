"""The dtype that a model runs in, by name; `auto` is what the device multiplies fastest."""

import functools
import time

import torch
from torch import nn

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
AUTO = "auto"
SLOW_BF16 = 1.5
"""Times a product in float32, from which on a model is better off in float32."""


def product_seconds(dtype: torch.dtype, tokens: int = 256, width: int = 1024) -> float:
    """Of a product of (tokens, width) by a square weight on the CPU: the least of three, after one."""
    x, weight = torch.ones(tokens, width, dtype=dtype), torch.ones(width, width, dtype=dtype)
    times = []
    for _ in range(4):
        started = time.perf_counter()
        nn.functional.linear(x, weight)
        times.append(time.perf_counter() - started)
    return min(times[1:])


@functools.lru_cache(maxsize=1)
def bf16_slowness() -> float:
    """Seconds of a product in bfloat16 over those in float32 on the CPU; measured once a process.

    Far above 1 on processors without products in bfloat16 (AVX-512 BF16, AMX).
    """
    return product_seconds(torch.bfloat16) / product_seconds(torch.float32)


def dtype_of(name: str, device: str | torch.device) -> torch.dtype:
    """The dtype that `name` stands for on a device.

    Args:
        name: of `DTYPES`, or auto: bfloat16, but float32 on a CPU that is slow in bfloat16.
    """
    if name != AUTO:
        return DTYPES[name]
    is_slow = torch.device(device).type == "cpu" and bf16_slowness() >= SLOW_BF16
    return torch.float32 if is_slow else torch.bfloat16
