"""Messages between ranks through torch's store: heartbeats, the reason of an end, and texts by key.

The first failure that is posted ends all ranks. A rank that waits for others notices it at once, one that computes or
hangs is ended by the thread that watches.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, TypeVar

from ttrain.core.errors import EXIT_FAILURE, EXIT_INTERRUPTED, RankFailed, TtrainError
from ttrain.core.waiting import Waiting

if TYPE_CHECKING:  # a process that starts ranks need not load torch
    from torch.distributed import Store

E = TypeVar("E", bound=BaseException)
_BEAT_SECONDS = 1.0
_DEAD_SECONDS = 2.5 * _BEAT_SECONDS  # without a beat
_PATIENCE_SECONDS = 3.0  # for whoever knows the cause of an error to post it
_GRACE_SECONDS = 5.0  # for a rank to end by itself after a failure
_LEADER_SECONDS = 3.0  # at most, that other ranks let the leading one speak first where all fail alike
_LOOK_SECONDS = 0.02
_FAILURE = "failure"


def _wait_for(found: Callable[[], object], seconds: float) -> None:
    """Look again and again for so long, until something is found."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and not found():
        time.sleep(_LOOK_SECONDS)


@dataclass(frozen=True)
class Failure:
    """Reason why a run ends, and the rank that is the cause."""

    rank: int
    message: str
    exit_code: int = EXIT_FAILURE

    def error(self, reported: bool) -> RankFailed:
        return RankFailed(f"rank {self.rank}: {self.message}", self.exit_code, reported)


class FailureStore:
    """The messages that one rank posts and reads. Any thread may use it; the one that makes it is the rank's own.

    A beat tells whether that thread waits for other ranks. Others don't count, unless it waits for them: see `joining`.
    """

    def __init__(self, store: Store, rank: int, count: int, timeout: float, led: bool = False) -> None:
        """`led` tells that the store, which raises RuntimeError once it is gone, goes with the leading rank."""
        self._store, self._rank, self._count, self._timeout, self._led = store, rank, count, timeout, led
        self._failure: Failure | None = None
        self._ends, self._left = threading.Event(), threading.Event()
        self._own = threading.get_ident()
        self._waits: dict[int, int] = {}  # thread -> how many waits for other ranks it is in
        self._joined: dict[int, threading.Thread] = {}  # thread -> the thread of this rank that it waits for
        self._beats = 0

    def leave(self) -> None:
        """Let the others end as they like from now on."""
        self._left.set()

    def post(self, key: str, text: str) -> None:
        self._store.set(key, text)

    def read(self, key: str) -> str | None:
        """The text that was posted; None where none was."""
        return self._store.get(key).decode() if self._store.check([key]) else None

    def wait(self, key: str, rank: int) -> str:
        """The text that a rank is to post, however long it works at it. Raises RankFailed where the run ends first."""
        with self.waiting(), Waiting(f"Waiting for rank {rank}"):
            seen, since = self._state_of(rank), time.monotonic()
            while (text := self.read(key)) is None:
                self._check()
                if (state := self._state_of(rank)) != seen:
                    seen, since = state, time.monotonic()
                elif time.monotonic() - since > self._timeout:
                    raise self._first(self._gone(rank))
                time.sleep(_LOOK_SECONDS)
        return text

    def rendezvous(self) -> None:
        """Show from now on that this rank lives, and wait for all. Raises RankFailed naming those that did not come."""
        self._beat()
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()
        until = time.monotonic() + self._timeout
        missing = [rank for rank in range(self._count) if rank != self._rank]
        with Waiting("Waiting for other ranks"):
            while missing := [rank for rank in missing if self._state_of(rank) is None]:
                self._check()
                if time.monotonic() > until:
                    late = f"it did not start within {self._timeout:g} s; missing: {', '.join(map(str, missing))}"
                    raise self._first(Failure(missing[0], late))
                time.sleep(_LOOK_SECONDS)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around every wait for other ranks: what torch raises becomes an error that names the rank."""
        thread = threading.get_ident()
        self._waits[thread] = self._waits.get(thread, 0) + 1
        try:
            yield
        except RuntimeError as error:
            raise self._reason(error) from error
        finally:
            self._waits[thread] -= 1

    @contextmanager
    def joining(self, thread: threading.Thread) -> Iterator[None]:
        """Around a wait for another thread of this rank: while that one waits for other ranks, so does this one."""
        own = threading.get_ident()
        self._joined[own] = thread
        try:
            yield
        finally:
            del self._joined[own]

    def _is_waiting(self) -> bool:
        """True if the rank's own thread waits for other ranks, be it through threads that it waits for."""
        thread: int | None = self._own
        while thread is not None and not self._waits.get(thread):
            joined = self._joined.get(thread)
            thread = None if joined is None else joined.ident
        return thread is not None

    def ended(self, error: E) -> E | TtrainError:
        """Return the error that this rank ends with, after telling its own to all others; the first error stands."""
        if isinstance(error, RankFailed):
            return error
        self._ends.set()
        with suppress(RuntimeError):  # nobody is there
            _wait_for(self.failure, _LEADER_SECONDS if self._rank else 0)
        code = error.exit_code if isinstance(error, TtrainError) else EXIT_FAILURE
        code = EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else code
        own = Failure(self._rank, str(error) or type(error).__name__, code)
        found = self.fail(own)
        self._drain(found.rank)
        if found != own:
            return found.error(reported=True)
        if isinstance(error, TtrainError):
            error.shared = True
        else:
            note = f"This was rank {self._rank} of {self._count}."
            if sys.version_info >= (3, 11):  # the traceback ends with it
                error.add_note(note)
            else:
                print(note, file=sys.__stderr__, flush=True)  # sys.stderr is the leading rank's alone
        return error

    def _drain(self, cause: int) -> None:
        """Give the ranks that are not the cause the time to read why the run ends, where that goes with this one."""
        others = [f"ended/{rank}" for rank in range(1, self._count) if rank != cause]
        with suppress(RuntimeError):
            self.post(f"ended/{self._rank}", "")
            patience = _PATIENCE_SECONDS if self._led and self._rank == 0 else 0
            _wait_for(lambda: all(self._store.check([key]) for key in others), patience)

    def fail(self, failure: Failure) -> Failure:
        """Post why the run ends. Return the reason that was posted first."""
        text = json.dumps(asdict(failure))
        try:
            found = self._store.compare_set(_FAILURE, "", text).decode()
        except RuntimeError:  # nobody is there to be told
            found = text
        self._failure = Failure(**json.loads(found))
        return self._failure

    def failure(self) -> Failure | None:
        """Return why the run ends, where it does."""
        if self._failure is None and (text := self.read(_FAILURE)) is not None:
            self._failure = Failure(**json.loads(text))
        return self._failure

    def _check(self) -> None:
        if (failure := self.failure()) is not None:
            self._ends.set()
            self._drain(failure.rank)
            raise failure.error(reported=True)

    def _first(self, failure: Failure) -> RankFailed:
        self._ends.set()
        found = self.fail(failure)
        self._drain(found.rank)
        return found.error(reported=found != failure)

    def _reason(self, error: RuntimeError) -> TtrainError:
        """The reason why a wait failed: as somebody posts it, else as the signs of life of the others tell."""
        self._ends.set()
        try:
            _wait_for(self._check, _PATIENCE_SECONDS)
            return self._first(self._diagnosed(error))
        except RankFailed as failure:
            return failure
        except RuntimeError:
            return self._alone().error(reported=False)

    def _alone(self) -> Failure:
        if self._led:
            return self._gone(0)
        return Failure(self._rank, "the process that started the ranks is gone, so this one ends.")

    def _gone(self, rank: int) -> Failure:
        return Failure(rank, "it shows no sign of life: it was killed, hangs, or its machine is out of reach.")

    def _diagnosed(self, error: RuntimeError) -> Failure:
        others = [rank for rank in range(self._count) if rank != self._rank]
        before = {rank: self._state_of(rank) for rank in others}
        time.sleep(_DEAD_SECONDS)
        for rank in others:
            if (state := self._state_of(rank)) == before[rank]:
                return self._gone(rank)
            if state is not None and state.endswith(" works"):
                limit = f"{self._timeout:g} s (parallel.timeout)"
                return Failure(rank, f"it hangs: the others have waited for it for {limit}.")
        return Failure(self._rank, f"the exchange with the other ranks failed: {error}")

    def _state_of(self, rank: int) -> str | None:
        return self.read(f"rank/{rank}")

    def _beat(self) -> None:
        self._beats += 1
        self._store.set(f"rank/{self._rank}", f"{self._beats} {'waits' if self._is_waiting() else 'works'}")

    def _watch(self) -> None:
        while not self._left.wait(_BEAT_SECONDS):
            try:
                self._beat()
                failure = self.failure()
            except RuntimeError:
                failure = self._alone()
            if failure is not None and not self._ends.wait(_GRACE_SECONDS) and not self._left.is_set():
                os._exit(failure.exit_code)  # it computes, hangs, or waits where nothing wakes it
            if failure is not None:
                return
