"""Requests to stop or to save, by signal.

SIGUSR1 saves, and training continues. The first Ctrl-C, SIGTERM or SIGHUP (a closed terminal) lets the step finish,
saves and stops; the second ends the process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from types import FrameType
from typing import Any

from ttrain.train.supervise.child import USER_SIGNALS, set_handlers

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))

_ECHO_SECONDS = 1.0


class StopRequests:
    """While entered, notes SIGINT, SIGTERM, SIGHUP and SIGUSR1 instead of dying of them.

    After the first one the system's own handling is back: a second one ends the process at once, even where Python does
    not get to run. Files are safe then, because they are written beside and renamed. Several runs of a process may
    enter the same object.

    Where signals have `echoes`, from a terminal and from a launcher, those within a second count as one.
    """

    def __init__(self, echoes: bool = False) -> None:
        self._echoes, self._at = echoes, 0.0
        self._before: dict[int, Any] = {}
        self.requested: signal.Signals | None = None
        self._saves = 0  # runs that have not saved yet since they were asked to
        self._entered = 0

    def __enter__(self) -> StopRequests:
        self._entered += 1
        if self._entered > 1:
            return self
        # A command that was started with nohup ignores SIGHUP, which means that it outlives its terminal.
        heeded = (each for each in SIGNALS if each.name != "SIGHUP" or signal.getsignal(each) is not signal.SIG_IGN)
        wanted: dict[int, Any] = dict.fromkeys(heeded, self._note)
        self._before = set_handlers({**wanted, **dict.fromkeys(USER_SIGNALS[:1], self._note_save)})
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested is not None and time.monotonic() - self._at < _ECHO_SECONDS:
            return
        again, self.requested, self._at = self.requested is not None, signal.Signals(number), time.monotonic()
        for other in self._before.keys() & SIGNALS if again or not self._echoes else ():
            signal.signal(other, signal.SIG_DFL)
        if again:
            os.kill(os.getpid(), number)
        message = f"\n{self.requested.name}: finishing the step and saving; once more ends the run at once.\n"
        with contextlib.suppress(AttributeError, OSError, ValueError):  # the terminal went away, or never was
            os.write(sys.stderr.fileno(), message.encode())  # print is not safe here

    def _note_save(self, number: int, frame: FrameType | None) -> None:
        self._saves = self._entered

    def take_save(self) -> bool:
        """Return whether a save was asked for since the last call of this run."""
        asked = self._saves > 0
        self._saves -= asked
        return asked

    def __exit__(self, *error: object) -> None:
        self._entered -= 1
        if not self._entered:
            set_handlers(self._before)
