"""One table from the JSON of a result, and notes. Everything here is a function of that JSON."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ttrain.core.options import differences
from ttrain.core.units import format_bytes, format_count

_UNBOUNDED = 1000  # columns of a file or a pipe, whose lines may be long
BUSY = 0.1  # share of all cores used by others from which on a note says so
LEFT = ("size", "precision", "contender", "basis", "bound by", "same work")  # columns of words
Values = Mapping[str, Any]

_BASES = {
    "cost model": "These times are from {model} ({name}), not from a card: there is none here. docs/planning.md tells "
    "what the model rests on.",
    "mocked board": "This is host dispatch alone on a mocked board ({name}), which computes nothing.",
    "simulator": "On a simulator, not on a card ({name}): {note}.",
}


def table(result: Values, earlier: Values | None = None) -> list[list[str]]:
    """Return a line of titles and a line per case and contender. Columns in which nothing stands are left out."""
    titles = [title for title, _ in _COLUMNS] + (["earlier ms", "x earlier"] if earlier else [])
    before = {} if earlier is None else dict(_medians(earlier))
    lines = [
        [cell(case, row) for _, cell in _COLUMNS] + (_before(case, row, before) if earlier else [])
        for case in result["cases"]
        for row in case["rows"]
    ]
    used = [column for column in range(len(titles)) if any(line[column] for line in lines)]
    return [[line[column] for column in used] for line in [titles, *lines]]


def _medians(result: Values) -> Iterator[tuple[tuple[str, str, str], float]]:
    for case in result["cases"]:
        for row in case["rows"]:
            if row["status"] == "ok" and row.get("step_ms"):
                yield (case["size"], case["precision"], row["contender"]), row["step_ms"]["median"]


def _before(case: Values, row: Values, before: Mapping[tuple[str, str, str], float]) -> list[str]:
    median, then = _median(row), before.get((case["size"], case["precision"], row["contender"]))
    return [ms(then), f"{then / median:.2f}" if then and median else ""]


def _median(row: Values) -> float | None:
    return (row.get("step_ms") or {}).get("median")


def _quartiles(case: Values, row: Values) -> str:
    steps = row.get("step_ms") or {}
    return f"{ms(steps['q1'])} – {ms(steps['q3'])}" if steps.get("q1") and steps["q1"] != steps["q3"] else ""


def _times(case: Values, row: Values) -> str:
    times = row.get("times_as_fast")
    return f"{times['ratio']:.2f}" if times else ""


def _interval(case: Values, row: Values) -> str:
    times = row.get("times_as_fast") or {}
    return f"{times['low']:.2f} – {times['high']:.2f}" if times.get("low") and times["low"] != times["high"] else ""


def _rate(case: Values, row: Values) -> str:
    speed = row.get("units_per_s")
    return f"{format_count(speed)} {case['unit']}" if speed else ""


def _seconds(key: str) -> Callable[[Values, Values], str]:
    def cell(case: Values, row: Values) -> str:
        samples = row.get(key) or []
        spread = f" ({min(samples):.1f} – {max(samples):.1f})" if len(samples) > 1 else ""
        return f"{statistics.median(samples):.1f} s{spread}" if samples else ""

    return cell


def used_bytes(row: Values) -> int | None:
    """Return the peak of later steps, or of all where only that is known, above what the process held before."""
    base, peak = row.get("base_bytes"), row.get("steady_bytes") or row.get("peak_bytes")
    return None if base is None or peak is None else int(peak - base)


def _roof(case: Values, row: Values) -> str:
    roof, median = (row.get("facts") or {}).get("roof"), _median(row)
    return percent(roof["ms"] / median) if roof and median else ""


def ms(value: float | None) -> str:
    """Return milliseconds with three digits."""
    return "" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def percent(share: float | None) -> str:
    """Return a share in percent."""
    return "" if share is None else f"{100 * share:.1f} %"


def _bytes(value: int | None) -> str:
    return "" if value is None else format_bytes(value)


def _off(expected: float | None, found: float | None) -> str:
    return f"{100 * (expected / found - 1):+.0f} %" if expected and found else ""


_COLUMNS: Sequence[tuple[str, Callable[[Values, Values], str]]] = (
    ("size", lambda case, row: case["size"]),
    ("precision", lambda case, row: case["precision"]),
    ("contender", lambda case, row: row["contender"]),
    ("basis", lambda case, row: "" if case["basis"] == "measured" else case["basis"]),
    ("ms/step", lambda case, row: ms(_median(row))),
    ("quartiles", _quartiles),
    ("x", _times),
    ("95 %", _interval),
    ("per second", _rate),
    ("TFLOP/s", lambda case, row: f"{row['flops_per_s'] / 1e12:.3g}" if row.get("flops_per_s") else ""),
    ("mfu", lambda case, row: percent(row.get("mfu"))),
    ("roof ms", lambda case, row: ms(((row.get("facts") or {}).get("roof") or {}).get("ms"))),
    ("of roof", _roof),
    ("bound by", lambda case, row: (row.get("facts") or {}).get("bound_by", "")),
    ("planned ms", lambda case, row: ms(row.get("planned_ms"))),
    ("off by", lambda case, row: _off(row.get("planned_ms"), _median(row))),
    ("cold start", _seconds("cold_s")),
    ("warm start", _seconds("warm_s")),
    ("planned memory", lambda case, row: _bytes(row.get("planned_bytes"))),
    ("memory", lambda case, row: _bytes(used_bytes(row))),
    ("off", lambda case, row: _off(row.get("planned_bytes"), used_bytes(row))),
    ("of process", lambda case, row: _bytes(row.get("peak_bytes"))),
    ("same work", lambda case, row: "yes" if row["status"] == "ok" and row.get("checked_against") else ""),
)


def notes(result: Values, earlier: Values | None = None) -> list[str]:
    """Return what a reader must know about the table, each once."""
    found = [f"{case['size']} is {case['title']}." for case in result["cases"] if case["size"] != case["title"]]
    for case in result["cases"]:
        found += _case_notes(case)
    if earlier is not None:
        pairs = differences(_machine(earlier), _machine(result))
        found += [f"{key} differs: {then} earlier, {now} now." for key, then, now in pairs]
    found += result.get("notes") or []
    if not result["complete"]:
        found.append("Interrupted: the results are partial.")
    return list(dict.fromkeys(found))


def _case_notes(case: Values) -> Iterator[str]:
    device = case["device"]
    if case["basis"] in _BASES:
        yield _BASES[case["basis"]].format(**{"model": "", "name": "", "note": "", **device})
    elif device:
        made = [str(device[key]) for key in ("hardware", "arch") if device.get(key)][:1]
        made += [f"{device['threads']} threads"] if "threads" in device else []
        made += [" ".join(device["cpu_features"])] if device.get("cpu_features") else []
        made += [f"torch {device['torch']}"] if "torch" in device else []
        yield f"{device['name']}: {', '.join(made)}."
    if case.get("others_cpu") is not None and case["others_cpu"] >= BUSY:
        yield (
            f"Other processes used {100 * case['others_cpu']:.0f} % of the CPU cores during the steps of "
            f"{case['size']} in {case['precision']}, so the times are noisy. Repeat on a quiet machine."
        )
    for row in case["rows"]:
        if row["status"] not in ("ok", "not measured"):
            why = f", {row['reason']}".rstrip(".") if row.get("reason") else ""
            yield f"{row['contender']} at {case['size']} in {case['precision']}: {row['status']}{why}."


def _machine(result: Values) -> dict[str, Any]:
    """Return what else than the program may change a time."""
    devices = [case["device"] for case in result["cases"] if case["device"]]
    return {key: result["environment"].get(key) for key in ("platform", "versions")} | {"device": devices[:1]}


def print_result(result: Values, earlier: Values | None) -> None:
    """Print the table and the notes on the standard output."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console, (titles, *lines) = Console(highlight=False), table(result, earlier)
    if not console.is_terminal:
        console = Console(highlight=False, width=_UNBOUNDED)
    shown = Table(box=box.SIMPLE_HEAD, title=f"bench={result['bench']}", title_justify="left")
    for title in titles:
        shown.add_column(title, justify="left" if title in LEFT else "right")
    ours = {row["contender"] for case in result["cases"] for row in case["rows"] if row["side"] == "ttrain"}
    groups = [tuple(line[: titles.index("contender")]) for line in lines]
    for number, line in enumerate(lines):
        last = number + 1 == len(lines) or groups[number + 1] != groups[number]
        bold = "bold" if line[titles.index("contender")] in ours else ""
        shown.add_row(*line, style=bold, end_section=last)
    console.print(shown)
    for note in notes(result, earlier):
        console.print(note, markup=False, soft_wrap=True)
