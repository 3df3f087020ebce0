"""A time-out for calls into ttnn, which never return if a chip, a link or a simulator hangs.

Nothing can interrupt such a call, so the process ends: a thread beside it lets the run note it, says why, and leaves
with os._exit. Locks on files go with the process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

from ttrain.core.errors import DeviceHang
from ttrain.core.waiting import to_stderr

Tell = Callable[[DeviceHang], None]

_NOTICE_SECONDS = 60.0  # of silence until the user is told what is waited for
_POLL_SECONDS = 1.0
_LAST_WORDS_SECONDS = 60.0  # for a save that is under way
_GRACE_SECONDS = 30.0
_STDERR = 2  # the file itself: Python's stream can be another


class Watch:
    """Entered around what may hang: `with watch("step train")`. It may be entered again inside.

    Silence is time in which the call neither returns nor starts another op, so a step of any length passes, and so does
    one that compiles its programs.
    """

    def __init__(
        self,
        device: str,
        seconds: float | None,
        progress: Callable[[], int],
        mend: str,
        last_words: list[Tell],
        end: Callable[[int], None] = os._exit,
    ) -> None:
        """`progress` counts the ops that were started; `mend` is a sentence; None waits for ever."""
        self._device, self._seconds, self._progress, self._mend = device, seconds, progress, mend
        self._last_words, self._end = last_words, end
        self._inside: list[str] = []  # what was entered and not left, the outermost first
        self._sections = 0
        self._thread: threading.Thread | None = None  # while there is something to watch
        self._lock = threading.Lock()
        self._closed = threading.Event()

    @contextlib.contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        with self._lock:
            self._inside.append(what)
            if len(self._inside) == 1:
                self._sections += 1
                if self._thread is None and self._seconds is not None:
                    self._thread = threading.Thread(target=self._run, name="device watch", daemon=True)
                    self._thread.start()
        try:
            yield
        finally:
            self._inside.pop()

    @property
    def what(self) -> str:
        first, *inner = self._inside or [""]
        return f"{first} ({inner[-1]})" if inner else first

    def close(self) -> None:
        """End the thread now: one that outlives Python's end keeps ttnn's objects, which ttnn then complains of."""
        self._closed.set()
        self._last_words.clear()
        if (thread := self._thread) is not None:
            thread.join(2 * _POLL_SECONDS)

    def _run(self) -> None:
        """Watch until a poll finds that nothing was entered since the one before."""
        assert self._seconds is not None
        poll, notice = min(_POLL_SECONDS, self._seconds / 10), min(_NOTICE_SECONDS, self._seconds / 2)
        seen, silent, told, last = (-1, -1), 0.0, False, time.monotonic()
        while True:
            # A call that keeps Python from running also keeps this thread from it: then this prints where, and ends.
            faulthandler.dump_traceback_later(self._seconds + _GRACE_SECONDS, exit=True, file=_STDERR)
            if self._closed.wait(poll):
                break
            now, before = time.monotonic(), last
            last = now
            current = self._sections, self._progress()
            if current != seen:
                seen, silent, told = current, 0.0, False
                continue
            with self._lock:
                if not self._inside:
                    self._thread = None
                    break
            silent += min(now - before, 2 * poll)  # a process that was stopped for a while did not wait
            if silent > self._seconds:
                faulthandler.cancel_dump_traceback_later()
                return self._give_up()
            if silent > notice and not told:
                told = True
                limit = f"device.step_timeout_s={self._seconds:g}"
                to_stderr(f"ttrain: {self.what} has not returned for {silent:.0f} s. Waiting until {limit} are over.")
        faulthandler.cancel_dump_traceback_later()

    def _give_up(self) -> None:
        hang = DeviceHang(
            f"device={self._device}: {self.what} has neither returned nor started another op for {self._seconds:g} s: "
            f"the device hangs. {self._mend} Where it only takes that long, give device.step_timeout_s=<more>."
        )

        def speak() -> None:
            for tell in list(self._last_words):
                with contextlib.suppress(Exception):  # whoever can't note it must not keep the others from it
                    tell(hang)

        speaker = threading.Thread(target=speak, daemon=True)
        speaker.start()
        speaker.join(_LAST_WORDS_SECONDS)
        to_stderr(f"ttrain: {hang}")
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        self._end(hang.exit_code)
