"""Perplexity over bits: every method of a run in one picture."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..colours import QUIET
from ..groups import Group, bits_unit
from .canvas import WIDTH, legend, log_axis, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOOKS = {
    "dMX": ("#d55e00", "o"),
    "kl": ("#0072b2", "s"),
    "kl_per_bit": ("#009e73", "D"),
    "fisher": ("#cc79a7", "^"),
    "aumann_shapley": ("#17becf", "<"),
    "weight_mse": ("#b08900", "v"),
    "random": ("#5b6068", "X"),
}
"""Of bare searches, by label; the others take the next of `SPARE_LOOKS`."""
SPARE_LOOKS = (
    ("#56b4e9", "P"), ("#000000", "*"), ("#8c510a", "<"), ("#7b3294", ">"), ("#e7298a", "d"),
    ("#1b7837", "h"), ("#b2182b", "p"), ("#4d4d9f", "H"), ("#999900", "8"), ("#00868b", "v"),
    ("#ff8c69", "^"),
)  # fmt: skip
"""Colour and mark."""
LONGEST_NAME = 50
"""Characters of a name beside its line; longer ones would leave the axes no room and stand above them."""
COLUMNS = ((4, 12), (3, 20), (2, 38))
"""Of names above the axes: so many where all have fewer characters than that; else one."""


@dataclass(frozen=True)
class _Point:
    group: Group
    x: float
    y: float
    dx: float
    dy: float


def pareto(groups: Sequence[Group], *, zoom: bool = False) -> Figure | None:
    """Perplexity over bits: uniform formats as a line, searches as marks with error bars over
    seeds; a line or a series for each method.

    The y axis is logarithmic from a ratio of 3 on. With `zoom`, only the region of the searches is
    shown, and marks carry names and values instead of a legend.

    Returns:
        None when no row (with `zoom`: no search) has both perplexity and bits.
    """
    unit = bits_unit(groups)
    ceiling, series = _series(groups, unit)
    lines = [key for key, points in series.items() if points[0].group.method.is_uniform]
    if not series or (zoom and len(lines) == len(series)):
        return None
    with styled():
        figure, axes = new_figure(WIDTH, 3.9)
        marks = [p for key, of in series.items() if key not in lines or not zoom for p in of]
        values = [p.y for p in marks] + ([ceiling] if ceiling and not zoom else [])
        if max(values) / min(values) > 3:
            log_axis(axes, min(values), max(values))
        if ceiling is not None:
            _draw_ceiling(axes, ceiling)
        handles = []
        for index, key in enumerate(lines):
            line = _draw_uniform(axes, key, series[key], index, is_named=not (zoom or index))
            handles += line if len(lines) > 1 else []
        spare = iter(SPARE_LOOKS * 8)
        labels = []
        for key in (key for key in series if key not in lines):
            points = series[key]
            look = LOOKS.get(points[0].group.label) or next(spare)
            handles.append(_draw_search(axes, key, points, look))
            labels.append((f"{key}  {points[-1].y:.2f}", points[-1].x, points[-1].y, look[0]))
        for limit in sorted({g.budget.limit for g in groups if g.budget and g.budget.unit == unit}):
            axes.axvline(limit, color=QUIET, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
        axes.set_xlabel(f"{unit} (dashed: budget)")
        axes.set_ylabel("perplexity")
        widest = max((len(str(h.get_label())) for h in handles), default=0)
        if zoom:
            _frame(axes, [p.x for p in marks], values)
        if zoom and widest <= LONGEST_NAME:
            _place_labels(figure, axes, labels)
        elif zoom:
            for handle in handles:
                handle.set_label(textwrap.fill(str(handle.get_label()), LONGEST_NAME))
            legend(axes, handles, columns=1)
        else:
            axes.margins(x=0.06, y=0.14)
            legend(axes, handles, columns=next((n for n, most in COLUMNS if widest < most), 1))
    return figure


def _series(groups: Sequence[Group], unit: str) -> tuple[float | None, dict[str, list[_Point]]]:
    """Perplexity of the unquantized model, and points by the name of their method, by bits."""
    ceiling: float | None = None
    series: dict[str, list[_Point]] = {}
    for group in groups:
        x, y = group.statistic(unit), group.statistic("perplexity")
        if y.mean is None or not np.isfinite(y.mean):
            continue
        if group.method.is_unquantized:
            ceiling = y.mean
        elif x.mean is not None:
            uniform = group.method.is_uniform
            key = replace(group.method, format=None).label if uniform else group.name
            point = _Point(group, x.mean, y.mean, x.spread or 0.0, y.spread or 0.0)
            series.setdefault(key, []).append(point)
    return ceiling, {key: sorted(of, key=lambda p: p.x) for key, of in series.items()}


def _draw_ceiling(axes: Axes, ceiling: float) -> None:
    axes.axhline(ceiling, color=QUIET, linestyle=(0, (1, 2)), linewidth=1.2, zorder=1)
    axes.annotate(
        f"bf16  {ceiling:.2f}",
        (0.0, ceiling),
        xycoords=("axes fraction", "data"),
        xytext=(4, -3),
        textcoords="offset points",
        va="top",
        color=QUIET,
        annotation_clip=True,
    )


def _draw_uniform(
    axes: Axes, key: str, points: Sequence[_Point], index: int, *, is_named: bool
) -> list[Any]:
    line = axes.plot(
        [p.x for p in points],
        [p.y for p in points],
        color=QUIET,
        linewidth=1.2,
        marker="osD^"[index % 4],
        markersize=4,
        linestyle=("-", "--", "-.", ":")[index % 4],
        zorder=2,
        label=key,
    )
    for p in points if is_named else ():  # with `zoom`, names would fall outside
        last = len(points) > 1 and p.x == points[-1].x
        axes.annotate(
            str(p.group.method.format),
            (p.x, p.y),
            xytext=(-4 if last else 5, 6),
            textcoords="offset points",
            ha="right" if last else "left",
            color=QUIET,
            fontsize=8,
            annotation_clip=True,
        )
    return line


def _draw_search(axes: Axes, key: str, points: Sequence[_Point], look: tuple[str, str]) -> object:
    dx, dy = [p.dx for p in points], [p.dy for p in points]
    return axes.errorbar(
        [p.x for p in points], [p.y for p in points], xerr=dx if any(dx) else None,
        yerr=dy if any(dy) else None, color=look[0], marker=look[1], markersize=11 if look[1] == "*" else 8,
        markeredgecolor="white", markeredgewidth=0.5, linewidth=1.4, capsize=2.5,
        linestyle="-" if len(points) > 1 else "none", zorder=4, label=key,
    )  # fmt: skip


def _frame(axes: Axes, x: Sequence[float], y: Sequence[float]) -> None:
    """Limits around the searches, with room for the labels at the right of the last mark."""
    width = max(max(x) - min(x), 0.6)
    middle = (max(x) + min(x)) / 2
    axes.set_xlim(middle - 0.65 * width, middle + 1.0 * width)
    if axes.get_yscale() == "log":
        axes.set_ylim(min(y) / 1.15, max(y) * 1.15)
    else:
        height = max(max(y) - min(y), 0.02 * max(y))
        axes.set_ylim(min(y) - 0.2 * height, max(y) + 0.2 * height)


def _place_labels(
    figure: Figure, axes: Axes, labels: Sequence[tuple[str, float, float, str]]
) -> None:
    """Right of their marks, pushed apart upwards until none covers another."""
    figure.canvas.draw()
    to_points = 72 / figure.dpi
    placed = sorted(
        (axes.transData.transform((x, y))[1] * to_points, text, x, y, colour)
        for text, x, y, colour in labels
    )
    above = -np.inf
    for height, text, x, y, colour in placed:
        target = max(height, above + 14)
        above = target
        shift = target - height
        line = {"arrowstyle": "-", "color": colour, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 5}
        axes.annotate(
            text, (x, y), xytext=(12, shift), textcoords="offset points", va="center", zorder=6,
            color=colour, fontweight="bold", arrowprops=line if shift > 3 else None,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85},
        )  # fmt: skip
