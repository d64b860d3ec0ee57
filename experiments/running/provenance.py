"""What a result was measured with: versions, device, memory, hashes, times."""

import datetime
import os
import platform
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dmx
from dmx.data import Text, Tokens, text_tokens
from dmx.files import sha256

from ..reporting.record import Device, TextFacts

PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "datasets",
    "accelerate",
    "numpy",
    "scipy",
    "hydra-core",
)


def versions() -> dict[str, str]:
    """Of Python, this package and those that numbers depend on."""
    installed = {"python": platform.python_version(), "dmx": dmx.__version__}
    for name in PACKAGES:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            installed[name] = "not installed"
    return installed


def device_facts(device: torch.device) -> Device:
    """Name of the GPU or the processor, and torch's threads."""
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else _processor_name()
    return Device(name, device.type, torch.get_num_threads())


def peak_memory_bytes(device: torch.device) -> int:
    """Peak of the GPU's allocator, or of this process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_gpu_peak(device: torch.device) -> None:
    """The GPU's peak counts from now on; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def gpu_peak(device: torch.device) -> dict[str, int]:
    """The GPU's peak since `reset_gpu_peak` as a fact; none on a CPU, whose peak is the process's."""
    if device.type != "cuda":
        return {}
    return {"peak_memory_bytes": torch.cuda.max_memory_allocated(device)}


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(x.split(":", 1)[1].strip() for x in lines if x.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} logical cores"


def time_text(seconds: float | None = None) -> str:
    """ISO 8601, UTC; now by default.

    Args:
        seconds: since 1970.
    """
    moment = datetime.datetime.fromtimestamp(seconds or time.time(), datetime.UTC)
    return moment.isoformat(timespec="seconds")


def tokens_sha256(tokens: Tensor) -> str:
    """Hash of token ids on the CPU."""
    return sha256(tokens.numpy().tobytes())


def windows_facts(text: Text, tokens: Tokens, window: int) -> TextFacts:
    """A text that is cut into windows, for a record.

    Args:
        tokens: all that are used.
    """
    return TextFacts(
        name=text.name, source=text.source, sha256=tokens_sha256(tokens), tokens=tokens.numel(),
        windows=tokens.numel() // text_tokens(tokens, window), window=window, start=tokens.start,
    )  # fmt: skip


def batches_facts(
    text: Text,
    batches: Sequence[Tensor],
    start: tuple[int, ...],
    shared: Mapping[str, Any] | None = None,
) -> TextFacts:
    """A text that is cut into batches, for a record.

    Args:
        start: token ids that every row begins with.
        shared: what the evaluation text has in common with it, where that was looked for.
    """
    return TextFacts(
        name=text.name, source=text.source, sha256=text.sha256, shared=shared, start=start,
        tokens=sum(b.numel() for b in batches), batches=len(batches),
        batch_shape=tuple(batches[0].shape),
    )  # fmt: skip
