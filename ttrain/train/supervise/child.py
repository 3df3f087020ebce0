"""Child processes: each has its own session, ends with its parent, gets its signals, and is watched by a file."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from ttrain.core.files import read_json, replace_file, to_json

_PR_SET_PDEATHSIG = 1  # of Linux's prctl: the signal that a child gets when its parent dies
USER_SIGNALS = tuple(getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name))
PROGRAM = (sys.executable, "-m", "ttrain")  # what starts ttrain as a child


class Child(subprocess.Popen[bytes]):
    """A running process. Its output goes to ours, or to the end of a file.

    It leads a session, so a terminal's Ctrl-C reaches it only as its parent passes it on.
    """

    send = subprocess.Popen.send_signal

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
        orphaned: signal.Signals = signal.SIGTERM,
        inherited: Sequence[int] = (),
    ) -> None:
        """`environment` is added to ours, `orphaned` is the signal that it gets where we are killed.

        `inherited` are file descriptors that it has too.

        Raises OSError where the process or the file can't be made.
        """
        first = partial(end_with_parent, orphaned) if sys.platform == "linux" else None
        settings: dict[str, Any] = {"start_new_session": True, "pass_fds": inherited, "preexec_fn": first}
        with nullcontext() if log is None else open(log, "ab") as file:
            if file is not None:
                settings |= {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
            super().__init__(list(command), env={**os.environ, **(environment or {})}, **settings)

    def wait(self, timeout: float | None = None) -> int | None:  # type: ignore[override]
        """Return the exit code, None where it still runs after `timeout` seconds; below zero is a signal's number."""
        try:
            return super().wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """End the process and all that it started, at once."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            self.send(signal.SIGKILL)


def end_with_parent(orphaned: signal.Signals) -> None:
    """Runs in the child: where the parent is killed, the child is told to stop and saves its state."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, orphaned, 0, 0, 0)


def set_handlers(handlers: Mapping[int, Any]) -> dict[int, Any]:
    """Set handlers by the number of their signal, and return those before. Only the main thread sets any."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.signal(number, handler) for number, handler in handlers.items()}


class PassOn:
    """While entered, SIGINT and SIGTERM go to the children; a second one kills them. SIGUSR1 and 2 go there as well."""

    def __init__(self, children: Callable[[], Iterable[Child]]) -> None:
        self._children = children
        self._before: dict[int, Any] = {}
        self.received = 0
        self.number: signal.Signals | None = None

    def __enter__(self) -> PassOn:
        stops: dict[int, Any] = {signal.SIGINT: self._stop, signal.SIGTERM: self._stop}
        self._before = set_handlers({**stops, **dict.fromkeys(USER_SIGNALS, self._tell)})
        return self

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.received, self.number = self.received + 1, signal.Signals(number)
        for child in self._children():
            if self.received == 1:
                child.send(number)
            else:
                child.kill()

    def _tell(self, number: int, frame: FrameType | None) -> None:
        for child in self._children():
            child.send(number)

    def __exit__(self, *error: object) -> None:
        set_handlers(self._before)


def say(text: str) -> None:
    """Tell the user something as the process that watches others."""
    print(f"ttrain: {text}", file=sys.stderr, flush=True)


def describe_exit(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = "; by hand, or by the system when memory ran out" if -code == signal.SIGKILL else ""
    return f"killed by {name}{hint}"


VARIABLE = "TTRAIN_HEARTBEAT"  # path of the file; set where a supervisor watches


class Heartbeat:
    """Does nothing in a process that nobody watches."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._told: dict[str, Any] = {}

    @classmethod
    def of_process(cls) -> Heartbeat:
        """Make the heartbeat that the environment asks for. SIGUSR2 then prints where every thread is."""
        path = os.environ.get(VARIABLE)
        if path and hasattr(signal, "SIGUSR2"):
            faulthandler.register(signal.SIGUSR2, all_threads=True)
        return cls(Path(path) if path else None)

    def beat(self) -> None:
        """Show that the process is alive; cheap enough for every step."""
        if self._path is not None:
            try:
                os.utime(self._path)
            except OSError:  # the supervisor is gone, and its file with it
                self._path = None

    def tell(self, **facts: Any) -> None:
        """Add JSON values to what the supervisor knows."""
        if self._path is not None:
            self._told = {**read_json(self._path), **self._told, **facts}  # other ranks tell as well
            try:
                replace_file(self._path, to_json(self._told))
            except OSError:
                self._path = None
