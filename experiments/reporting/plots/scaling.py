"""What a model of seconds and memory gives against what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..colours import QUIET, SERIES
from .canvas import WIDTH, legend, log_axis, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKS = {"alone": "o", "whole": "s", "sharded": "^"}


class Point(NamedTuple):
    """A measured step; seconds and MiB as measured and as the model has them."""

    model: str
    way: str
    seconds: tuple[float, float]
    mib: tuple[float, float]
    is_unseen: bool = False
    """The model was fitted without this size; drawn hollow."""


def fitted_against_measured(points: Sequence[Point]) -> Figure:
    """Of seconds at the left, of memory at the right: the model's value by the measured one."""
    from matplotlib.lines import Line2D

    models = list(dict.fromkeys(p.model for p in points))
    colours = {m: SERIES[i % len(SERIES)] for i, m in enumerate(models)}
    with styled():
        figure, (left, right) = new_figure(2 * WIDTH, 3.9, columns=2)
        for axes, name, pairs in (
            (left, "ms of a step", [(1e3 * a, b / a) for a, b in (p.seconds for p in points)]),
            (right, "peak GiB of a card", [(a / 1024, b / a) for a, b in (p.mib for p in points)]),
        ):
            axes.axhline(1.0, color=QUIET, linewidth=0.8, zorder=1)
            for point, (measured, share) in zip(points, pairs, strict=True):
                colour = colours[point.model]
                axes.plot(
                    measured, share, MARKS[point.way], color=colour, markersize=5,
                    markerfacecolor="none" if point.is_unseen else colour,
                )  # fmt: skip
            log_axis(axes, min(pairs)[0], max(pairs)[0], which="x")
            axes.set_xlabel(f"{name}, measured")
        left.set_ylabel("by the model / measured")
        look: dict[str, Any] = {"linestyle": "", "markersize": 5}
        handles = [Line2D([], [], marker="o", color=colours[m], label=m, **look) for m in models]
        legend(left, handles, columns=3)
        ways = [
            Line2D([], [], marker=MARKS[w], color=QUIET, label=w, **look)
            for w in dict.fromkeys(p.way for p in points)
        ]
        hollow = Line2D(
            [], [], marker="o", color=QUIET, markerfacecolor="none", label="size left out", **look
        )
        legend(right, [*ways, hollow])
    return figure
