"""The tables of a result: a line of titles, then lines of text. Empty where there is nothing to say."""

from __future__ import annotations

from collections.abc import Sequence

from ttrain.bench.results import BASELINE_SIDE, COST_MODEL, MOCKED, CaseResult, Earlier, Row
from ttrain.core.units import format_bytes, format_count

Lines = list[list[str]]


def tables_of(case: CaseResult, kind: str, earlier: Earlier | None) -> list[Lines]:
    """The tables of one case; `kind` is the study's."""
    if kind == "chip" or case.basis in (COST_MODEL, MOCKED):
        found = [chip_table(case, earlier)]
    elif kind == "startup":
        found = [startup_table(case)]
    elif kind == "memory":
        found = [memory_table(case), speed_table(case, earlier)]
    else:
        found = [speed_table(case, earlier), ratio_table(case), roof_table(case), start_table(case)]
    return [lines for lines in found if lines]


def speed_table(case: CaseResult, earlier: Earlier | None) -> Lines:
    """Step times, one line per contender. `x` is how many times as fast as the best of PyTorch."""
    titles = ["contender", "ms/step", "quartiles", "x", "95 %", f"{case.item}/s", "mfu"]
    lines = [[*titles, *(["earlier ms", "x earlier"] if earlier else []), "same work"]]
    for row in case.rows.values():
        times, steps, speed, mfu = case.ratio(row, case.best_baseline), row.spread, case.per_second(row), case.mfu(row)
        line = [
            row.contender,
            ms(steps.median) if steps else "",
            f"{ms(steps.q1)} – {ms(steps.q3)}" if steps else "",
            f"{times.ratio:.2f}" if times else "",
            f"{times.low:.2f} – {times.high:.2f}" if times and row is not case.best_baseline else "",
            format_count(speed) if speed else "",
            f"{100 * mfu:.1f} %" if mfu else "",
        ]
        lines.append([*line, *_before(case, row, earlier), "yes" if row.status == "ok" else row.status])
    return lines


def _before(case: CaseResult, row: Row, earlier: Earlier | None) -> list[str]:
    """Cells about an earlier result, where there is one."""
    if earlier is None:
        return []
    before, steps = earlier.find(case, row), row.spread
    return [ms(before.median) if before else "", f"{before.median / steps.median:.2f}" if before and steps else ""]


def ratio_table(case: CaseResult) -> Lines:
    """Ours in lines, everybody in columns: how many times as fast, with the interval of 95 %."""
    timed = [row for row in case.rows.values() if row.timed]
    ours = [row for row in timed if row.side != BASELINE_SIDE]
    lines = [["times as fast as", *(row.contender for row in timed)]]
    for row in ours:
        found = [None if other is row else case.ratio(row, other) for other in timed]
        cells = [f"{times.ratio:.2f} ({times.low:.2f} – {times.high:.2f})" if times else "" for times in found]
        lines.append([row.contender, *cells])
    return lines if ours and len(timed) > 1 else []


def roof_table(case: CaseResult) -> Lines:
    """A step at the machine's measured rates, beside ours: every kernel its FLOPs or bytes, whichever takes longer."""
    lines = [["at the roof", "FLOP", "by FLOP/s", "bytes", "by bytes/s", "roof ms", "ms/step", "of roof"]]
    for row in case.rows.values():
        roof, steps = row.facts.get("roof"), row.spread
        if roof and steps:
            flops, moved = format_count(roof["flops"]), format_bytes(roof["nbytes"])
            sums = flops, ms(roof["flops_ms"]), moved, ms(roof["nbytes_ms"])
            share = f"{100 * roof['ms'] / steps.median:.0f} %"
            lines.append([row.contender, *sums, ms(roof["ms"]), ms(steps.median), share])
    return lines if len(lines) > 1 else []


def start_table(case: CaseResult) -> Lines:
    """Starts and memory, from a process per contender; empty where that was left out."""
    lines = [["contender", "cold start", "warm start", "peak memory", "above imports", "after first step"]]
    for row in case.rows.values():
        if row.peak_bytes is None or row.base_bytes is None:
            continue
        lines.append(
            [
                row.contender,
                _seconds(row.cold_s),
                _seconds(row.warm_s),
                format_bytes(row.peak_bytes),
                format_bytes(row.peak_bytes - row.base_bytes),
                "" if row.steady_bytes is None else format_bytes(row.steady_bytes),
            ]
        )
    return lines if len(lines) > 1 else []


def startup_table(case: CaseResult) -> Lines:
    """Medians and ranges of repeated starts. The imports of the process come on top of each."""
    lines = [["contender", "cold start", "range", "warm start", "range", "imports", "starts"]]
    for row in case.rows.values():
        if row.warm_s is None:
            continue
        lines.append(
            [
                row.contender, _seconds(row.cold_s), _range(row.cold_samples_s), _seconds(row.warm_s),
                _range(row.warm_samples_s), _seconds(row.imports_s), str(len(row.warm_samples_s)),
            ]
        )  # fmt: skip
    return lines if len(lines) > 1 else []


def memory_table(case: CaseResult) -> Lines:
    """Planned beside measured: memory above the process's own, and the time of a step."""
    lines = [["contender", "planned", "measured", "off by", "while building", "process", "planned ms", "ms", "off by"]]
    for row in case.rows.values():
        if row.used_bytes is None or row.peak_bytes is None or row.base_bytes is None:
            continue
        planned, used, steps = row.planned_bytes, row.used_bytes, row.spread
        lines.append(
            [
                row.contender,
                "" if planned is None else format_bytes(planned),
                format_bytes(used),
                "" if planned is None else _off(planned, used),
                format_bytes(row.peak_bytes - row.base_bytes),
                format_bytes(row.peak_bytes),
                "" if row.planned_ms is None else ms(row.planned_ms),
                ms(steps.median) if steps else "",
                _off(row.planned_ms, steps.median) if row.planned_ms and steps else "",
            ]
        )
    return lines if len(lines) > 1 else []


def chip_table(case: CaseResult, earlier: Earlier | None) -> Lines:
    """Ways to use a chip: time, rate, share of the peak and what bounds it."""
    titles = ["way", "ms", f"{case.item}/s", "TFLOP/s", "of peak", "bound by"]
    lines = [[*titles, *(["earlier ms", "x earlier"] if earlier else [])]]
    for row in case.rows.values():
        steps, speed = row.spread, case.per_second(row)
        rate = case.flops_per_step / steps.median / 1e9 if steps and case.flops_per_step else None
        share = row.facts.get("of_peak", case.mfu(row))
        cells = [
            ms(steps.median) if steps else row.status,
            format_count(speed) if speed else "",
            f"{rate:.3g}" if rate else "",
            f"{100 * share:.1f} %" if share else "",
            str(row.facts.get("bound_by", "")),
        ]
        lines.append([row.contender, *cells, *_before(case, row, earlier)])
    used = [column for column in range(len(lines[0])) if any(line[column] for line in lines[1:])]
    return [[line[column] for column in used] for line in lines]


def sweep_tables(cases: Sequence[CaseResult], earlier: Earlier | None) -> list[tuple[str, Lines]]:
    """One table per precision with a line per size: milliseconds of everybody, and ours against the best of PyTorch."""
    found = []
    for precision in dict.fromkeys(case.precision for case in cases):
        chosen = [case for case in cases if case.precision == precision]
        names = list(dict.fromkeys(name for case in chosen for name in case.rows))
        ours = [name for name in names if any(case.rows[name].side == "ttrain" for case in chosen if name in case.rows)]
        products = chosen[0].item == "products"
        rates = [f"{name} TFLOP/s" for name in names] + [f"{name} of peak" for name in names] if products else []
        titles = ["size", *(f"{name} ms" for name in names), *rates, *(f"x {name}" for name in ours)]
        lines = [[*titles, *([f"{name} x earlier" for name in names] if earlier else [])]]
        lines += [_sweep_line(case, names, ours, products, earlier) for case in chosen]
        found.append((precision, lines))
    return found


def _sweep_line(
    case: CaseResult, names: Sequence[str], ours: Sequence[str], products: bool, earlier: Earlier | None
) -> list[str]:
    rows = [case.rows.get(name) or Row(name) for name in names]
    line = [case.title, *(_cell(row) for row in rows)]
    if products:
        flops = case.flops_per_step or 0.0
        line += [f"{flops / row.spread.median / 1e9:.3g}" if row.spread else "" for row in rows]
        line += [f"{100 * share:.0f} %" if (share := case.mfu(row)) else "" for row in rows]
    for name in ours:
        times = case.ratio(case.rows[name], case.best_baseline) if name in case.rows else None
        line.append(f"{times.ratio:.2f}" if times else "")
    if earlier is not None:
        line += [_before(case, row, earlier)[1] for row in rows]
    return line


def _cell(row: Row) -> str:
    return ms(row.spread.median) if row.timed and row.spread else row.status


def ms(value: float) -> str:
    """Milliseconds with three digits."""
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _off(expected: float, found: float) -> str:
    return f"{100 * (expected / found - 1):+.0f} %"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} s"


def _range(samples: Sequence[float]) -> str:
    return f"{min(samples):.1f} – {max(samples):.1f}" if samples else ""
