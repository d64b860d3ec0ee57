"""Schedules: pure functions of the step, counted from 0."""

import math

from dmx.searching.config import SearchConfig


def temperature(config: SearchConfig, step: int) -> float:
    """Constant for the first `anneal_from` of the steps, then geometric up to the last step.

    With the defaults: 0.4, then 0.4 * 50**((i - s0)/(steps - 1 - s0)), 20 at the last step.
    """
    descent = config.descent
    start = int(descent.anneal_from * config.steps)
    span = config.steps - 1 - start
    if step < start or span <= 0:
        is_end = step >= config.steps - 1 and span == 0
        return descent.temperature_end if is_end else descent.temperature
    ratio = descent.temperature_end / descent.temperature
    return float(descent.temperature * ratio ** ((step - start) / span))


def learning_rate(config: SearchConfig, step: int) -> float:
    """Constant, or half a cosine from lr to 0."""
    descent = config.descent
    if descent.lr_schedule == "constant":
        return descent.lr
    return descent.lr * 0.5 * (1 + math.cos(math.pi * step / config.steps))


def rotation_rate(config: SearchConfig, step: int) -> float:
    """Half a cosine from rotation.lr to 0: unlike an offset, a rotation never settles by annealing."""
    return config.rotation.lr * 0.5 * (1 + math.cos(math.pi * step / config.steps))
