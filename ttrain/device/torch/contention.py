"""Leave cores to other programs: OpenMP's workers move away from cores that others use.

PyTorch cuts a kernel into as many parts as there are threads and waits, spinning, for the last part. If another
program uses the core of a part, every kernel waits for that program's time slices, while the cores of the other threads
spin. So if cores are scarce, workers move to free cores, first to that of the thread which launches kernels. Threads
that wait sleep soon, and leave their core to threads with work. The number of parts of a kernel, and so every bit,
stays the same.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from ttrain.core.cores import OtherWork
from ttrain.device.torch.native.threads import FORK, NUMBER, entry_points

INTERVAL = 0.1  # seconds between two looks at what others use, at least
INTERVAL_IN_LOOKS = 500  # and so many times as long as a look takes, so that looks cost next to nothing
MOVE_SHORTAGE = 0.35  # cores that are lacking from which on workers move; with a queue they show as fewer than they are
STAY_SHORTAGE = 0.2  # and above which they stay where they moved

_BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_FORK = ctypes.CFUNCTYPE(None, _BODY, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
_NUMBER = ctypes.CFUNCTYPE(ctypes.c_int)


class Contention:
    """Looks, every now and then between steps, whether others leave a thread of this process without a core."""

    def __init__(self, threads: int) -> None:
        able = hasattr(os, "sched_setaffinity") and threads > 1 and bool(entry_points())
        self._threads, self._next = threads, 0.0 if able else float("inf")
        self._work: OtherWork | None = None
        self._sleepers: _Sleepers | None = None  # while workers make room

    def look(self) -> None:
        """No more than a look at the clock, most of the time."""
        if time.monotonic() < self._next:
            return
        begun = time.thread_time()
        if self._work is None:
            self._work = OtherWork()
        else:
            cores, others = len(os.sched_getaffinity(0)), self._work.cores()
            if self._threads + others - cores > (MOVE_SHORTAGE if self._sleepers is None else STAY_SHORTAGE):
                self._yield_cores(max(1, cores - max(1, round(others))))
            else:
                self._undo()
        self._next = time.monotonic() + max(INTERVAL, INTERVAL_IN_LOOKS * (time.thread_time() - begun))

    def forget(self) -> None:
        """Workers may run everywhere and spin as usual, and the next look begins anew."""
        self._undo()
        self._work = None

    def _undo(self) -> None:
        if self._sleepers is not None:
            self._move(os.sched_getaffinity(0))
            self._sleepers.end()
            self._sleepers = None

    def _yield_cores(self, left: int) -> None:
        everywhere = os.sched_getaffinity(0)
        self._sleepers = self._sleepers or _Sleepers(max(2, len(everywhere) - self._threads + 2))
        if self._sleepers.work:  # again each time: the runtime replaces threads now and then
            here = ctypes.CDLL(None).sched_getcpu()
            self._move([here, *(everywhere - {here})][:left])

    def _move(self, cores: Iterable[int]) -> None:
        def move(number: int) -> None:
            with suppress(OSError):
                if number:
                    os.sched_setaffinity(0, cores)

        _on_threads(self._threads, move)


class _Sleepers:
    """A team of OpenMP's that does nothing, from a thread of its own.

    With it the runtime has more threads than there are cores, and then lets none that waits spin for long
    (GOMP_SPINCOUNT in the manual of gcc's runtime).
    """

    def __init__(self, count: int) -> None:
        self._ended, started = threading.Event(), threading.Event()

        def live() -> None:
            running: list[int] = []
            _on_threads(count, running.append)
            self.work = len(running) == count  # or else the environment bounds their number, and spinning goes on
            started.set()
            self._ended.wait()

        self._thread = threading.Thread(target=live, name="ttrain-sleepers", daemon=True)
        self._thread.start()
        started.wait()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


def _on_threads(count: int, body: Callable[[int], None]) -> None:
    """body(number) on every thread of this thread's team, itself with number 0."""
    entry = entry_points()
    number = _NUMBER(entry[NUMBER])
    _FORK(entry[FORK])(_BODY(lambda _: body(number())), None, count, 0)
