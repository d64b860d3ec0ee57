"""Schedules: pure functions of the step, counted from 0."""

import math

from dmx.searching.config import SearchConfig


def temperature(config: SearchConfig, step: int) -> float:
    """Constant for the first `anneal_from` of the steps, then geometric up to the last step.

    With the defaults: 0.4, then 0.4 * 50**((i - s0)/(steps - 1 - s0)), 20 at the last step.
    """
    start = int(config.anneal_from * config.steps)
    span = config.steps - 1 - start
    if step < start or span <= 0:
        return (
            config.temperature_end if step >= config.steps - 1 and span == 0 else config.temperature
        )
    ratio = config.temperature_end / config.temperature
    return float(config.temperature * ratio ** ((step - start) / span))


def averaged_rows(config: SearchConfig) -> slice:
    """Which raw offsets are averaged: the state before step i is row i, that after the last one row
    `steps`. From `average_from` up to the state in which annealing begins; empty without."""
    if config.average_from is None:
        return slice(0, 0)
    return slice(
        int(config.average_from * config.steps), int(config.anneal_from * config.steps) + 1
    )


def learning_rate(config: SearchConfig, step: int) -> float:
    """Constant, or half a cosine from lr to 0."""
    if config.lr_schedule == "constant":
        return config.lr
    return config.lr * 0.5 * (1 + math.cos(math.pi * step / config.steps))


def rotation_rate(config: SearchConfig, step: int) -> float:
    """Half a cosine from rotation_lr to 0: unlike an offset, a rotation never settles by annealing."""
    return config.rotation_lr * 0.5 * (1 + math.cos(math.pi * step / config.steps))
