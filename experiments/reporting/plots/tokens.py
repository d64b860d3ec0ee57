"""Perplexity over calibration tokens and over the seconds of a search, a line a search."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .canvas import WIDTH, log_axis, new_figure, styled
from .pareto import LOOKS, SPARE_LOOKS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Point = tuple[float, float, float, float]
"""Tokens, seconds, perplexity and its standard deviation, or standard error, over seeds."""
Curves = Mapping[str, Sequence[Point]]
"""Label of a search -> its points."""


def tokens_curves(curves: Curves) -> Figure:
    """Both pictures side by side."""
    return tokens_rows({"": curves})


def tokens_rows(
    rows: Mapping[str, Curves],
    searches: Mapping[str, str] | None = None,
    dashed: Collection[str] = (),
) -> Figure:
    """A row of both pictures for each title; a search looks alike in all of them.

    Args:
        searches: label -> name in `LOOKS`, of labels that are not names themselves. dashed: labels of dashed lines.
    """
    labels = list(dict.fromkeys(label for curves in rows.values() for label in curves))
    spare = iter(SPARE_LOOKS * 8)
    looks = {
        label: LOOKS.get((searches or {}).get(label, label)) or next(spare) for label in labels
    }
    with styled():
        height = 3.9 + 3.0 * (len(rows) - 1)
        figure, grid = new_figure(2 * WIDTH, height, len(rows), 2, sharey="row", squeeze=False)
        for (title, curves), (left, right) in zip(rows.items(), grid, strict=True):
            for label, points in curves.items():
                _line(left, right, label, points, looks[label], "--" if label in dashed else "-")
            _axes(left, right, curves)
            left.set_ylabel(f"perplexity, {title}" if title else "perplexity")
        handles: dict[str, Any] = {}
        for axes in grid[:, 0]:
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                handles.setdefault(label, handle)
        shown = [handles[label] for label in labels]
        figure.legend(handles=shown, labels=labels, loc="outside upper left", ncols=3)
    return figure


def _line(
    left: Axes, right: Axes, label: str, points: Sequence[Point], look: tuple[str, str], style: str
) -> None:
    """One search in both pictures; over seconds its points are joined only if more tokens never took less, for the line would
    run back and forth."""
    colour, mark = look
    tokens, seconds, perplexity, spread = zip(*sorted(points), strict=True)
    falls = any(later < earlier for earlier, later in itertools.pairwise(seconds))
    for axes, x, joined in ((left, tokens, style), (right, seconds, "none" if falls else style)):
        axes.errorbar(
            x, perplexity, yerr=spread, label=label, color=colour, marker=mark, linestyle=joined,
            markersize=4, linewidth=1.2, elinewidth=0.8, capsize=2,
        )  # fmt: skip


def _axes(left: Axes, right: Axes, curves: Curves) -> None:
    counts = sorted({tokens for points in curves.values() for tokens, *_ in points})
    left.set_xscale("log")
    left.set_xlabel("calibration tokens")
    texts = [f"{int(n):,}" for n in counts]
    left.set_xticks(counts, texts, minor=False, rotation=30, ha="right", rotation_mode="anchor")
    left.set_xticks([], minor=True)
    times = [seconds for points in curves.values() for _, seconds, *_ in points]
    log_axis(right, min(times), max(times), which="x")
    right.set_xlabel("seconds of the search")
