"""Measuring processes as their starter sees them: an order goes in, events come out one by one; and neighbours."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ttrain
from ttrain.core.units import format_duration
from ttrain.train.supervise.child import Child, describe_exit

_POLL_SECONDS = 0.05
SILENCE_SECONDS = 1200.0  # longest wait for the next event; a cold compilation is one event

Event = dict[str, Any]


class WorkerFailed(Exception):
    """A measuring process ended without finishing its order."""


def events(
    order: Mapping[str, Any],
    folder: Path,
    environment: Mapping[str, str] | None = None,
    silence: float = SILENCE_SECONDS,
) -> Iterator[Event]:
    """Start a process for an order and yield what it finds; `folder` takes its files.

    The process is ended when the iterator is closed. Raises WorkerFailed where it dies or says nothing for too long.
    """
    folder.mkdir(parents=True)
    child, events_file, log = _started(order, folder, environment)
    try:
        yield from _follow(child, events_file, silence)
        code = child.wait()
        if code:
            raise WorkerFailed(f"the measuring process ended: {describe_exit(code)}{_last_words(log)}")
    finally:
        child.kill()
        child.wait()


def _started(order: Mapping[str, Any], folder: Path, environment: Mapping[str, str] | None) -> tuple[Child, Path, Path]:
    """A worker with this order, and the files of its events and of what it prints."""
    order_file, events_file, log = folder / "order.json", folder / "events.jsonl", folder / "output.txt"
    order_file.write_text(json.dumps(order), "utf-8")
    events_file.touch()
    command = [sys.executable, "-m", "ttrain.bench.worker", str(order_file), str(events_file)]
    # A neighbour that was stopped hears no other signal.
    orphaned = signal.SIGKILL if order["do"] == "repeat" else signal.SIGTERM
    return Child(command, {**importable(), **(environment or {})}, log, orphaned), events_file, log


class Neighbour:
    """A process that keeps one core busy, or does the steps of an order for ever. It stands still until let run."""

    def __init__(self, order: Mapping[str, Any] | None = None, silence: float = SILENCE_SECONDS) -> None:
        """Raises WorkerFailed where the process does not come to run."""
        if order is None:
            self._child = Child([sys.executable, "-c", "while True: pass"], orphaned=signal.SIGKILL)
        else:
            with tempfile.TemporaryDirectory(prefix="ttrain-neighbour-") as name:
                self._child, events_file, log = _started(order, Path(name), None)
                if not any(event["event"] == "built" for event in _follow(self._child, events_file, silence)):
                    raise WorkerFailed(f"the neighbour ended{_last_words(log)}")
        os.kill(self._child.pid, signal.SIGSTOP)

    @contextmanager
    def running(self) -> Iterator[None]:
        os.kill(self._child.pid, signal.SIGCONT)
        try:
            yield
        finally:
            os.kill(self._child.pid, signal.SIGSTOP)

    def close(self) -> None:
        self._child.kill()
        self._child.wait()


def _follow(child: Child, path: Path, silence: float) -> Iterator[Event]:
    """The lines of a growing file, until the process that writes it has ended."""
    heard = time.monotonic()
    with open(path, encoding="utf-8") as file:
        rest = ""
        while True:
            ended = child.poll() is not None  # asked before reading, so that its last words are read
            rest += file.read()
            *lines, rest = rest.split("\n")
            for line in lines:
                heard = time.monotonic()
                yield json.loads(line)
            if ended:
                return
            if time.monotonic() - heard > silence:
                raise WorkerFailed(f"nothing happened for {format_duration(silence)}; the measuring process was ended")
            time.sleep(_POLL_SECONDS)


def importable() -> dict[str, str]:
    """Environment in which a process finds this very ttrain, wherever we were started."""
    root = str(Path(ttrain.__file__).resolve().parent.parent)
    return {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}


def _last_words(log: Path) -> str:
    """The last line that the process printed."""
    lines = [line.strip() for line in log.read_text("utf-8", errors="replace").splitlines() if line.strip()]
    return f": {lines[-1][:240]}" if lines else ""


class Caches:
    """Folders for compiled code: an empty one per contender, and one with all of them for the interleaved steps."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def of(self, contender: str) -> dict[str, str]:
        """Environment that makes a process keep its compiled code in the contender's folder."""
        return self._environment(self._root / contender)

    def all(self) -> dict[str, str]:
        """Environment with a copy of everything compiled so far. Compiled code is found by its content's hash."""
        together = self._root / "together"
        for folder in sorted(self._root.iterdir()) if self._root.exists() else []:
            if folder != together:
                shutil.copytree(folder, together, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.lock", "locks"))
        return self._environment(together)

    def _environment(self, folder: Path) -> dict[str, str]:
        kinds = {
            "TORCHINDUCTOR_CACHE_DIR": "inductor",
            "TRITON_CACHE_DIR": "triton",
            "TTRAIN_CACHE": "ttrain",
            "XDG_CACHE_HOME": "user",
        }
        for kind in kinds.values():
            (folder / kind).mkdir(parents=True, exist_ok=True)
        return {variable: str(folder / kind) for variable, kind in kinds.items()}
