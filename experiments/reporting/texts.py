"""Numbers as tables and sentences show them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .groups import Statistic

SIDES = {"W+A": "weights and inputs", "W": "weights alone"}
"""What is quantized, in words."""


def number_text(value: float, digits: int = 4) -> str:
    """`digits` significant digits, thousands separated; inf and nan by name."""
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:#.{digits}g}".rstrip(".")


def spread_text(statistic: Statistic, digits: int = 4) -> str:
    """`mean`, or `mean ± spread` when there are several rows; – when there are none."""
    if statistic.mean is None:
        return "–"
    if statistic.spread is None:
        return number_text(statistic.mean, digits)
    mean = number_text(statistic.mean, digits)
    decimals = len(mean.partition(".")[2])
    return f"{mean} ± {statistic.spread:.{decimals}f}"


def points_text(mean: float | None, stderr: float | None) -> str:
    """A difference of shares in percentage points, ± its standard error; – where there is none."""
    if mean is None:
        return "–"
    return f"{100 * mean:+.1f}" + ("" if stderr is None else f" ± {100 * stderr:.1f}")


def nats_text(mean: float | None, stderr: float | None) -> str:
    """A difference of losses in nats/token, ± its standard error; – where there is none."""
    if mean is None:
        return "–"
    return f"{mean:+.4f}" + ("" if stderr is None else f" ± {stderr:.4f}")


def with_minus(text: str) -> str:
    """The text with a minus sign instead of a hyphen, for HTML and the terminal."""
    return text.replace("-", "−")


def seconds_text(seconds: float) -> str:
    """Two units at most: `8.4 s`, `2 min 05 s`, `1 h 12 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, left = divmod(minutes, 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{hours} h {left:02d} min"


def work_text(pace: Mapping[str, Any]) -> str:
    """`2 min 51 s, 436 plain steps of 0.39 s (expected: 435)`, of the facts that a record keeps."""
    text, steps = seconds_text(pace["seconds"]), pace["plain_steps"]
    if steps is None:
        return f"{text} ({pace['plain_steps_reason']})"
    expected = f"{pace['expected_plain_steps']:.0f}"
    return f"{text}, {steps:.0f} plain steps of {pace['plain_step_seconds']:.2f} s (expected: {expected})"


def bytes_text(count: float) -> str:
    """GiB, or MiB below one."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
