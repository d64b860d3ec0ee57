"""The pictures of a report: matplotlib figures in, data URIs out. No pyplot, so no global state.

Colours are Okabe and Ito's, which stay apart for every common kind of colour blindness; each series
has a mark or a line style of its own besides.
"""

import base64
import io
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from experiments.reporting.results import Group, bits_unit

FORMAT_COLOURS = {
    "mxfp4": "#f0b429",
    "mxfp6_e2m3": "#56b4e9",
    "mxfp6_e3m2": "#009e73",
    "mxfp8_e4m3": "#0057a3",
    "mxfp8_e5m2": "#cc79a7",
    "bf16": "#5b6068",
}
UNKNOWN_COLOUR = "#c4c8ce"

_INK, _QUIET, _GRID = "#22262b", "#6b727b", "#e3e6ea"
_METHODS = {
    "differentiable": ("#d55e00", "o"),
    "kl": ("#0072b2", "s"),
    "kl_per_bit": ("#009e73", "D"),
    "fisher": ("#cc79a7", "^"),
    "weight_mse": ("#b08900", "v"),
    "random": ("#5b6068", "X"),
}
_SPARE = [
    ("#56b4e9", "P"), ("#000000", "*"), ("#8c510a", "<"), ("#7b3294", ">"), ("#e7298a", "d"),
    ("#1b7837", "h"), ("#b2182b", "p"), ("#4d4d9f", "H"), ("#999900", "8"), ("#00868b", "v"),
    ("#ff8c69", "^"),
]  # fmt: skip
_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "axes.edgecolor": _QUIET,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "xtick.color": _QUIET,
    "ytick.color": _QUIET,
    "text.parse_math": False,  # a `$` in a label is a dollar sign
    "legend.frameon": False,
    "svg.hashsalt": "dmx",  # the same record gives the same bytes
    "figure.facecolor": "white",
}

_WIDTH = 5.6
"""Inches; two pictures stand side by side on the page, so text must stay readable at half its
width."""

Series = Mapping[str, np.ndarray]


def figure_uri(figure: Figure, kind: str = "svg") -> str:
    """`data:` URI of the figure, as svg or as png (for thousands of line segments)."""
    buffer = io.BytesIO()
    with matplotlib.rc_context(_STYLE):
        metadata: dict[str, Any] = {"Date": None} if kind == "svg" else {}
        figure.savefig(buffer, format=kind, metadata=metadata, dpi=72 if kind == "svg" else 160)
    mime = "image/svg+xml" if kind == "svg" else "image/png"
    return f"data:{mime};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def _new(
    width: float, height: float, rows: int = 1, columns: int = 1, **options: Any
) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, **options)


def _legend(axes: Axes, handles: Sequence[Any] | None = None, columns: int = 4) -> None:
    """Above the axes, where it cannot cover data."""
    given = {"handles": handles} if handles is not None else {}
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns, borderaxespad=0.3,
        handlelength=1.8, columnspacing=1.4, **given,
    )  # fmt: skip


def pareto(groups: Sequence[Group], *, zoom: bool = False) -> Figure | None:
    """Perplexity over bits: uniform formats as a line, searches as marks with error bars over
    seeds.

    The y axis is logarithmic from a ratio of 3 on. With `zoom`, only the region of the searches is
    shown, and marks carry names and values instead of a legend.

    Returns:
        None when no row (with `zoom`: no search) has both perplexity and bits.
    """
    unit = bits_unit(groups)
    points: dict[str, list[tuple[Group, float, float, float, float]]] = {}
    ceiling = None
    for group in groups:
        x, y = group.statistic(unit), group.statistic("perplexity")
        if y.mean is None or not np.isfinite(y.mean):
            continue
        if group.label == "bf16":
            ceiling = y.mean
        elif x.mean is not None:
            key = group.name
            if group.search == "uniform":
                key = f"uniform, {group.transform}" if group.transform else "uniform"
            row = (group, x.mean, y.mean, x.spread or 0.0, y.spread or 0.0)
            points.setdefault(key, []).append(row)
    lines = [key for key, rows in points.items() if rows[0][0].search == "uniform"]
    if not points or (zoom and len(lines) == len(points)):
        return None
    with matplotlib.rc_context(_STYLE):
        figure, axes = _new(_WIDTH, 3.9)
        marks = [
            row for key, rows in points.items() if key not in lines or not zoom for row in rows
        ]
        values = [row[2] for row in marks] + ([ceiling] if ceiling and not zoom else [])
        if max(values) / min(values) > 3:
            _log_axis(axes, min(values), max(values))
        if ceiling is not None:
            axes.axhline(ceiling, color=_QUIET, linestyle=(0, (1, 2)), linewidth=1.2, zorder=1)
            axes.annotate(
                f"bf16  {ceiling:.2f}",
                (0.0, ceiling),
                xycoords=("axes fraction", "data"),
                xytext=(4, -3),
                textcoords="offset points",
                va="top",
                color=_QUIET,
                annotation_clip=True,
            )
        spare = iter(_SPARE * 8)
        labels, handles = [], []
        for key, rows in points.items():
            rows.sort(key=lambda row: row[1])
            _, xs, ys, dx, dy = zip(*rows, strict=True)
            if key in lines:
                index = lines.index(key)
                line = axes.plot(
                    xs, ys, color=_QUIET, linewidth=1.2, marker="osD^"[index % 4], markersize=4,
                    linestyle=("-", "--", "-.", ":")[index % 4], zorder=2, label=key,
                )  # fmt: skip
                if len(lines) > 1:
                    handles += line
                for group, px, py, *_ in () if zoom or index else rows:  # names would fall outside
                    name = group.label.removeprefix("uniform ").partition(" + ")[0]
                    last = len(rows) > 1 and px == xs[-1]
                    axes.annotate(
                        name,
                        (px, py),
                        xytext=(-4 if last else 5, 6),
                        textcoords="offset points",
                        ha="right" if last else "left",
                        color=_QUIET,
                        fontsize=8,
                        annotation_clip=True,
                    )
                continue
            search = rows[0][0].search
            known = rows[0][0].label in ("dmx", search)
            colour, marker = _METHODS[search] if known and search in _METHODS else next(spare)
            name = key.replace("dmx", "dMX", 1) if key.split(" ")[0] == "dmx" else key
            container = axes.errorbar(
                xs, ys, xerr=dx if any(dx) else None, yerr=dy if any(dy) else None, color=colour,
                marker=marker, markersize=7, markeredgecolor="white", linewidth=1.4, capsize=2.5,
                linestyle="-" if len(rows) > 1 else "none", zorder=4, label=name,
            )  # fmt: skip
            handles.append(container)
            labels.append((f"{name}  {ys[-1]:.2f}", xs[-1], ys[-1], colour))
        for limit in sorted({g.budget[0] for g in groups if g.budget and g.budget[1] == unit}):
            axes.axvline(limit, color=_QUIET, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
        if zoom:
            _frame(axes, [row[1] for row in marks], values)
        else:
            axes.margins(x=0.06, y=0.14)
            widest = max((len(str(h.get_label())) for h in handles), default=0)
            _legend(axes, handles, columns=4 if widest < 20 else 2)
        axes.set_xlabel(f"{unit} (dashed: budget)")
        axes.set_ylabel("perplexity")
        if zoom:
            _place_labels(figure, axes, labels)
    return figure


def difference_figure(
    curves: Sequence[tuple[str, Sequence[tuple[float, float, float, float]]]], ceiling: float | None,
    unit: str,
) -> Figure:  # fmt: skip
    """Left: dMX (solid) and the best heuristic (dotted) by budget. Right: their difference.

    Args:
        curves: a name and points of (budget, perplexity of dMX, perplexity of the best heuristic,
            standard error of their difference in %).
        ceiling: perplexity of the unquantized model, what the left is relative to; None: perplexity.
        unit: of the budgets.
    """
    looks = [("#0072b2", "o"), ("#d55e00", "s"), ("#009e73", "^"), ("#cc79a7", "D"), ("#e69f00", "v"),
             ("#56b4e9", "P"), *_SPARE]  # fmt: skip
    with matplotlib.rc_context(_STYLE):
        figure, (left, right) = _new(1.7 * _WIDTH, 4.3, columns=2)
        budgets = sorted({x for _, points in curves for x, *_ in points})
        gaps = [b - a for a, b in itertools.pairwise(budgets)] or [1.0]
        apart = 0.7 * min(gaps) / len(curves)  # so that error bars of one budget stand side by side
        heights = []
        for index, (name, points) in enumerate(curves):
            colour, marker = looks[index % len(looks)]
            xs, ours, theirs, noise = (np.array(column) for column in zip(*points, strict=True))
            gain = 100 * (ours / theirs - 1)
            if ceiling is not None:
                ours, theirs = (100 * (side / ceiling - 1) for side in (ours, theirs))
            heights += [*ours, *theirs]
            style = {"color": colour, "marker": marker, "markeredgecolor": "white", "markersize": 6}
            left.plot(xs, theirs, linestyle=(0, (1, 1.5)), linewidth=1.6, **style)
            left.plot(xs, ours, linewidth=1.4, label=name, **style)
            shift = apart * (index - (len(curves) - 1) / 2)
            right.errorbar(xs + shift, gain, yerr=noise, linestyle="none", capsize=2.5, **style)
        if ceiling is not None and min(heights) > 0:
            _log_axis(left, min(heights), max(heights))
        left.set_ylabel("perplexity" if ceiling is None else "perplexity above bf16, %")
        right.axhline(0, color=_QUIET, linewidth=0.9)
        right.set_ylabel("dMX minus best heuristic, %")
        for axes in (left, right):
            axes.set_xlabel(
                f"budget, {unit}" + " (points of a budget stand side by side)" * (axes is right)
            )
            axes.set_xticks(budgets, [f"{x:g}" for x in budgets])
        right.grid(False, axis="x")
        _legend(left, columns=2)
        right.set_title("below 0: dMX is better; bars: one standard error", fontsize=9, loc="left",
                        color=_QUIET)  # fmt: skip
        left.text(0.98, 0.97, "solid: best dMX\ndotted: best heuristic", transform=left.transAxes, ha="right",
                  va="top", color=_QUIET)  # fmt: skip
    return figure


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


def _log_axis(axes: Axes, low: float, high: float) -> None:
    """Logarithmic y with plain numbers, dense enough for ranges of less than a decade."""
    axes.set_yscale("log")
    subs = (1, 2, 3, 5) if high / low < 100 else (1,)
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=subs))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())


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


def _steps_axis(axes: Axes) -> None:
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.01)


def bits_over_steps(history: Series, budget: tuple[float, str] | None) -> Figure:
    """Soft, hard and projected average bits with the budget, temperature on a second axis."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _new(_WIDTH, 3.4)
        step = history["step"]
        handles = []
        for key, colour, style, width in (
            ("soft_bits", "#d55e00", "-", 1.8),
            ("hard_bits", "#8fcdf2", "-", 3.2),
            ("projected_bits", "#0057a3", (0, (5, 1.5)), 1.6),
        ):
            known = np.isfinite(history[key])
            handles += axes.plot(
                step[known], history[key][known], color=colour, linestyle=style, linewidth=width,
                label=key.removesuffix("_bits"),
            )  # fmt: skip
        if budget:
            line = axes.axhline(
                budget[0],
                color=_INK,
                linewidth=1,
                linestyle=(0, (4, 3)),
                label=f"budget {budget[0]:g}",
            )
            handles.append(line)
        axes.set_ylabel(budget[1] if budget else "bits")
        _steps_axis(axes)
        second = axes.twinx()
        handles += second.plot(
            step, history["temperature"], color=_QUIET, linewidth=1.5, linestyle=(0, (1, 1.2)),
            label="temperature",
        )  # fmt: skip
        positive = history["temperature"][np.isfinite(history["temperature"])]
        if len(positive) and positive.min() > 0:
            _log_axis(second, positive.min(), positive.max())
        second.set_ylabel("temperature", color=_QUIET)
        second.grid(False)
        second.spines["right"].set_visible(True)
        _legend(axes, handles, columns=3)
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
    with matplotlib.rc_context(_STYLE):
        figure, axes = _new(_WIDTH, 3.4)
        counts = {name: unit_formats.count(name) for name in (*FORMAT_COLOURS, None)}
        alpha = 0.75 if raw.shape[1] <= 60 else 0.5
        handles = []
        for name, count in counts.items():
            if not count:
                continue
            columns = [i for i, found in enumerate(unit_formats) if found == name]
            colour = FORMAT_COLOURS[name] if name else UNKNOWN_COLOUR
            axes.plot(raw[:, columns], color=colour, linewidth=0.9, alpha=alpha)
            handles += axes.plot(
                [],
                [],
                color=colour,
                linewidth=2.4,
                label=f"{name or 'final format not known'} ({count})",
            )
        for threshold in thresholds:
            axes.axhline(threshold, color=_INK, linewidth=0.9, linestyle=(0, (4, 3)))
        axes.set_ylim(-0.05, 2.05)
        axes.set_ylabel("raw offset")
        _steps_axis(axes)
        _legend(axes, handles, columns=2)
    return figure


def loss_gap(history: Series) -> Figure | None:
    """Held-batch loss of the soft, hard and projected model, and below it what hardening costs.

    Returns None when no step evaluated all three.
    """
    kinds = ("soft_loss", "hard_loss", "projected_loss")
    known = np.all([np.isfinite(history[kind]) for kind in kinds], axis=0)
    if not known.any():
        return None
    looks = {
        "soft_loss": ("#d55e00", "o"),
        "hard_loss": ("#56b4e9", "s"),
        "projected_loss": ("#0057a3", "^"),
    }
    with matplotlib.rc_context(_STYLE):
        figure, (top, bottom) = _new(_WIDTH, 3.7, 2, sharex=True, height_ratios=(3, 2))
        step = history["step"]
        top.plot(
            step, history["loss"], color=UNKNOWN_COLOUR, linewidth=0.8, label="training", zorder=1
        )
        for kind, (colour, marker) in looks.items():
            name = kind.removesuffix("_loss")
            style = {"color": colour, "marker": marker, "markersize": 4, "linewidth": 1.4}
            top.plot(step[known], history[kind][known], label=name, **style)
            if kind != "soft_loss":
                gap = history[kind][known] - history["soft_loss"][known]
                bottom.plot(step[known], gap, **style)
        bottom.axhline(0, color=_QUIET, linewidth=0.9)
        top.set_ylabel("nats/token")
        bottom.set_ylabel("minus soft")
        _steps_axis(bottom)
        _legend(top, columns=4)
    return figure
