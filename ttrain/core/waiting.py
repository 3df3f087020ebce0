"""Report on work that takes more than a few seconds, so that nobody waits without a word."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from time import monotonic
from typing import TypeVar

from ttrain.core.units import format_duration

AFTER = 3.0  # seconds until the first line, and at least between two lines
EVERY = 30.0  # seconds between two lines about the same part; later a tenth of the time since the start

Item = TypeVar("Item")
_thread = threading.local()  # holds what each thread has open
_due = monotonic() + AFTER  # the first line of a process, which has been silent since it began


class Waiting:
    """Says what is under way while it is open: after AFTER seconds, at each new part, and about every EVERY seconds.

    Its parts are those that the same thread opens meanwhile. The outermost tells of all, so lower layers need not know
    who waits for them. A thread of its own writes the lines to the standard error stream, or gives them to `say`, so
    they show in a log and above a progress bar. Without `say`, only the main thread's are written, because nobody waits
    for another thread.
    """

    def __init__(self, what: str, say: Callable[[str], None] | None = None) -> None:
        self._what, self._say, self._detail = what, say, ""
        self._parts: tuple[int, int] | None = None
        self._ended = threading.Event()
        self._started = monotonic()
        self._open: list[Waiting] = []

    def __enter__(self) -> Waiting:
        self._open = _thread.__dict__.setdefault("open", [])
        self._open.append(self)
        if self._say is not None or threading.current_thread() is threading.main_thread():
            threading.Thread(target=self._run, daemon=True, name=f"waiting: {self._what}").start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Say nothing more: it is done."""
        self._ended.set()
        if self in self._open:
            self._open.remove(self)

    def at(self, done: int, total: int, detail: str = "") -> None:
        """Note how much is done, and the name of the next part."""
        self._parts, self._detail = (done, total), detail

    def text(self) -> str:
        """Return what is said now."""
        seconds = monotonic() - self._started
        if inner := [part._named() for part in self._open if part is not self]:
            lower = (name[:1].lower() + name[1:] for name in inner)
            return f"{self._named()}, {format_duration(seconds)} so far: {', '.join(lower)}."
        if self._parts is None:
            return f"{self._what}: {format_duration(seconds)} so far."
        done, total = self._parts
        left = f", about {format_duration(seconds * (total - done) / done)} left" if done else ""
        return f"{self._what}: {done} of {total} after {format_duration(seconds)}{left}."

    def _named(self) -> str:
        """Return what it is and how far."""
        at = "" if self._parts is None else "{} of {}".format(*self._parts)
        more = ": ".join(filter(None, (at, self._detail)))
        return f"{self._what} ({more})" if more else self._what

    def _run(self) -> None:
        told, last, left = list[Waiting](), 0.0, _due - self._started
        pause = left if 0 < left < AFTER else AFTER
        while not self._ended.wait(pause):
            pause = AFTER
            now, parts = monotonic(), list(self._open)
            if parts[:1] == [self] and (parts != told or now - last >= max(EVERY, (now - self._started) / 10)):
                told, last = parts, now
                (self._say or to_stderr)(self.text())


def waited_for(items: Iterable[Item], what: str, named: Callable[[Item], str] = lambda item: "") -> Iterator[Item]:
    """Yield the items. If that takes long, say how many are done, and which one is under way."""
    with Waiting(what) as waiting:
        for number, item in enumerate(known := list(items)):
            waiting.at(number, len(known), named(item))
            yield item


def to_stderr(message: str) -> None:
    """Print a line for people who wait."""
    with suppress(OSError, ValueError):  # nobody reads it any more
        print(message, file=sys.stderr, flush=True)
