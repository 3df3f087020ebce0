"""A result as one table and notes. Everything here is a function of the result's JSON."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ttrain.core.tables import Table, plain_table
from ttrain.core.units import format_bytes, format_count

BUSY = 0.1  # share of all cores used by others from which on a note says so
Values = Mapping[str, Any]

_BASES = {
    "cost model": "There is no card here ({name}). These times are from {model}.",
    "mocked board": "This is host dispatch alone on a mocked board ({name}), which computes nothing.",
    "simulator": "On a simulator, not on a card ({name}): {note}.",
}


def table(result: Values) -> list[list[str]]:
    """Return a line of titles and a line per case and contender. Columns in which nothing stands are left out."""
    rows = [_cells(case, row) for case in result["cases"] for row in case["rows"]]
    titles = [title for title in rows[0] if any(row[title] for row in rows)] if rows else []
    return [titles, *([row[title] for title in titles] for row in rows)]


def _span(low: float | None, high: float | None, form: Callable[[float], str]) -> str:
    return f"{form(low)} – {form(high)}" if low and high and low != high else ""


def _told(value: Any, form: Callable[[Any], str]) -> str:
    return "" if value is None else form(value)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _seconds(samples: Sequence[float] | None) -> str:
    if not samples:
        return ""
    spread = f" ({min(samples):.1f} – {max(samples):.1f})" if len(samples) > 1 else ""
    return f"{statistics.median(samples):.1f} s{spread}"


def ms(value: float | None) -> str:
    """Return milliseconds with three digits."""
    return "" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _cells(case: Values, row: Values) -> dict[str, str]:
    """Return the cells of a contender at a case by the titles of their columns."""
    steps, times, facts = (row.get(key) or {} for key in ("step_ms", "times_as_fast", "facts"))
    median, speed, roof = steps.get("median"), row.get("units_per_s"), facts.get("roof_ms")
    return {
        "size": case["size"],
        "precision": case["precision"],
        "contender": row["contender"],
        "basis": "" if case["basis"] == "measured" else case["basis"],
        "ms/step": ms(median),
        "quartiles": _span(steps.get("q1"), steps.get("q3"), ms),
        "x": _told(times.get("ratio"), "{:.2f}".format),
        "95 %": _span(times.get("low"), times.get("high"), "{:.2f}".format),
        "per second": f"{format_count(speed)} {case['unit']}" if speed else "",
        "TFLOP/s": f"{row['flops_per_s'] / 1e12:.3g}" if row.get("flops_per_s") else "",
        "mfu": _told(row.get("mfu"), _percent),
        "of roof": _percent(roof / median) if roof and median else "",
        "bound by": facts.get("bound_by") or "",
        "planned ms": ms(row.get("planned_ms")),
        "cold start": _seconds(row.get("cold_s")),
        "warm start": _seconds(row.get("warm_s")),
        "planned memory": _told(row.get("planned_bytes"), format_bytes),
        "memory": _told(row.get("used_bytes"), format_bytes),
        "of process": _told(row.get("peak_bytes"), format_bytes),
        "same work": "yes" if row["status"] == "ok" and row.get("checked_against") else "",
    }


def notes(result: Values) -> list[str]:
    """Return what a reader must know about the table, each once."""
    found = [f"{case['size']} is {case['title']}." for case in result["cases"] if case["size"] != case["title"]]
    for case in result["cases"]:
        found += _case_notes(case)
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


def print_result(result: Values) -> None:
    """Print the table and the notes on the standard output."""
    titles, *lines = [[" ".join(line[:3]), *line[3:]] for line in table(result)]  # size, precision and contender
    print(plain_table(Table(f"bench={result['bench']}", tuple(titles), [tuple(line) for line in lines])))
    print(*notes(result), sep="\n")
