"""task=runs: list the runs below a folder, with the state of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ttrain.config.schema import Config
from ttrain.core.errors import UserError
from ttrain.core.tables import fitted, window
from ttrain.core.units import format_count
from ttrain.core.waiting import waited_for
from ttrain.train.runs.run_directory import RunInfo, find_runs, read_run


def run(config: Config) -> dict[str, Any]:
    """Prints one line per run below `runs.root`, the newest last, or for run.dir alone where that is given.

    Returns the same as values. Raises UserError where there is no such folder.
    """
    key, root = ("run.dir", config.run.dir) if config.run.dir else ("runs.root", config.runs.root)
    if not Path(root).is_dir():
        raise UserError(f"{key}={root}: there is no such folder. Give the folder that holds your runs.")
    found = [read_run(path) for path in waited_for(find_runs(Path(root)), "Reading runs")]
    wanted = config.runs.state
    shown = [info for info in found if wanted in (None, info.state)]
    if not shown:
        print(f"No {wanted or ''} runs below {root}.".replace("  ", " "))
    else:
        _print(shown)
    return {"runs": [_values(info) for info in shown]}


def _values(info: RunInfo) -> dict[str, Any]:
    return {
        **{key: getattr(info, key) for key in ("state", "model", "step", "steps", "tokens_per_s", "checkpoint")},
        **{key: info.newest(key) for key in ("train/loss", "val/loss")},
        "run": str(info.path), "caution": info.caution, "reason": info.reason,
        "updated": None if info.updated is None else info.updated.astimezone().isoformat(timespec="seconds"),
    }  # fmt: skip


def _print(runs: list[RunInfo]) -> None:
    rows = [["run", "state", "model", "step", "train/loss", "val/loss", "tokens/s", "checkpoint", "updated", "note"]]
    for info in runs:
        rows.append([
            str(info.path), info.state, info.model, f"{info.step}/{info.steps}" if info.steps else str(info.step),
            info.shown("train/loss"), info.shown("val/loss"),
            "" if info.tokens_per_s is None else format_count(info.tokens_per_s),
            "none" if info.checkpoint is None else str(info.checkpoint),
            "" if info.updated is None else info.updated.strftime("%Y-%m-%d %H:%M:%S"),
            ". ".join(filter(None, [info.caution, (info.reason.splitlines() or [""])[0]]))[:160],
        ])  # fmt: skip
    print(*fitted(rows, window(), range(len(rows[0]))), sep="\n")
