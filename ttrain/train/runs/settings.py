"""Small config of task=runs and task=report."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ttrain.core.options import option, rule


@dataclass
class RunsConfig:
    """Options of task=runs, which lists runs."""

    root: str = option("outputs", "folder that is searched for runs and sweeps", path=True)
    state: str | None = option(
        None,
        "list runs in this state only",
        choices=("running", "finished", "failed", "resumable", "interrupted", "dry_run", "new"),
    )


@dataclass
class ReportConfig:
    """Options of task=report. `run=<folder>,<folder>` is short for report.run=[<folder>,<folder>]."""

    run: list[str] = option([], "runs to compare side by side; one run is given as run.dir", path=True)
    out: str | None = option(None, "HTML file; null takes report.html in the run, or here for several runs", path=True)

    @rule
    def _has_a_run(self, others: Any) -> Iterator[str]:
        task, run = others.task.name, others.run.dir
        if task == "report" and not (self.run or run):
            yield "task=report: needs a run. Give run.dir=<run directory>, or run=<one>,<another> to compare."
        elif task == "report" and self.run and run:
            yield "task=report: run.dir and report.run both name runs. Give run=<one>,<another> for all of them."
        elif task != "report" and self.run and run is None:
            yield f"report.run={self.run}: task={task} takes one run. Give run.dir=<run directory>."
