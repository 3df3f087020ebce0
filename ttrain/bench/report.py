"""One table from the JSON of a result, and notes. Everything here is a function of that JSON."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ttrain.core.options import differences
from ttrain.core.tables import fitted, window
from ttrain.core.units import format_bytes, format_count

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
    rows = [(case, row) for case in result["cases"] for row in case["rows"]]
    before = {} if earlier is None else dict(_medians(earlier))
    lines = [[*_cells(*both).values(), *(_before(*both, before) if earlier else [])] for both in rows]
    titles = [*(_cells(*rows[0]) if rows else ()), *(["earlier ms", "x earlier"] if earlier else [])]
    used = [column for column in range(len(titles)) if any(line[column] for line in lines)]
    return [[line[column] for column in used] for line in [titles, *lines]]


def _medians(result: Values) -> Iterator[tuple[tuple[str, str, str], float]]:
    for case in result["cases"]:
        for row in case["rows"]:
            if row["status"] == "ok" and row.get("step_ms"):
                yield (case["size"], case["precision"], row["contender"]), row["step_ms"]["median"]


def _before(case: Values, row: Values, before: Mapping[tuple[str, str, str], float]) -> list[str]:
    median, then = _at(row, "step_ms", "median"), before.get((case["size"], case["precision"], row["contender"]))
    return [ms(then), _factor(then / median if then and median else None)]


def _at(values: Any, *keys: str) -> Any:
    """Return what lies at a path of keys, None where that ends early."""
    for key in keys:
        values = (values or {}).get(key)
    return values


def _span(low: float | None, high: float | None, form: Callable[[float | None], str]) -> str:
    return f"{form(low)} – {form(high)}" if low and low != high else ""


def _factor(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _seconds(samples: Sequence[float] | None) -> str:
    if not samples:
        return ""
    spread = f" ({min(samples):.1f} – {max(samples):.1f})" if len(samples) > 1 else ""
    return f"{statistics.median(samples):.1f} s{spread}"


def used_bytes(row: Values) -> int | None:
    """Return the peak of later steps, or of all where only that is known, above what the process held before."""
    base, peak = row.get("base_bytes"), row.get("steady_bytes") or row.get("peak_bytes")
    return None if base is None or peak is None else int(peak - base)


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


def _cells(case: Values, row: Values) -> dict[str, str]:
    """Return the cells of a contender at a case by the titles of their columns."""
    steps, times, roof = row.get("step_ms") or {}, row.get("times_as_fast") or {}, _at(row, "facts", "roof", "ms")
    median, speed = steps.get("median"), row.get("units_per_s")
    return {
        "size": case["size"],
        "precision": case["precision"],
        "contender": row["contender"],
        "basis": "" if case["basis"] == "measured" else case["basis"],
        "ms/step": ms(median),
        "quartiles": _span(steps.get("q1"), steps.get("q3"), ms),
        "x": _factor(times.get("ratio")),
        "95 %": _span(times.get("low"), times.get("high"), _factor),
        "per second": f"{format_count(speed)} {case['unit']}" if speed else "",
        "TFLOP/s": f"{row['flops_per_s'] / 1e12:.3g}" if row.get("flops_per_s") else "",
        "mfu": percent(row.get("mfu")),
        "roof ms": ms(roof),
        "of roof": percent(roof / median if roof and median else None),
        "bound by": _at(row, "facts", "bound_by") or "",
        "planned ms": ms(row.get("planned_ms")),
        "off by": _off(row.get("planned_ms"), median),
        "cold start": _seconds(row.get("cold_s")),
        "warm start": _seconds(row.get("warm_s")),
        "planned memory": _bytes(row.get("planned_bytes")),
        "memory": _bytes(used_bytes(row)),
        "off": _off(row.get("planned_bytes"), used_bytes(row)),
        "of process": _bytes(row.get("peak_bytes")),
        "same work": "yes" if row["status"] == "ok" and row.get("checked_against") else "",
    }


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
    lines = [[" ".join(line[:3]), *line[3:]] for line in table(result, earlier)]  # size, precision and contender
    left = {place for place, title in enumerate(lines[0]) if title in LEFT or not place}
    print(f"bench={result['bench']}", *(line for _, line in fitted(lines, window(), left)), sep="\n")
    print("", *notes(result, earlier), sep="\n")
