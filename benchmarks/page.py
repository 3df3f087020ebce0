"""Writes the tables of docs/performance.md from the results in benchmarks/results: `python -m benchmarks.page`.

A table stands between `<!-- table FILES: COLUMNS -->` and `<!-- /table -->`. FILES are results.json files of task=bench
without their ending. COLUMNS are titles of the table that task=bench prints, with commas between them. With `contender`
among them each contender has a line. Without it each has a column, which shows the first title and others in brackets.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ttrain.bench.report import table

ROOT = Path(__file__).resolve().parent
PAGE, RESULTS = ROOT.parent / "docs" / "performance.md", ROOT / "results"
LEFT = ("size", "precision", "contender", "basis", "bound by", "same work")  # columns of words
MARK = re.compile(r"(<!-- table ([\w ]+): ([^>]+) -->\n).*?(<!-- /table -->)", re.DOTALL)


def written(page: str) -> str:
    """Return a page with its tables made anew. Below a table stands where its results are from, once for each file."""
    seen: set[str] = set()

    def made(found: re.Match[str]) -> str:
        names = found[2].split()
        origins = [_origin(result_of(name)) for name in names if name not in seen]
        seen.update(names)
        lines = [*_markdown(_table(names, found[3].split(", "))), *(["", *origins] if origins else [])]
        return "\n".join([found[1], *lines, "", found[4]])

    return MARK.sub(made, page)


def result_of(name: str) -> dict[str, Any]:
    """Return the result of a file."""
    values: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
    return values


def _table(names: list[str], columns: list[str]) -> list[list[str]]:
    rows = [
        dict(zip(titles, line, strict=True)) for titles, *lines in map(_lines, map(result_of, names)) for line in lines
    ]
    if columns == ["all"]:
        return [list(rows[0]), *(list(row.values()) for row in rows)]
    if "contender" in columns:
        return [columns, *([row.get(title, "") for title in columns] for row in rows)]
    return _by_contender(rows, columns)


def _lines(result: dict[str, Any]) -> list[list[str]]:
    return result["lines"] if "lines" in result else table(result)


def _by_contender(rows: list[dict[str, str]], columns: list[str]) -> list[list[str]]:
    """Return a line per size and precision with a column for each contender: the first title, others in brackets."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        first, *others = (row.get(title, "") for title in columns)
        more = ", ".join(filter(None, others))
        text = f"{first} ({more})" if first and more else first or more
        cells.setdefault((row["size"], row["precision"]), {})[row["contender"]] = text
    everybody = dict.fromkeys(row["contender"] for row in rows)
    names = [name for name in everybody if any(found.get(name) for found in cells.values())]
    return [
        ["size", "precision", *names],
        *([*case, *(found.get(n, "") for n in names)] for case, found in cells.items()),
    ]


def _markdown(lines: list[list[str]]) -> list[str]:
    rule = [":---" if title in LEFT else "---:" for title in lines[0]]
    return [f"| {' | '.join(line)} |" for line in [lines[0], rule, *lines[1:]]]


def _origin(result: dict[str, Any]) -> str:
    """Return where a result is from: command, day and machine, and its notes."""
    device, environment = result["cases"][0]["device"], result["environment"]
    where = {"cpu": "", "cuda": f", {device['hardware']}"} if "hardware" in device else {}
    told = f"- `{environment['command']}`, {environment['started'][:10]}{where.get(device['name'], '')}."
    return " ".join([told, *result["notes"]])


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text("utf-8")), "utf-8")
