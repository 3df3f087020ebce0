"""What a benchmark shows while it runs: one line per finished stage, and on a terminal a bar for the present one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ttrain.core.units import format_duration


class Stage:
    """One stage that is under way."""

    def __init__(self, bar: Any, task: Any) -> None:
        self._bar, self._task = bar, task
        self.outcome = ""

    def tell(self, what: str, fraction: float | None = None) -> None:
        """Show what happens now, and how much of the stage is done."""
        self._bar.update(self._task, what=what, total=None if fraction is None else 1.0, completed=fraction or 0.0)

    def done(self, outcome: str) -> None:
        """What the line of the finished stage says."""
        self.outcome = outcome


class Progress:
    """Prints to the standard error stream, so that a table can be piped on."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(stderr=True, highlight=False)

    @contextmanager
    def stage(self, label: str) -> Iterator[Stage]:
        """Show a stage while it runs and a line about it afterwards."""
        from rich.markup import escape
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        started = time.monotonic()
        what = TextColumn("{task.fields[what]}")
        columns = (TextColumn("{task.description}"), BarColumn(), what, TimeElapsedColumn())
        with Bar(*columns, console=self._console, transient=True, disable=not self._console.is_terminal) as bar:
            stage = Stage(bar, bar.add_task(escape(label), total=None, what=""))
            yield stage
        line = f"{label}: {stage.outcome}" if stage.outcome else label
        self._console.print(f"{escape(line)} ({format_duration(time.monotonic() - started)})", soft_wrap=True)
