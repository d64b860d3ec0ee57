"""Training with mor: losses over steps, and what fell back to BF16."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mor.state import OPERANDS

from ..colours import QUIET, SERIES
from ..groups import RecipeGroup
from .canvas import WIDTH, legend, new_figure, steps_axis, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_COLUMNS = 240
"""Columns of a heat map; of more steps, one column shows several."""
_SMOOTHING = 0.9
"""Share of the past in the moving average of a loss."""
Curve = tuple[str, Sequence[float], Sequence[float | None]]
"""Label, steps, losses; None where a loss was not finite."""


def smooth(values: np.ndarray) -> np.ndarray:
    """Exponential moving average, unbiased at the start; a gap (nan) stays a gap."""
    result, average, weight = np.full(len(values), np.nan), 0.0, 0.0
    for i, value in enumerate(values):
        if np.isfinite(value):
            average = _SMOOTHING * average + (1 - _SMOOTHING) * value
            weight = _SMOOTHING * weight + (1 - _SMOOTHING)
            result[i] = average / weight
    return result


def loss_lines(curves: Sequence[Curve], *, smoothed: bool = False) -> Figure:
    """Loss over steps; curves of one label have one colour."""
    with styled():
        figure, axes = new_figure(WIDTH, 3.6)
        labels = list(dict.fromkeys(label for label, *_ in curves))
        shown = set()
        for label, steps, losses in curves:
            values = np.array([np.nan if loss is None else loss for loss in losses], np.float64)
            axes.plot(
                steps,
                smooth(values) if smoothed else values,
                linewidth=1.2,
                alpha=0.8,
                color=SERIES[labels.index(label) % len(SERIES)],
                label=None if label in shown else label,
            )
            shown.add(label)
        axes.set_ylabel("nats/token")
        steps_axis(axes)
        legend(axes)
    return figure


def validation_curves(groups: Sequence[RecipeGroup], baseline: str = "bf16") -> Figure | None:
    """Validation loss by recipe, mean over the seeds that all have; below it what each differs by from
    the baseline on the same seeds, with bars from the least to the largest."""
    known = {group.label: by_seed for group in groups if (by_seed := _validation(group))}
    if not known:
        return None
    base = known.get(baseline, {})
    # The same seeds for all, or lines would differ in seeds too.
    shown = set.intersection(*(set(of) for of in known.values()))
    with styled():
        figure, (top, bottom) = new_figure(WIDTH, 5.6, 2, height_ratios=(3, 2), sharex=True)
        for index, (label, of) in enumerate(known.items()):
            colour = SERIES[index % len(SERIES)]
            style = {"color": colour, "marker": "o", "markersize": 3.5, "linewidth": 1.2}
            steps = sorted(set.intersection(*(set(curve) for curve in of.values())))
            means = [np.mean([of[seed][s] for seed in shown & of.keys() or of]) for s in steps]
            top.plot(steps, means, label=f"{label} ({len(of)})", **style)
            pairs = [(of[seed], base[seed]) for seed in of if seed in base]
            if label == baseline or not pairs:
                continue
            steps = [s for s in steps if all(s in theirs for _, theirs in pairs)]
            gaps = np.array([[100 * (a[s] / b[s] - 1) for s in steps] for a, b in pairs])
            mean = gaps.mean(axis=0)
            bars = (mean - gaps.min(axis=0), gaps.max(axis=0) - mean)
            apart = 0.008 * max(steps, default=0) * (index - len(known) / 2)
            bottom.errorbar(np.array(steps) + apart, mean, yerr=bars, capsize=2, **style)
        bottom.axhline(0, color=QUIET, linewidth=0.9)
        top.set_ylabel("validation, nats/token")
        bottom.set_ylabel(f"minus {baseline}, %")
        steps_axis(bottom)
        legend(top, columns=3)
    return figure


def _validation(group: RecipeGroup) -> dict[int, dict[int, float]]:
    """seed -> step -> validation loss, where finite."""
    by_seed = {}
    for row in group.rows:
        if curve := row.loss_curve.get("validation"):
            pairs = zip(curve["step"], curve["loss"], strict=True)
            by_seed[row.seed] = {step: loss for step, loss in pairs if loss is not None}
    return by_seed


def fallback_map(layers: Sequence[str], log: Sequence[Mapping[str, Any]]) -> Figure:
    """Share of elements in BF16: a panel an operand, a row a layer, a column a step or more."""
    shares = [row["elements_bf16"] for row in log]
    table = np.array(
        [[[np.nan if s is None else s for s in layer] for layer in of] for of in shares],
        dtype=float,
    )
    steps = [row["step"] for row in log]
    pieces = np.array_split(np.arange(len(log)), min(len(log), MAX_COLUMNS))
    # Rows may stand for unequal numbers of steps; the last one is taken to be as long as the one before.
    after = steps[-1] + (steps[-1] - steps[-2] if len(steps) > 1 else 1)
    edges = np.array([*(steps[piece[0]] for piece in pieces), after]) - 0.5
    with np.errstate(invalid="ignore"):
        # The largest of the steps of a column: a single fallback must stay visible.
        image = np.stack([np.fmax.reduce(table[piece], axis=0) for piece in pieces], axis=1)
    with styled():
        height = 1.2 + 0.02 * len(layers)
        figure, panels = new_figure(WIDTH, len(OPERANDS) * height, len(OPERANDS))
        rows = np.arange(len(layers) + 1) - 0.5
        look: dict[str, Any] = {"vmin": 0, "vmax": 1, "cmap": "viridis_r", "rasterized": True}
        for index, (axes, operand) in enumerate(zip(panels, OPERANDS, strict=True)):
            mesh = axes.pcolormesh(edges, rows, image[:, :, index], **look)
            axes.invert_yaxis()
            axes.set_ylabel(operand.replace("_", "\n"), rotation=0, ha="right", va="center")
            axes.grid(False)
            axes.tick_params(labelbottom=operand == OPERANDS[-1])
        panels[-1].set_xlabel("step")
        figure.colorbar(mesh, ax=panels, shrink=0.4, label="share in BF16")
    return figure
