"""A gradient search step by step: bits, raw offsets, losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..colours import FORMAT_COLOURS, INK, QUIET, UNKNOWN_COLOUR
from ..record import Limit
from .canvas import WIDTH, Series, legend, log_axis, new_figure, steps_axis, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def bits_over_steps(history: Series, budget: Limit | None) -> Figure:
    """Soft, hard and projected average bits with the budget, temperature on a second axis."""
    with styled():
        figure, axes = new_figure(WIDTH, 3.4)
        step = history["step"]
        handles = []
        for key, colour, style, width in (
            ("soft_bits", "#d55e00", "-", 1.8),
            ("hard_bits", "#8fcdf2", "-", 3.2),
            ("projected_bits", "#0057a3", (0, (5, 1.5)), 1.6),
        ):
            known, name = np.isfinite(history[key]), key.removesuffix("_bits")
            look = {"color": colour, "linestyle": style, "linewidth": width}
            handles += axes.plot(step[known], history[key][known], label=name, **look)
        if budget:
            look = {"color": INK, "linewidth": 1, "linestyle": (0, (4, 3))}
            handles.append(axes.axhline(budget.limit, label=f"budget {budget.limit:g}", **look))
        axes.set_ylabel(budget.unit if budget else "bits")
        steps_axis(axes)
        second, heat = axes.twinx(), history["temperature"]
        look = {"color": QUIET, "linewidth": 1.5, "linestyle": (0, (1, 1.2))}
        handles += second.plot(step, heat, label="temperature", **look)
        positive = heat[np.isfinite(heat)]
        if len(positive) and positive.min() > 0:
            log_axis(second, positive.min(), positive.max())
        second.set_ylabel("temperature", color=QUIET)
        second.grid(False)
        second.spines["right"].set_visible(True)
        legend(axes, handles, columns=3)
    return figure


def offsets_over_steps(
    raw: np.ndarray, unit_formats: Sequence[str | None], thresholds: Sequence[float]
) -> Figure:
    """One line per unit in the colour of its final format.

    Args:
        raw: (steps + 1, units) raw offsets, 0 to 2.
        unit_formats: final block format of each unit; None when the assignment does not tell.
        thresholds: raw offsets where the hard choice changes.
    """
    with styled():
        figure, axes = new_figure(WIDTH, 3.4)
        counts = {name: unit_formats.count(name) for name in (*FORMAT_COLOURS, None)}
        alpha = 0.75 if raw.shape[1] <= 60 else 0.5
        handles = []
        for name, count in counts.items():
            if not count:
                continue
            columns = [i for i, of in enumerate(unit_formats) if of == name]
            colour = FORMAT_COLOURS[name] if name else UNKNOWN_COLOUR
            axes.plot(raw[:, columns], color=colour, linewidth=0.9, alpha=alpha)
            label = f"{name or 'final format not known'} ({count})"
            handles += axes.plot([], [], color=colour, linewidth=2.4, label=label)
        for threshold in thresholds:
            axes.axhline(threshold, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
        axes.set_ylim(-0.05, 2.05)
        axes.set_ylabel("raw offset")
        steps_axis(axes)
        legend(axes, handles, columns=2)
    return figure


def loss_gap(history: Series) -> Figure | None:
    """Held-batch loss of the soft, hard and projected model, and below it what hardening costs.

    Returns None when no step evaluated all three.
    """
    looks = {
        "soft_loss": ("#d55e00", "o"),
        "hard_loss": ("#56b4e9", "s"),
        "projected_loss": ("#0057a3", "^"),
    }
    known = np.all([np.isfinite(history[kind]) for kind in looks], axis=0)
    if not known.any():
        return None
    with styled():
        figure, (top, bottom) = new_figure(WIDTH, 3.7, 2, sharex=True, height_ratios=(3, 2))
        step, quiet = history["step"], {"color": UNKNOWN_COLOUR, "linewidth": 0.8, "zorder": 1}
        top.plot(step, history["loss"], label="training", **quiet)
        for kind, (colour, marker) in looks.items():
            name = kind.removesuffix("_loss")
            style = {"color": colour, "marker": marker, "markersize": 4, "linewidth": 1.4}
            top.plot(step[known], history[kind][known], label=name, **style)
            if kind != "soft_loss":
                gap = history[kind][known] - history["soft_loss"][known]
                bottom.plot(step[known], gap, **style)
        bottom.axhline(0, color=QUIET, linewidth=0.9)
        top.set_ylabel("nats/token")
        bottom.set_ylabel("minus soft")
        steps_axis(bottom)
        legend(top, columns=4)
    return figure
