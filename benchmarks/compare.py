"""Compares two results.json of task=bench: `python -m benchmarks.compare EARLIER.json LATER.json`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ttrain.bench.report import ms
from ttrain.bench.results import FORMAT
from ttrain.core.options import differences
from ttrain.core.tables import Table, plain_table


def read(path: str) -> dict[str, Any]:
    """Return a result. Ends the program where the file is none."""
    try:
        values: dict[str, Any] = json.loads(Path(path).read_text("utf-8"))
        form = values["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{path} is no results.json of task=bench: {error}") from None
    if form != FORMAT:
        raise SystemExit(f"{path} has format {form}, this program reads {FORMAT}. Measure again.")
    return values


def medians(result: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield size, precision and contender in words, and the median step time of who did the work."""
    for case in result["cases"]:
        for row in case["rows"]:
            if row["status"] == "ok" and row.get("step_ms"):
                yield f"{case['size']} {case['precision']} {row['contender']}", row["step_ms"]["median"]


def compared(earlier: dict[str, Any], later: dict[str, Any]) -> Table:
    """Return a line for each contender of both results, and what else than the program may have changed a time."""
    before = dict(medians(earlier))
    rows = [
        (name, ms(before[name]), ms(now), f"{before[name] / now:.2f}") for name, now in medians(later) if name in before
    ]
    pairs = differences(machine(earlier), machine(later))
    notes = tuple(f"{key} differs: {then} earlier, {now} later." for key, then, now in pairs)
    return Table("Milliseconds per step", ("contender", "earlier", "later", "x earlier"), rows, notes)


def machine(result: dict[str, Any]) -> dict[str, Any]:
    """Return the machine of a result and its programs."""
    device = next((case["device"] for case in result["cases"] if case["device"]), {})
    return {**{key: result["environment"].get(key) for key in ("platform", "versions")}, "device": device}


if __name__ == "__main__":
    print(plain_table(compared(*map(read, sys.argv[1:3]))))
