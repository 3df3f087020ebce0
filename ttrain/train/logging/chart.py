"""Line charts as SVG text: no library, no script, readable in light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 34, 46
_MOST_POINTS = 1200
# Colours that stay apart for people who see colours differently (P. Tol, "bright").
COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#888888")

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One curve, or a cloud of points where `line` is false."""

    label: str
    points: Sequence[Point]
    line: bool = True
    markers: bool = False
    dashed: bool = False


@dataclass(frozen=True)
class _Axis:
    """Maps values to pixels."""

    low: float
    high: float
    start: float
    end: float
    log: bool

    def __call__(self, value: float) -> float:
        low, high, value = (math.log10(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (self.end - self.start) * (value - low) / ((high - low) or 1.0)

    def ticks(self) -> list[float]:
        """About five round values."""
        if self.log:
            powers = range(math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1)
            if len(powers) > 1:
                return [10.0**power for power in powers]
        raw = ((self.high - self.low) or abs(self.high) or 1.0) / 5
        size = 10.0 ** math.floor(math.log10(raw))
        size *= next(factor for factor in (1, 2, 5, 10) if factor * size >= raw)
        first = math.ceil(self.low / size - 1e-9)
        return [number * size for number in range(first, math.floor(self.high / size + 1e-9) + 1)]


def line_chart(
    series: Sequence[Series],
    title: str,
    x_label: str,
    y_label: str,
    *,
    log_x: bool = False,
    categories: Sequence[str] | None = None,
) -> str:
    """An `<svg>` element; empty text without points. With `categories`, x is the index of a point's category."""
    kept = [_finite(entry, log_x) for entry in series]
    kept = [entry for entry in kept if entry.points]
    if not kept:
        return ""
    x_axis, y_axis = _axes(kept, log_x, categories)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'font-family="sans-serif" font-size="12" fill="currentColor"><title>{escape(title)}</title>',
        f'<text x="{_LEFT}" y="16" font-size="14" font-weight="bold">{escape(title)}</text>',
        *_grid(x_axis, y_axis, x_label, y_label, categories),
    ]
    for number, entry in enumerate(kept):
        parts += _curve(entry, COLORS[number % len(COLORS)], x_axis, y_axis)
    return "\n".join([*parts, *_legend(kept), "</svg>"])


def _finite(series: Series, log_x: bool) -> Series:
    points = [(x, y) for x, y in series.points if math.isfinite(x) and math.isfinite(y) and (x > 0 or not log_x)]
    return Series(series.label, _thinned(points), series.line, series.markers, series.dashed)


def _thinned(points: Sequence[Point]) -> Sequence[Point]:
    """At most _MOST_POINTS, the lowest and highest of each group, so that no spike disappears."""
    if len(points) <= _MOST_POINTS:
        return points
    size = -(-2 * len(points) // _MOST_POINTS)
    kept: list[Point] = []
    for start in range(0, len(points), size):
        group = points[start : start + size]
        ends = {min(group, key=lambda p: p[1]), max(group, key=lambda p: p[1])}
        kept += sorted(ends)
    return kept


def _axes(series: Sequence[Series], log_x: bool, categories: Sequence[str] | None) -> tuple[_Axis, _Axis]:
    xs = [x for entry in series for x, _ in entry.points]
    ys = [y for entry in series for _, y in entry.points]
    low, high = (-0.5, len(categories) - 0.5) if categories else (min(xs), max(xs))
    if low == high and not log_x:
        low, high = low - 0.5, high + 0.5
    margin = 0.05 * ((max(ys) - min(ys)) or abs(max(ys)) or 1.0)
    x_axis = _Axis(low, high, _LEFT, WIDTH - _RIGHT, log_x and low < high)
    return x_axis, _Axis(min(ys) - margin, max(ys) + margin, HEIGHT - _BOTTOM, _TOP, False)


def _grid(x_axis: _Axis, y_axis: _Axis, x_label: str, y_label: str, categories: Sequence[str] | None) -> list[str]:
    parts = []
    names = {float(index): name for index, name in enumerate(categories or ())}
    names = names or {value: _short(value) for value in x_axis.ticks()}
    for value, name in names.items():
        x = x_axis(value)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}" stroke="#8884"/>')
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - _BOTTOM + 16}" text-anchor="middle">{escape(name)}</text>')
    for value in y_axis.ticks():
        y = y_axis(value)
        parts.append(f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#8884"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_short(value)}</text>')
    parts.append(f'<text x="{WIDTH / 2:.0f}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>')
    middle = HEIGHT / 2
    parts.append(
        f'<text x="14" y="{middle:.0f}" text-anchor="middle" transform="rotate(-90 14 {middle:.0f})">'
        f"{escape(y_label)}</text>"
    )
    return parts


def _curve(series: Series, color: str, x_axis: _Axis, y_axis: _Axis) -> list[str]:
    parts = []
    placed = [(x_axis(x), y_axis(y), x, y) for x, y in series.points]
    if series.line and len(placed) > 1:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _, _ in placed)
        dash = ' stroke-dasharray="5 4"' if series.dashed else ""
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"{dash}/>')
    if series.markers or not series.line or len(placed) == 1:
        for x, y, x_value, y_value in placed:
            label = f"{escape(series.label)}: {_short(x_value)}, {y_value:.5g}"
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"><title>{label}</title></circle>')
    return parts


def _legend(series: Sequence[Series]) -> list[str]:
    parts = []
    x = float(WIDTH - _RIGHT)
    for number, entry in reversed(list(enumerate(series))):
        x -= 7 * len(entry.label) + 26
        color = COLORS[number % len(COLORS)]
        parts.append(f'<rect x="{x:.0f}" y="{_TOP - 14}" width="12" height="4" fill="{color}"/>')
        parts.append(f'<text x="{x + 16:.0f}" y="{_TOP - 8}">{escape(entry.label)}</text>')
    return parts


def _short(value: float) -> str:
    return f"{value:.4g}"
