"""events.jsonl: what happened to a run, one JSON object per line, appended and never rewritten.

Every attempt, restart, failed save, skipped step and rollback has a line with the time, the kind, a message for people,
and the step where there is one. The processes that watch a run append to the same file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partialmethod
from pathlib import Path
from typing import Any

from ttrain.train.logging.metrics import read_lines

EVENTS = "events.jsonl"

Event = dict[str, Any]


class Events:
    """Appends to the events of a run. A line that can't be written is lost, never the run."""

    def __init__(self, run: Path | None, say: Callable[[str], None] = lambda message: None) -> None:
        """Append to the events of `run`, or nowhere where it is None. `say` shows a message to the user."""
        self._path, self._say = None if run is None else run / EVENTS, say

    def tell(self, kind: str, message: str, step: int | None = None, mark: str = "", **facts: Any) -> None:
        """Add a line, and show its message."""
        self.add(kind, message, step, **facts)
        self._say(mark + message)

    warn = partialmethod(tell, mark="WARNING: ")

    def add(self, kind: str, message: str, step: int | None = None, **facts: Any) -> None:
        """Add a line; `facts` are further JSON values."""
        event: Event = {"time": datetime.now().astimezone().isoformat(timespec="seconds"), "kind": kind}
        event |= ({} if step is None else {"step": step}) | {"message": message} | facts
        if self._path is None:
            return
        try:
            with open(self._path, "a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(json.dumps(event, ensure_ascii=False) + "\n")
        except OSError:
            return


def read_events(run: Path) -> Iterator[Event]:
    """Yield every complete line of a run's events."""
    lines = read_lines(run / EVENTS)
    return (event for _, event in lines if isinstance(event, dict) and isinstance(event.get("kind"), str))
