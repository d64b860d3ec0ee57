"""Perplexity over calibration tokens and over the seconds of a search, a line a search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from .canvas import WIDTH, legend, new_figure, styled
from .pareto import LOOKS, SPARE_LOOKS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Point = tuple[float, float, float, float]
"""Tokens, seconds, perplexity and its standard deviation over seeds."""


def tokens_curves(curves: Mapping[str, Sequence[Point]]) -> Figure:
    """Both pictures side by side; label of a search -> its points."""
    with styled():
        figure, (left, right) = new_figure(2 * WIDTH, 3.9, columns=2, sharey=True)
        spare = iter(SPARE_LOOKS * 8)
        for label, points in curves.items():
            colour, mark = LOOKS.get(label) or next(spare)
            tokens, seconds, perplexity, spread = zip(*sorted(points), strict=True)
            for axes, x in ((left, tokens), (right, seconds)):
                axes.errorbar(
                    x, perplexity, yerr=spread, label=label, color=colour, marker=mark,
                    markersize=4, linewidth=1.2, elinewidth=0.8, capsize=2,
                )  # fmt: skip
        for axes, name in ((left, "calibration tokens"), (right, "seconds of the search")):
            axes.set_xscale("log")
            axes.set_xlabel(name)
        counts = sorted({tokens for points in curves.values() for tokens, *_ in points})
        left.set_xticks(counts, [f"{int(n):,}" for n in counts], minor=False)
        left.set_xticks([], minor=True)
        left.set_ylabel("perplexity")
        legend(left, columns=3)
    return figure
