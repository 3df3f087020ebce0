"""The files of a benchmark's results."""

from __future__ import annotations

from pathlib import Path

from ttrain.bench.plot import draw
from ttrain.bench.report import markdown
from ttrain.bench.results import Earlier, Result
from ttrain.core.files import replace_file, to_json
from ttrain.train.runs.results_folder import RESULTS

ROOT = Path("outputs/bench")


def save(result: Result, folder: Path, earlier: Earlier | None = None) -> None:
    """results.json, results.csv and results.md, each replaced in one step."""
    replace_file(folder / RESULTS, to_json(result.to_dict()))
    replace_file(folder / "results.csv", result.to_csv())
    mark = f"<!-- bench:{result.mark} -->\n" if result.mark else ""
    replace_file(folder / "results.md", mark + markdown(result, earlier))


def save_plot(result: Result, folder: Path) -> str | None:
    """plot.png; why there is none, or None."""
    return draw(result, folder / "plot.png")
