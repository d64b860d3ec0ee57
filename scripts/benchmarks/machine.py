"""The machine that measures: what it is, waiting for it, and its memory."""

import gc
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from dmx.kernels import ops

MIB = 1 << 20


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def median_seconds(call: Callable[[], object], device: str, repeats: int, *, unseen: int) -> float:
    """Of one call, on the wall clock, the device waited for before and after.

    Args:
        unseen: calls before those that are timed.
    """
    times = []
    for index in range(unseen + repeats):
        wait(device)
        started = time.perf_counter()
        call()
        wait(device)
        if index >= unseen:
            times.append(time.perf_counter() - started)
    return statistics.median(times)


def gpu_seconds(call: Callable[[], object], rounds: int) -> float:
    """Median seconds of a call on the GPU, by its own events."""
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def clear(device: str) -> None:
    gc.collect()
    if device == "cuda":
        # cuBLAS keeps a workspace for every stream that a captured step ran on, which would count as the next one's.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_mib(device: str) -> float | None:
    """Peak of allocated device memory since `clear`; None on a CPU."""
    return torch.cuda.max_memory_allocated() / MIB if device == "cuda" else None


def machine(device: str) -> dict[str, Any]:
    def installed(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    found: dict[str, Any] = {
        "when": datetime.now(UTC).strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": installed("transformers"),
        "backend": ops.actual_backend(device),
    }
    if device == "cuda":
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        found |= {
            "name": torch.cuda.get_device_name(),
            "driver": driver.splitlines()[0],
            "cuda": torch.version.cuda,
            "triton": installed("triton"),
        }
    else:
        names = [
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ]
        found |= {"name": names[0] if names else platform.machine()}
        found["threads"] = torch.get_num_threads()
    return found


def say(text: str) -> None:
    print(text, flush=True)
