"""Charts of curves by matplotlib: files, and SVG that a page holds, readable in light and dark ones."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

# Colours that stay apart for people who see colours differently (P. Tol, "bright").
COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#888888")
_INK = "#010203"  # stands for the colour of the page's text
_STYLE: Any = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
    "svg.fonttype": "none",
    "svg.hashsalt": "ttrain",
    "text.parse_math": False,
    "font.family": "sans-serif",
}
_SMOOTHED = 20  # parts of a curve, each as long as the window of its trend
_FEWEST = 3 * _SMOOTHED  # points that show a trend of their own

Point = tuple[float | str, float]  # a text is a category


@dataclass(frozen=True)
class Series:
    """One curve, or a cloud of points where `line` is false; a `noisy` curve has its trend drawn over it."""

    label: str
    points: Sequence[Point]
    line: bool = True
    markers: bool = False
    dashed: bool = False
    noisy: bool = False


def smoothed(values: Sequence[float], size: int) -> list[float]:
    """Return each value averaged with the `size` - 1 before and after it, which weigh less the farther they are."""
    size = min(size, (len(values) + 1) // 2)
    kernel = np.concatenate([np.arange(1, size + 1), np.arange(size - 1, 0, -1)])
    weights = np.convolve(np.ones(len(values)), kernel, "same")
    return list((np.convolve(values, kernel, "same") / weights).tolist())


def window(count: int) -> int:
    """Return the `size` to smooth so many values with."""
    return max(2, count // _SMOOTHED)


def new_figure(width: float = 7, height: float = 4) -> tuple[Any, Any]:
    """Return a figure of so many inches, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def draw(axes: Any, series: Sequence[Series], log_x: bool = False) -> bool:
    """Draw curves with a legend. Return False where no point is finite; on a logarithmic axis x is above 0."""
    drawn = False
    for number, entry in enumerate(series):
        points = [point for point in entry.points if _is_shown(*point, log_x)]
        if not points:
            continue
        drawn, (xs, ys), color = True, zip(*points, strict=True), COLORS[number % len(COLORS)]
        marker = "o" if entry.markers or not entry.line or len(points) == 1 else None
        style = "none" if not entry.line else "--" if entry.dashed else "-"
        trend = entry.noisy and len(points) >= _FEWEST
        label = f"\u200b{entry.label}" if entry.label.startswith("_") else entry.label  # else it has no line there
        axes.plot(
            xs, ys, label=label, color=color, linestyle=style, marker=marker, markersize=4,
            linewidth=0.8 if trend else 1.5, alpha=0.4 if trend else 1,
        )  # fmt: skip
        if trend:
            axes.plot(xs, smoothed(ys, window(len(ys))), label=f"{label}, smoothed", color=color)
    if drawn:
        axes.legend(frameon=False, fontsize="small")
    return drawn


def _is_shown(x: float | str, y: float, log_x: bool) -> bool:
    return math.isfinite(y) and (isinstance(x, str) or (math.isfinite(x) and (x > 0 or not log_x)))


def line_chart(series: Sequence[Series], title: str, x_label: str, y_label: str, *, log_x: bool = False) -> str:
    """Return an `<svg>` element; empty text without points."""
    from matplotlib import rc_context

    with rc_context(_STYLE):
        figure, axes = new_figure(7, 3.4)
        if not draw(axes, series, log_x):
            return ""
        axes.set_title(title, loc="left", fontweight="bold")
        axes.set(xlabel=x_label, ylabel=y_label, **({"xscale": "log"} if log_x else {}))
        axes.grid(color="#888888", alpha=0.3)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    element = text.getvalue()[text.getvalue().index("<svg") :].replace(_INK, "currentColor")
    tag, _, rest = element.partition(">")
    tag = re.sub(r' (width|height)="[\d.]+pt"', "", tag)  # a page says how large it is
    return f'{tag} role="img" fill="currentColor">\n<title>{escape(title)}</title>{rest.rstrip()}'
