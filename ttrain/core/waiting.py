"""Report on work that takes more than a few seconds, so that nobody waits without a word."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from time import monotonic
from typing import TypeVar

from ttrain.core.units import format_duration

AFTER = 3.0  # seconds of silence before the first word,
EVERY = 30.0  # and between any two after it

Item = TypeVar("Item")


class Waiting:
    """Says what is under way as long as it is open: after AFTER seconds, then every EVERY.

    Lines go to the standard error stream unless `say` takes them, from a thread of their own. So they show in a log
    too, and above a bar that is under way.
    """

    def __init__(self, what: str, say: Callable[[str], None] | None = None) -> None:
        self._what, self._say = what, say or _to_stderr
        self._parts: tuple[int, int] | None = None
        self._ended = threading.Event()
        self._started = monotonic()

    def __enter__(self) -> Waiting:
        threading.Thread(target=self._run, daemon=True, name=f"waiting: {self._what}").start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Say nothing more: it is done."""
        self._ended.set()

    def at(self, done: int, total: int) -> None:
        """Take in how much of it is done."""
        self._parts = done, total

    def text(self) -> str:
        """Return what is said now."""
        seconds = monotonic() - self._started
        if self._parts is None:
            return f"{self._what}: {format_duration(seconds)} so far."
        done, total = self._parts
        left = f", about {format_duration(seconds * (total - done) / done)} left" if done else ""
        return f"{self._what}: {done} of {total} after {format_duration(seconds)}{left}."

    def _run(self) -> None:
        pause = AFTER
        while not self._ended.wait(pause):
            self._say(self.text())
            pause = EVERY


def waited_for(items: Iterable[Item], what: str) -> Iterator[Item]:
    """Yield the items, with a word about how far it is where they take long."""
    with Waiting(what) as waiting:
        for number, item in enumerate(known := list(items)):
            waiting.at(number, len(known))
            yield item


def _to_stderr(message: str) -> None:
    with suppress(OSError, ValueError):  # nobody reads it any more
        print(message, file=sys.stderr, flush=True)
