"""Raw offsets and what they stand for: soft formats while the search anneals, a choice at its end.

    two stops     b = 2 sigmoid(k T (raw/2 - 1/2))
    three stops   b = sigmoid(k T (raw - 1/2)) + sigmoid(k T (raw - 3/2)),      k = 20
    F stops       b = w sum over stops s but the last of sigmoid(k T ((raw - s)/w - 1/2)),   w = 2/(F-1)

The bits of an offset are those of the formats at the stops and linear between them.

All raw offsets of a search are one 1-D float32 parameter that the search owns; the layers see 0-d
views of the annealed offsets. The module tree of the model never holds the parameter.

Source: dMX, arXiv 2606.04115 (two stops); more stops are ours.
"""

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from dmx.formats import Family

SHARPNESS = 20.0
"""k in the formulas above, from the paper."""
TIE = 1e-9
"""Far below the spacing of float32 near a threshold, far above that of float64."""


def raw_thresholds(family: Family) -> tuple[float, ...]:
    """Raw offset above which a unit takes the next format: the midpoints between the stops."""
    return tuple((a + b) / 2 for a, b in pairwise(family.stops))


def anneal(raw: Tensor, temperature: float | Tensor, family: Family) -> Tensor:
    """Offsets of raw offsets; float32, same shape. Finite gradients at any temperature.

    `torch.sigmoid` and not 1/(1+exp(-z)), whose gradient is NaN once exp overflows.
    """
    sharpness, width = SHARPNESS * temperature, family.width
    position = torch.zeros_like(raw)
    for low in family.stops[:-1]:
        position = position + torch.sigmoid(sharpness * ((raw - low) / width - 0.5))
    # Whole positions are the stops as float32 has them; widths summed one by one would miss those of four.
    return width * position


def added_bits(offsets: Tensor, steps: Tensor) -> Tensor:
    """Bits of offsets above those of the smallest format; shape of offsets, exact at the stops.

    At a stop the gradient is the right-hand one, at the last the one before it.

    Args:
        offsets: (..., U) float32.
        steps: (F-1,) or (U, F-1) float32, bits that each step adds.
    """
    columns = steps.unbind(-1)
    position = offsets * (len(columns) / 2)
    bits = columns[0] * position
    for index, (before, after) in enumerate(pairwise(columns), start=1):
        bits = bits + (after - before) * (position - index).clamp(min=0)
    return bits


def harden(raw: np.ndarray, family: Family) -> np.ndarray:
    """Candidate index of each raw offset: how many thresholds lie below it."""
    return (raw[:, None] > np.array(raw_thresholds(family))[None]).sum(1).astype(np.int64)


def preference(raw: np.ndarray, family: Family, ties: np.ndarray | None = None) -> np.ndarray:
    """(U, F-1): how far each raw offset lies above the threshold of each step.

    With two stops this is the order of the raw offsets themselves; with more it also compares a
    step 4 to 6 of one unit with a step 6 to 8 of another.

    Args:
        raw: (U,) float64. ties: (U,) in [0, 2], decides between raw offsets that are equal, as those
            are that the clamp holds at 0 or 2.
    """
    margins: np.ndarray = raw[:, None] - np.array(raw_thresholds(family))[None]
    return margins if ties is None else margins + TIE * ties[:, None]
