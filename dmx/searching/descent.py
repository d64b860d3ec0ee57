"""From the gradient by the raw offsets to the direction of a step.

*Scale.* At the best soft assignment every free unit has

    -(d task / d bits of u) = lambda * share of u,

its task loss falls by as much per added bit of the average as anybody else's. Both sides are
proportional to the unit's weight elements, so under one learning rate a small unit feels a small
force on either side of the balance and stays where it started, whatever it is worth per bit.

    elements    gradient * mean elements / elements: the force is the saving per bit minus lambda,
                the same for units of every size. It keeps the difference between a unit far from
                the balance and one near it.

It keeps the mean size of the gradient, so that a learning rate means the same with and without.

*Budget.* With penalty = exact the soft average is held at the target instead of being pushed back
whenever it is above: the direction loses its part along the average, and after the step all raw
offsets shift by one number. A hinge pushes all units at once, with a force that has nothing to do
with what a bit is worth, and with momentum the average swings around the target.
"""

from collections.abc import Callable

import torch
from torch import Tensor

_POINTS, _ROUNDS = 65, 3


def element_scale(weights: Tensor) -> Tensor:
    """(U,) float32, mean weight over weight."""
    return weights.mean() / weights


def along_budget(gradient: Tensor, pull: Tensor, scale: Tensor) -> Tensor:
    """The scaled gradient without its part that changes the soft average; (U,).

    Args:
        pull: (U,) gradient of the soft average, not zero everywhere.
    """
    scaled, scaled_pull = scale * gradient, scale * pull
    return scaled - scaled_pull * ((pull @ scaled) / (pull @ scaled_pull).clamp(min=1e-30))


def shift_to_average(raw: Tensor, average_of: Callable[[Tensor], Tensor], target: float) -> Tensor:
    """Raw offsets (U,) plus one number, clamped to [0, 2], whose soft average is the target; the
    nearest reachable average below it otherwise. No synchronization with the host.

    Args:
        average_of: (K, U) raw offsets -> (K,) soft averages.
    """
    points = torch.linspace(0, 1, _POINTS, device=raw.device)
    low, width = torch.full((), -2.0, device=raw.device), 4.0
    for _ in range(_ROUNDS):
        averages = average_of((raw + (low + width * points)[:, None]).clamp(0, 2))
        below = ((averages <= target).sum() - 1).clamp(0, _POINTS - 2)
        width /= _POINTS - 1
        low = low + width * below
    return (raw + low).clamp(0, 2)
