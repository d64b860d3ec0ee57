"""Means with their standard errors, of items and of paired differences."""

import math
from collections.abc import Sequence

import numpy as np

from dmx.errors import DataError


def paired_difference(
    items_a: Sequence[float], items_b: Sequence[float]
) -> tuple[float, float | None, int]:
    """Mean of a - b over items that both were asked, its standard error, and the number of items.

    The standard error is the sample standard deviation of the difference over sqrt(n): most of the
    scatter over items is common to both and cancels. None for a single item.
    """
    if len(items_a) != len(items_b) or not len(items_a):
        raise DataError(
            f"paired items must be as many on both sides and at least one, got {len(items_a)} and "
            f"{len(items_b)}: measure both with the same tasks and the same limit"
        )
    delta = np.asarray(items_a, dtype=np.float64) - np.asarray(items_b, dtype=np.float64)
    return float(delta.mean()), standard_error(delta), len(delta)


def standard_error(values: np.ndarray) -> float | None:
    """Of the mean of independent values, (n,): sample standard deviation over sqrt(n); None for one."""
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None
