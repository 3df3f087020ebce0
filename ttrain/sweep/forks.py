"""A fork server: it has imported the modules that jobs on the CPU need, and each job is a fork of it.

So a job does not spend seconds on imports. Otherwise it equals a new process: the server starts with the environment of
the jobs and computes nothing. At a fork it runs no other thread, because OpenMP starts its threads later, and OpenBLAS
ends its own before.
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


class ForkServer:
    """The sweep's end of the server: it sends a line of JSON and reads one back. The server starts at the first job."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """`environment` is added to ours, for the server and its jobs."""
        self._environment = environment
        self._server: Child | None = None

    def open(self) -> Child:
        """Return the server. The first call starts it, and ends once it has imported all."""
        if self._server is None:
            ours, theirs = socket.socketpair()
            with ours, theirs:
                self._stream = ours.makefile("rw", encoding="utf-8")
                command, inherited = [sys.executable, "-m", __name__, str(theirs.fileno())], [theirs.fileno()]
                self._server = Child(command, self._environment, Path(os.devnull), inherited=inherited)
            with suppress(OSError):
                self._stream.readline()
        return self._server

    def start(self, arguments: Sequence[str], log: Path) -> Fork | None:
        """Start `python -m ttrain` with these arguments, its output at the end of a file; None without a server."""
        server = self.open()
        try:
            return Fork(self._ask([str(log.absolute()), *arguments]), self)
        except (OSError, ValueError):
            how = describe_exit(server.wait() or 0)
            say(f"the fork server of the jobs ended ({how}); the next job starts without it, some seconds later")
            return None

    def poll(self, pid: int) -> int | None:
        """Return the exit code of a job, None if it still runs. Jobs end with the server."""
        try:
            return self._ask(pid)
        except (OSError, ValueError):
            return None if self._server is None else self._server.wait()

    def _ask(self, request: int | list[str]) -> Any:
        """Return the answer. Raises OSError or ValueError if the server has ended."""
        print(json.dumps(request), file=self._stream, flush=True)
        return json.loads(self._stream.readline())

    def close(self) -> None:
        """End the server, and with it the jobs that still run."""
        if self._server is not None:
            self._server.kill()
            self._server.wait()


class Fork(Child):
    """A running job, which is a child of the server."""

    def __init__(self, pid: int, server: ForkServer) -> None:
        self.pid, self._server = pid, server

    def poll(self) -> int | None:
        return self._server.poll(self.pid)

    def send(self, number: int) -> None:
        """Send a signal, without the server: this may interrupt a question to it."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)


def main() -> None:
    """Import, print an empty line, then answer requests until the sweep closes the connection.

    A list is the log and the arguments of a job, which is started; the answer is its process id. A process id asks for
    the exit code of that job; the answer is null if it still runs.
    """
    for module in (*LIBRARIES, *(f"ttrain.{name}" for name in IMPORTED)):
        import_module(module)
    gc.collect()
    gc.freeze()  # so that forks leave the memory of modules shared
    lines = socket.socket(fileno=int(sys.argv[1])).makefile("rw", encoding="utf-8")
    print(file=lines, flush=True)
    for line in lines:
        request = json.loads(line)
        if isinstance(request, int):
            pid, status = os.waitpid(request, os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        elif not (answer := os.fork()):
            lines.close()
            return run_job(*request)
        print(json.dumps(answer), file=lines, flush=True)


def run_job(log: str, *arguments: str) -> None:
    """Run `python -m ttrain` in this process, with its own session, and append its output to the file `log`."""
    os.setsid()
    end_with_parent(signal.SIGTERM)
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["ttrain", *arguments]
    runpy.run_module("ttrain", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
