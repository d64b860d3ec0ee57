"""Perplexity over effective bits: the safety net over MXFP4, and searches at their own bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..colours import QUIET, SERIES
from .canvas import WIDTH, legend, log_axis, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def bits_figure(
    lines: Mapping[str, Sequence[tuple[float, float]]],
    guarded: tuple[str, float, float],
    full: float,
) -> Figure:
    """Args:
    lines: label -> (effective bits, perplexity), a line each.
    guarded: label, effective bits and perplexity of a single mark.
    full: perplexity in full precision.
    """
    with styled():
        figure, axes = new_figure(WIDTH, 3.6)
        for index, (name, points) in enumerate(lines.items()):
            xs, ys = zip(*sorted(points), strict=True)
            colour = (SERIES[1:] * len(lines))[index]
            axes.plot(xs, ys, color=colour, marker=("osD^v<>P*" * 9)[index], label=name)
        label, bits, perplexity = guarded
        star = {"color": SERIES[0], "marker": "*", "markersize": 9, "linestyle": "none"}
        axes.plot(bits, perplexity, label=label, **star)
        axes.axhline(full, color=QUIET, linestyle=(0, (1, 2)), label=f"bf16 {full:.2f}")
        values = [full, *(y for points in lines.values() for _, y in points)]
        if max(values) / min(values) > 3:
            log_axis(axes, min(values), max(values))
        axes.set_xlabel("effective element_bits, weights and inputs")
        axes.set_ylabel("perplexity")
        legend(axes, columns=3)
    return figure
