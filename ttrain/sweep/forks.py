"""A process that has imported what jobs on the CPU need: each job is a fork of it, which does without these seconds.

It has the environment of the jobs from its own start on, computes nothing, and no thread of it runs at a fork: OpenMP
starts its own later, and OpenBLAS ends its own before. So a job is what another process would be after its imports.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from ttrain.train.supervise.child import Child, describe_exit, end_with_parent, say

IMPORTED = ("cli", "tasks.train", "tasks.training.supervised", "engine.traced", "device.torch.native.rows")
LIBRARIES = ("torch", "rich.console", "matplotlib.figure", "matplotlib.backends.backend_agg")


class Forks:
    """The server, as a sweep talks to it: a line of JSON there, and one back. It starts with the first job."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """`environment` is added to ours, for the server and its jobs."""
        self._environment = environment
        self._server: Child | None = None

    def _open(self) -> Child:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self._stream = ours.makefile("rw", encoding="utf-8")
            command, inherited = [sys.executable, "-m", __name__, str(theirs.fileno())], [theirs.fileno()]
            return Child(command, self._environment, Path(os.devnull), inherited=inherited)

    def start(self, arguments: Sequence[str], log: Path) -> Fork | None:
        """Start `python -m ttrain` with these arguments, its output at the end of a file; None without a server."""
        self._server = self._server or self._open()
        try:
            return Fork(self._ask([str(log.absolute()), *arguments]), self)
        except (OSError, ValueError):
            how = describe_exit(self._server.wait() or 0)
            say(f"the process of which jobs are forks ended ({how}); the next job imports by itself what it needs")
            return None

    def poll(self, pid: int) -> int | None:
        """Return the exit code of a job, None where it still runs. Jobs end with the server."""
        try:
            return self._ask(pid)
        except (OSError, ValueError):
            return None if self._server is None else self._server.wait()

    def _ask(self, request: int | list[str]) -> Any:
        """Return the answer. Raises OSError or ValueError where the server has ended."""
        print(json.dumps(request), file=self._stream, flush=True)
        return json.loads(self._stream.readline())

    def close(self) -> None:
        """End the server, and with it what still runs."""
        if self._server is not None:
            self._server.kill()
            self._server.wait()


class Fork(Child):
    """A running job, which is a child of the server."""

    def __init__(self, pid: int, forks: Forks) -> None:
        self.pid, self._forks = pid, forks

    def poll(self) -> int | None:
        return self._forks.poll(self.pid)

    def send(self, number: int) -> None:
        """Send a signal; the server is not asked anything, for this may come amid a question."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)


def main() -> None:
    """Import, and fork for every request until the sweep hangs up. A request is a job, or one to tell the end of."""
    for module in (*LIBRARIES, *(f"ttrain.{name}" for name in IMPORTED)):
        import_module(module)
    gc.collect()
    gc.freeze()  # so that forks leave the memory of modules shared
    lines = socket.socket(fileno=int(sys.argv[1])).makefile("rw", encoding="utf-8")
    for line in lines:
        request = json.loads(line)
        if isinstance(request, int):
            pid, status = os.waitpid(request, os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        elif not (answer := os.fork()):
            lines.close()
            return become(*request)
        print(json.dumps(answer), file=lines, flush=True)


def become(log: str, *arguments: str) -> None:
    """Be `python -m ttrain`, in a session of its own, and with its output at the end of a file."""
    os.setsid()
    end_with_parent(signal.SIGTERM)
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["ttrain", *arguments]
    runpy.run_module("ttrain", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
