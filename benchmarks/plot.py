"""Draws the step times of a results.json of task=bench: `python -m benchmarks.plot RESULTS.json PICTURE.svg`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ttrain.bench.report import ms

COLORS = {"PyTorch": "#ee6677", "ttrain": "#4477aa"}


def draw(result: dict[str, Any], picture: Path) -> None:
    """Write a picture with a bar per contender, median and quartiles, in a part for each size and precision."""
    from matplotlib.figure import Figure

    cases = [(case, [row for row in case["rows"] if row.get("step_ms")]) for case in result["cases"]]
    cases = [(case, rows) for case, rows in cases if rows]
    if not cases:
        raise SystemExit("nothing was timed")
    figure = Figure(figsize=(7.5, sum(0.9 + 0.36 * len(rows) for _, rows in cases)), layout="constrained")
    for axes, (case, rows) in zip(figure.subplots(len(cases), squeeze=False)[:, 0], cases, strict=True):
        steps = [row["step_ms"] for row in rows]
        medians = [each["median"] for each in steps]
        whiskers = [[each["median"] - each.get("q1", each["median"]) for each in steps],
                    [each.get("q3", each["median"]) - each["median"] for each in steps]]  # fmt: skip
        axes.barh(range(len(rows)), medians, color=[COLORS[row["side"]] for row in rows], xerr=whiskers, capsize=3)
        axes.set_yticks(range(len(rows)), [row["contender"] for row in rows])
        axes.invert_yaxis()
        for place, (row, median) in enumerate(zip(rows, medians, strict=True)):
            times = row.get("times_as_fast")
            axes.text(median, place, f"  {ms(median)} ms" + (f", {times['ratio']:.2f}x" if times else ""), va="center")
        axes.set_xlim(0, 1.45 * max(medians))
        axes.set_xlabel("ms per step" + ("" if case["basis"] == "measured" else f", {case['basis']}"))
        axes.set_title(f"{case['title']}, {case['precision']}", fontsize=10)
    figure.savefig(picture, dpi=120)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text("utf-8")), Path(sys.argv[2]))
