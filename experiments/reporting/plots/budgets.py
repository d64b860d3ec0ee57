"""dMX and the best heuristic by budget, and how they differ."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..colours import QUIET
from .canvas import WIDTH, log_axis, new_figure, styled
from .pareto import SPARE_LOOKS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LOOKS = (
    ("#0072b2", "o"),
    ("#d55e00", "s"),
    ("#009e73", "^"),
    ("#cc79a7", "D"),
    ("#e69f00", "v"),
    *SPARE_LOOKS,
)


class BudgetPoint(NamedTuple):
    """Two methods at one budget."""

    limit: float
    dmx: float
    """Perplexity."""
    heuristic: float
    """Perplexity of the best heuristic; NaN: none was run there."""
    noise: float
    """Standard error of their difference, %; NaN likewise."""


STRETCH = 0.5
"""Share of the range of all other differences by which one may widen it; beyond that it is said in numbers at the edge."""
FEW = 6
"""Differences of which none is left out."""


def edges(bars: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The lowest and highest end of (difference, error) that are drawn, zero among them: all, but for one difference on
    either side beside which the others would be small."""
    drawn = list(bars)
    if len(bars) >= FEW:
        values = sorted(value for value, _ in bars)
        low, high = min(values[1], 0.0), max(values[-2], 0.0)
        most = STRETCH * (high - low)
        drawn = [bar for bar in bars if low - most <= bar[0] <= high + most]
    ends = [0.0, *(value + sign * error for value, error in drawn for sign in (-1, 1))]
    return min(ends), max(ends)


def difference_figure(
    curves: Sequence[tuple[str, Sequence[BudgetPoint]]], ceiling: float | None, unit: str
) -> Figure:
    """Left: dMX (solid) and the best heuristic (dotted) by budget. Right: their difference.

    Args:
        curves: names and points.
        ceiling: perplexity of the unquantized model, what the left is relative to; None: perplexity.
        unit: of the budgets.
    """
    with styled():
        figure, (left, right) = new_figure(1.7 * WIDTH, 4.6, columns=2)
        budgets = sorted({point.limit for _, points in curves for point in points})
        gaps = [b - a for a, b in itertools.pairwise(budgets)] or [1.0]
        apart = 0.7 * min(gaps) / len(curves)  # so that error bars of one budget stand side by side
        heights: list[float] = []
        bars: list[tuple[float, float, float, str]] = []
        for index, (name, points) in enumerate(curves):
            colour, marker = _LOOKS[index % len(_LOOKS)]
            xs, ours, theirs, noise = (np.array(column) for column in zip(*points, strict=True))
            gain = 100 * (ours / theirs - 1)
            if ceiling is not None:
                ours, theirs = (100 * (side / ceiling - 1) for side in (ours, theirs))
            heights += [height for height in (*ours, *theirs) if np.isfinite(height)]
            size = 10 if marker == "*" else 6  # its white edge would leave nothing of a small star
            style = {
                "color": colour,
                "marker": marker,
                "markeredgecolor": "white",
                "markersize": size,
            }
            left.plot(xs, theirs, linestyle=(0, (1, 1.5)), linewidth=1.6, **style)
            left.plot(xs, ours, linewidth=1.4, label=name, **style)
            shift = apart * (index - (len(curves) - 1) / 2)
            right.errorbar(xs + shift, gain, yerr=noise, linestyle="none", capsize=2.5, **style)
            bars += zip(xs + shift, gain, noise, [colour] * len(xs), strict=True)
        if ceiling is not None and min(heights) > 0:
            log_axis(left, min(heights), max(heights))
        left.set_ylabel("perplexity" if ceiling is None else "perplexity above bf16, %")
        right.axhline(0, color=QUIET, linewidth=0.9)
        right.set_ylabel("dMX minus best heuristic, %")
        left.set_xlabel(f"budget, {unit}")
        right.set_xlabel(f"budget, {unit} (points of a budget stand side by side)")
        compared = sorted({p.limit for _, points in curves for p in points if np.isfinite(p.noise)})
        for axes, ticks in ((left, budgets), (right, compared)):
            axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
        right.grid(False, axis="x")
        handles, names = left.get_legend_handles_labels()
        # Of the figure: names as long as a table's setting would take their room from the axes.
        figure.legend(handles, names, loc="outside upper left", ncols=3, handlelength=1.8)
        bars = [bar for bar in bars if np.isfinite(bar[2])]
        _say_beyond(right, bars)
        note = "below 0: dMX is better; bars: one standard error"
        right.set_title(note, fontsize=9, loc="left", color=QUIET)
        kinds = "solid: best dMX\ndotted: best heuristic"
        left.text(0.98, 0.97, kinds, transform=left.transAxes, ha="right", va="top", color=QUIET)
    return figure


def _say_beyond(axes: Axes, bars: Sequence[tuple[float, float, float, str]]) -> None:
    """Limits of the differences; what lies beyond them is written at the edge.

    Args:
        bars: where, difference, its standard error, colour.
    """
    low, high = edges([(value, error) for _, value, error, _ in bars])
    if not (margin := 0.05 * (high - low)):
        return
    low, high = low - margin, high + margin
    axes.set_ylim(low, high)
    for x, value, error, colour in bars:
        if not low < value < high:
            edge, inwards = (high, -16) if value > high else (low, 16)
            axes.annotate(
                f"{value:+.1f} ± {error:.1f} %", (x, edge), (0, inwards), textcoords="offset points", color=colour,
                ha="center", va="center", fontsize=8, arrowprops={"arrowstyle": "->", "color": colour},
            )  # fmt: skip
