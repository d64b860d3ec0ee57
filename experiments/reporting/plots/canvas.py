"""What every picture has in common: style, figures, axes, and figures as data URIs.

This is the one file that loads matplotlib, and only when something is drawn. No pyplot, so no global
state. Each series has a mark or a line style of its own beside its colour.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np

from ..colours import GRID, INK, QUIET

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 5.6
"""Inches; two pictures stand side by side on a page, so text must stay readable at half its width."""
Series = Mapping[str, np.ndarray]
_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "axes.edgecolor": QUIET,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "text.parse_math": False,  # a `$` in a label is a dollar sign
    "legend.frameon": False,
    "legend.markerscale": 1.2,
    "svg.hashsalt": "dmx",  # the same record gives the same bytes
    "figure.facecolor": "white",
}


def styled() -> AbstractContextManager[None]:
    """The style that pictures are drawn in, for a `with` block."""
    import matplotlib

    return matplotlib.rc_context(_STYLE)


def new_figure(
    width: float, height: float, rows: int = 1, columns: int = 1, **options: Any
) -> tuple[Figure, Any]:
    """A figure of so many inches, and its axes (one, or an array of them)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, **options)


def figure_uri(figure: Figure, kind: str = "svg") -> str:
    """`data:` URI of the figure, as svg or as png (for thousands of line segments)."""
    buffer = io.BytesIO()
    with styled():
        metadata: dict[str, Any] = {"Date": None} if kind == "svg" else {}
        figure.savefig(buffer, format=kind, metadata=metadata, dpi=72 if kind == "svg" else 160)
    mime = "image/svg+xml" if kind == "svg" else "image/png"
    return f"data:{mime};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def png(figure: Figure) -> bytes:
    """The figure as a file for a result page."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, bbox_inches="tight")
    return buffer.getvalue()


def legend(axes: Axes, handles: Sequence[Any] | None = None, columns: int = 4) -> None:
    """Above the axes, where it cannot cover data."""
    given = {"handles": handles} if handles is not None else {}
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=columns,
        borderaxespad=0.3,
        handlelength=1.8,
        columnspacing=1.4,
        **given,
    )


def log_axis(axes: Axes, low: float, high: float, *, which: str = "y") -> None:
    """Logarithmic, with plain numbers, dense enough for ranges of less than a decade.

    Args:
        which: x | y
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    subs = (1, 2, 3, 5) if high / low < 100 else (1,)
    axis.set_major_locator(LogLocator(base=10, subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def steps_axis(axes: Axes) -> None:
    """x counts steps."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.01)
