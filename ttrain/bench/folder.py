"""Where a benchmark's results go."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from ttrain.bench.plot import draw
from ttrain.bench.report import markdown
from ttrain.bench.results import Earlier, Result
from ttrain.core.errors import UserError
from ttrain.core.files import replace_file, to_json

RESULTS = "results.json"
ROOT = Path("outputs/bench")


def claim(wanted: str | None, label: str, now: datetime, key: str = "bench.out", root: Path = ROOT) -> Path:
    """Makes the folder that `key` of the config names, or one below `root`.

    Raises UserError where it can't be made or holds results already.
    """
    try:
        if wanted is not None:
            folder = Path(wanted)
            folder.mkdir(parents=True, exist_ok=True)
            if (folder / RESULTS).exists():
                raise UserError(f"{key}={wanted}: holds results already. Give another folder, or move them away.")
            (folder / RESULTS).touch()  # shows now whether files can be written
            (folder / RESULTS).unlink()
            return folder
        day = root / now.strftime("%Y-%m-%d")
        day.mkdir(parents=True, exist_ok=True)
        name = f"{now.strftime('%H-%M-%S')}_{label}"
        number = 1
        while True:
            folder = day / (name if number == 1 else f"{name}_{number}")
            try:
                folder.mkdir()
            except FileExistsError:
                number += 1
                continue
            return folder
    except OSError as error:
        raise UserError(f"{key}={wanted or root}: can't be written ({error.strerror}). Give {key}=<folder>.") from error


def save(result: Result, folder: Path, earlier: Earlier | None = None) -> None:
    """results.json, results.csv and results.md, each replaced in one step."""
    replace_file(folder / RESULTS, to_json(result.to_dict()))
    replace_file(folder / "results.csv", result.to_csv())
    mark = f"<!-- bench:{result.mark} -->\n" if result.mark else ""
    replace_file(folder / "results.md", mark + markdown(result, earlier))


def save_plot(result: Result, folder: Path) -> str | None:
    """plot.png; why there is none, or None."""
    return draw(result, folder / "plot.png")
