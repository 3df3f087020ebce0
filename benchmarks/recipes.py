"""Runs a recipe to its end, keeps its result, and writes the table of results in the README.

    python -m benchmarks.recipes char-0.8m data.path=<text>
    python -m benchmarks.recipes

The first runs the command `python -m ttrain recipe=char-0.8m data.path=<text>`. `results/recipes/NAME.json` holds what
the table shows, `NAME.jsonl` all evaluations and some fifty lines of training. The second only writes the table.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ttrain.core.units import format_count, format_duration

ROOT = Path(__file__).resolve().parent
RESULTS, README = ROOT / "results" / "recipes", ROOT.parent / "README.md"
BEGIN, END = "<!-- recipes -->\n", "<!-- /recipes -->"
TITLES = ("recipe", "parameters", "tokens", "time", "val loss", "bits per byte", "command", "commit")
LINES = 50  # of training that are kept


def main(arguments: Sequence[str]) -> None:
    """Run the recipe that is named first, if one is, with overrides that follow; then write the table."""
    if arguments:
        name, *overrides = arguments
        with tempfile.TemporaryDirectory() as folder:
            given = ["-m", "ttrain", f"recipe={name}", *overrides]
            began = time.perf_counter()
            if code := subprocess.call([sys.executable, *given, f"run.dir={folder}/run"]):
                sys.exit(code)
            keep(name, " ".join(["python", *given]), Path(folder, "run"), time.perf_counter() - began)
    README.write_text(written(README.read_text("utf-8")), "utf-8")


def keep(name: str, command: str, run: Path, seconds: float) -> None:
    """Write the result of a run of some seconds, from its folder."""
    summary = json.loads((run / "summary.json").read_text("utf-8"))
    attempt = json.loads((run / "run.json").read_text("utf-8"))["attempts"][-1]
    device = attempt["device"]
    machine = [device.get("hardware", device["name"]), *device.get("cpu_features", ())]
    result = {
        **{key: summary.get(key) for key in ("parameters", "tokens", "val/loss", "val/bits_per_byte")},
        "command": command,
        "seconds": round(seconds, 1),
        "machine": " ".join([f"{attempt['cores']['physical']} cores,", *machine]),
        "commit": (attempt.get("git") or {}).get("commit"),
        "started": attempt["started"],
        "versions": attempt["versions"],
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n", "utf-8")
    lines = (run / "metrics.jsonl").read_text("utf-8").splitlines(keepends=True)
    (RESULTS / f"{name}.jsonl").write_text("".join(thinned(lines)), "utf-8")


def thinned(lines: Sequence[str]) -> Iterator[str]:
    """Yield the lines of evaluations, and of the others some that lie evenly, the last with them."""
    training = [number for number, line in enumerate(lines) if "train/loss" in json.loads(line)]
    every = max(1, -(-len(training) // LINES))
    left_out = set(training) - set(training[::-1][::every])
    yield from (line for number, line in enumerate(lines) if number not in left_out)


def written(page: str) -> str:
    """Return a page with the table between its marks made anew."""
    before, _, rest = page.partition(BEGIN)
    results = {file.stem: json.loads(file.read_text("utf-8")) for file in sorted(RESULTS.glob("*.json"))}
    rows = [TITLES, ("---", *["---:"] * 5, "---", "---"), *(_row(*each) for each in results.items())]
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    origins = dict.fromkeys(f"{each['machine']}, {each['started'][:10]}" for each in results.values())
    return f"{before}{BEGIN}\n{table}\nMachine and day: {'; '.join(origins)}.\n\n{END}{rest.partition(END)[2]}"


def _row(name: str, result: Mapping[str, Any]) -> tuple[str, ...]:
    bits = result["val/bits_per_byte"]
    return (
        f"[{name}](benchmarks/results/recipes/{name}.jsonl)",
        format_count(result["parameters"]),
        format_count(result["tokens"]),
        format_duration(result["seconds"]),
        f"{result['val/loss']:.4f}",
        "" if bits is None else f"{bits:.3f}",
        f"`{result['command']}`",
        result["commit"][:8],
    )


if __name__ == "__main__":
    main(sys.argv[1:])
