"""Pictures of a result: bars with quartiles per case, or lines over the sizes of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ttrain.bench.results import BASELINE_SIDE, COST_MODEL, MEASURED, SIMULATED, CaseResult, Result
from ttrain.bench.tables import ms

_COLORS = {BASELINE_SIDE: "#ee6677", "ttrain": "#4477aa"}
_ORIGINS = {
    COST_MODEL: ", from the cost model, not from a card",
    SIMULATED: ", on a simulator, not on a card",
}


def draw(result: Result, image: Path) -> str | None:
    """A PNG of the step times, or of starts or memory where that is what was measured; why there is none, or None."""
    cases = [case for case in result.cases if _bars(case, result.kind)]
    if not cases:
        return "nothing was timed"
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return "matplotlib is not installed"
    if result.kind == "sweep" and len(cases) > 1:
        figure = Figure(figsize=(8, 5), layout="constrained")
        _draw_sweep(figure.subplots(), result, cases)
    else:
        rows_most = max(len(case.rows) for case in cases)
        figure = Figure(figsize=(7.5, len(cases) * (0.9 + 0.36 * rows_most)), layout="constrained")
        for axes, case in zip(figure.subplots(len(cases), squeeze=False)[:, 0], cases, strict=True):
            _draw_case(axes, case, result.kind)
    FigureCanvasAgg(figure)
    figure.savefig(image, dpi=120)
    return None


Bar = tuple[str, str, float, float, float, str]  # label, side, value, low, high, text beside it


def _bars(case: CaseResult, kind: str) -> list[Bar]:
    """What the bars of a case show."""
    bars: list[Bar] = []
    for row in case.rows.values():
        if kind == "startup" and row.warm_s is not None:
            starts = {"cold": row.cold_samples_s, "warm": row.warm_samples_s}
            for name, samples in starts.items():
                if samples:
                    value = sorted(samples)[len(samples) // 2]
                    text = f" {value:.1f} s"
                    bars.append((f"{row.contender}, {name}", row.side, value, min(samples), max(samples), text))
        elif kind == "memory" and row.used_bytes is not None:
            used = row.used_bytes / 2**20
            planned = f", planned {row.planned_bytes / 2**20:.0f}" if row.planned_bytes else ""
            bars.append((row.contender, row.side, used, used, used, f" {used:.0f} MiB{planned}"))
        elif kind not in ("startup", "memory") and (steps := row.spread):
            times = case.ratio(row, case.best_baseline)
            text = f" {ms(steps.median)} ms" + (f", {times.ratio:.2f}x" if times else "")
            name = row.contender + ("" if row.timed else " (invalid)")
            bars.append((name, row.side, steps.median, steps.q1, steps.q3, text))
    return bars


_UNITS = {
    "startup": "s until the first step: median and range of the starts",
    "memory": "MiB at the peak of steps, above what the process held before",
}


def _draw_case(axes: Any, case: CaseResult, kind: str) -> None:
    bars = _bars(case, kind)
    places = range(len(bars))
    values = [value for _, _, value, _, _, _ in bars]
    whiskers = [[v - low for _, _, v, low, _, _ in bars], [high - v for _, _, v, _, high, _ in bars]]
    axes.barh(places, values, color=[_COLORS[bar[1]] for bar in bars], xerr=whiskers, ecolor="gray", capsize=3)
    axes.set_yticks(places, [bar[0] for bar in bars])
    axes.invert_yaxis()
    for place, (*_, high, text) in zip(places, bars, strict=True):
        axes.text(high, place, text, va="center")
    axes.set_xlim(0, 1.45 * max(bar[4] for bar in bars))
    known = "ms per step: median and quartiles over rounds; x: times as fast as the best of PyTorch"
    axes.set_xlabel(_UNITS.get(kind, known if case.basis == MEASURED else "ms"))
    axes.set_title(case.heading, fontsize=10)


def _draw_sweep(axes: Any, result: Result, cases: Sequence[CaseResult]) -> None:
    """Lines over the sizes; a rate where the work is a product, since its times span too much."""
    products = cases[0].item == "products"
    precisions = list(dict.fromkeys(case.precision for case in cases))
    titles = list(dict.fromkeys(case.title for case in cases))
    for precision in precisions:
        for name in dict.fromkeys(name for case in cases for name in case.rows):
            points = []
            for case in cases:
                row = case.rows.get(name)
                if case.precision == precision and row is not None and row.timed and row.spread:
                    time = row.spread.median
                    shown = (case.flops_per_step or 0.0) / time / 1e9 if products else time
                    points.append((titles.index(case.title), shown))
            if points:
                label = f"{name}, {precision}" if len(precisions) > 1 else name
                axes.plot(*zip(*points, strict=True), marker="o", label=label)
    axes.set_yscale("log")
    axes.set_xticks(range(len(titles)), titles, rotation=60, ha="right", fontsize=8)
    axes.set_ylabel("TFLOP/s" if products else "ms per step")
    axes.set_title(f"bench={result.bench}{_ORIGINS.get(cases[0].basis, '')}", fontsize=10)
    axes.legend()
