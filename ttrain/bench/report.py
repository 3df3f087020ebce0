"""A result for people: tables on the terminal and in Markdown, notes, a plot."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ttrain.bench.results import BASELINE_SIDE, Earlier, JobResult, Result, Row
from ttrain.core.units import format_bytes, format_count

_WIDTH = 120  # of tables that go to a file or a pipe
BUSY = 0.1  # share of all cores used by others from which on a note says so
_COLORS = {BASELINE_SIDE: "#ee6677", "ttrain": "#4477aa"}


def speed_table(job: JobResult, earlier: Earlier | None) -> list[list[str]]:
    """Step times: a line of titles and one per contender. `x` is how many times as fast as the best of PyTorch."""
    titles = ["contender", "ms/step", "quartiles", "x", "95 %", f"{job.item}/s", "mfu"]
    lines = [[*titles, *(["earlier ms", "x earlier"] if earlier else []), "same work"]]
    for row in job.rows.values():
        times, steps, speed, mfu = job.ratio(row, job.best_baseline), row.spread, job.per_second(row), job.mfu(row)
        line = [
            row.contender,
            _ms(steps.median) if steps else "",
            f"{_ms(steps.q1)} – {_ms(steps.q3)}" if steps else "",
            f"{times.ratio:.2f}" if times else "",
            f"{times.low:.2f} – {times.high:.2f}" if times and row is not job.best_baseline else "",
            format_count(speed) if speed else "",
            f"{100 * mfu:.1f} %" if mfu else "",
        ]
        before = earlier.find(job, row) if earlier else None
        if earlier:
            faster = f"{before.median / steps.median:.2f}" if before and steps else ""
            line += [_ms(before.median) if before else "", faster]
        lines.append([*line, "yes" if row.status == "ok" else row.status])
    return lines


def ratio_table(job: JobResult) -> list[list[str]]:
    """Ours in lines, everybody in columns: how many times as fast, with the interval of 95 %."""
    timed = [row for row in job.rows.values() if row.timed]
    ours = [row for row in timed if row.side != BASELINE_SIDE]
    lines = [["times as fast as", *(row.contender for row in timed)]]
    for row in ours:
        found = [None if other is row else job.ratio(row, other) for other in timed]
        cells = [f"{times.ratio:.2f} ({times.low:.2f} – {times.high:.2f})" if times else "" for times in found]
        lines.append([row.contender, *cells])
    return lines if ours and len(timed) > 1 else []


def start_table(job: JobResult) -> list[list[str]]:
    """Starts and memory, from a process per contender; empty where that was left out."""
    lines = [["contender", "cold start", "warm start", "peak memory", "above imports", "after first step"]]
    for row in job.rows.values():
        if row.peak_bytes is None or row.base_bytes is None:
            continue
        lines.append(
            [
                row.contender,
                "" if row.cold_s is None else f"{row.cold_s:.1f} s",
                "" if row.warm_s is None else f"{row.warm_s:.1f} s",
                format_bytes(row.peak_bytes),
                format_bytes(row.peak_bytes - row.base_bytes),
                "" if row.steady_bytes is None else format_bytes(row.steady_bytes),
            ]
        )
    return lines if len(lines) > 1 else []


def _verdict(row: Row) -> str:
    """Why there is nothing to compare."""
    return f"{row.contender}: {row.status}" + (f", {row.reason}" if row.reason else "").rstrip(".") + "."


def notes(result: Result, job: JobResult, earlier: Earlier | None) -> Iterator[str]:
    """What a reader must know about a job's table."""
    device = job.device
    if device:
        threads = f"{device['threads']} thread{'s' if device['threads'] > 1 else ''}"
        yield f"{device['name']}: {device['hardware']}, {threads}, torch {device['torch']}."
    if job.others_cpu is not None and job.others_cpu >= BUSY:
        yield (
            f"Other processes used {100 * job.others_cpu:.0f} % of the CPU cores during the interleaved steps, so the "
            "times are noisy. Repeat on a quiet machine."
        )
    for row in job.rows.values():
        if row.status not in ("ok", "not measured"):
            yield _verdict(row)
    if earlier:
        yield f"Compared with {earlier.path}."
        yield from _differences(result, job, earlier)
    if not result.complete:
        yield "Interrupted: the results are partial."


def _differences(result: Result, job: JobResult, earlier: Earlier) -> Iterator[str]:
    """What else differs from the earlier result, so that a changed time is not taken for a changed program."""
    before, now = earlier.environment, result.environment
    for key in ("platform", "versions"):
        if before.get(key) != now.get(key):
            yield f"{key} differ: {before.get(key)} earlier, {now.get(key)} now."
    then = before.get("device") or {}
    for key in ("hardware", "threads"):
        if then.get(key) != job.device.get(key):
            yield f"{key} differ: {then.get(key)} earlier, {job.device.get(key)} now."


def print_result(result: Result, earlier: Earlier | None, folder: Path) -> None:
    """Tables and notes on the standard output."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH)
    for job in result.jobs:
        console.print(escape(f"{job.title}, {job.precision}"), style="bold", soft_wrap=True)
        for lines in _tables(job, earlier):
            console.print(_rich_table(lines, job))
            console.print()
        for note in notes(result, job, earlier):
            console.print(escape(note), soft_wrap=True)
        console.print()
    console.print(f"results: {escape(str(folder))}", soft_wrap=True)
    file = escape(shlex.quote(str(folder / "results.json")))
    console.print(f"compare a later run with it: bench.compare={file}", soft_wrap=True)


def _tables(job: JobResult, earlier: Earlier | None) -> list[list[list[str]]]:
    """Those that have something to say."""
    return [lines for lines in (speed_table(job, earlier), ratio_table(job), start_table(job)) if lines]


def _rich_table(lines: Sequence[Sequence[str]], job: JobResult) -> Any:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE, padding=(0, 1), show_edge=False)
    for number, title in enumerate(lines[0]):
        left = number == 0 or title == "same work"
        table.add_column(escape(title), justify="left" if left else "right", no_wrap=number == 0)
    for line in lines[1:]:
        table.add_row(*map(escape, line), style="bold" if job.rows[line[0]].side == "ttrain" else None)
    return table


def markdown(result: Result, earlier: Earlier | None) -> str:
    """The same as Markdown, for the docs."""
    parts = [f"    {result.environment['command']}"]
    for job in result.jobs:
        parts.append(f"**{job.title}, {job.precision}**")
        parts += map(_markdown_table, _tables(job, earlier))
        parts.append("\n".join(f"- {note}" for note in notes(result, job, earlier)))
    return "\n\n".join(filter(None, parts)) + "\n"


def _markdown_table(lines: Sequence[Sequence[str]]) -> str:
    rows = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    rule = "| --- " + "| ---: " * (len(lines[0]) - 1) + "|"
    return "\n".join([rows[0], rule, *rows[1:]])


def draw(result: Result, image: Path) -> str | None:
    """Step times as bars with quartiles into a PNG. Returns why there is none, or None."""
    jobs = [job for job in result.jobs if any(row.round_ms for row in job.rows.values())]
    if not jobs:
        return "nothing was timed"
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return "matplotlib is not installed"
    rows_most = max(len(job.rows) for job in jobs)
    figure = Figure(figsize=(7.5, len(jobs) * (0.9 + 0.36 * rows_most)), layout="constrained")
    for axes, job in zip(figure.subplots(len(jobs), squeeze=False)[:, 0], jobs, strict=True):
        _draw_job(axes, job)
    FigureCanvasAgg(figure)
    figure.savefig(image, dpi=120)
    return None


def _draw_job(axes: Any, job: JobResult) -> None:
    timed = [(row, row.spread) for row in job.rows.values() if row.spread]
    places = range(len(timed))
    medians = [steps.median for _, steps in timed]
    whiskers = [[steps.median - steps.q1 for _, steps in timed], [steps.q3 - steps.median for _, steps in timed]]
    axes.barh(places, medians, color=[_COLORS[row.side] for row, _ in timed], xerr=whiskers, ecolor="gray", capsize=3)
    axes.set_yticks(places, [row.contender + ("" if row.timed else " (invalid)") for row, _ in timed])
    axes.invert_yaxis()
    for place, (row, steps) in zip(places, timed, strict=True):
        times = job.ratio(row, job.best_baseline)
        label = f" {_ms(steps.median)} ms" + (f", {times.ratio:.2f}x" if times else "")
        axes.text(steps.q3, place, label, va="center")
    axes.set_xlim(0, 1.35 * max(steps.q3 for _, steps in timed))
    axes.set_xlabel("ms per step: median and quartiles over rounds; x: times as fast as the best of PyTorch")
    axes.set_title(f"{job.title}, {job.precision}", fontsize=10)


def _ms(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"
