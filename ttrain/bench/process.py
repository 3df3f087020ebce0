"""Measuring processes as their starter sees them: a command goes in, its answer comes out; and neighbours."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ttrain
from ttrain.core.cores import default_threads
from ttrain.core.units import format_duration
from ttrain.train.supervise.child import Child, describe_exit

SILENCE_SECONDS = 1200.0  # longest wait for an answer; a cold compilation is part of one
_CLOSING_SECONDS = 5.0


class WorkerFailed(Exception):
    """A contender raised an error, or its measuring process ended."""


class Worker:
    """The measuring process of a contender, or one for each rank of it. See `child` for the commands."""

    def __init__(
        self,
        order: Mapping[str, Any],
        folder: Path,
        ranks: int = 1,
        environment: Mapping[str, str] | None = None,
        silence: float = SILENCE_SECONDS,
    ) -> None:
        """`folder` takes what the processes print. Raises WorkerFailed where the contender can't be made."""
        folder.mkdir(parents=True, exist_ok=True)
        self._log, self._silence = folder / "output.txt", silence
        device = dict(order["device"])
        shared = [dict(environment or {})]
        if ranks > 1:
            device["threads"] = max(1, (device.get("threads") or default_threads()) // ranks)
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            shared = [_rank(rank, ranks, port, device["threads"]) | shared[0] for rank in range(ranks)]
        command = [sys.executable, "-m", "ttrain.bench.child"]
        root = str(Path(ttrain.__file__).resolve().parent.parent)  # so that it finds this very ttrain
        path = {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
        self.children = [Child(command, {**path, **each}, self._log, signal.SIGKILL, piped=True) for each in shared]
        self._rest = [b""] * ranks
        try:
            self.ask({**order, "device": device})
        except BaseException:
            self.close()
            raise

    def ask(self, *command: Any) -> Any:
        """Give a command to all processes and return the answer of the first. Raises WorkerFailed."""
        self.tell(*command)
        answers = [self._answer(number) for number in range(len(self.children))]
        if failed := next((answer["failed"] for answer in answers if "failed" in answer), None):
            raise WorkerFailed(failed)
        return answers[0]["ok"]

    def tell(self, *command: Any) -> None:
        """Give a command to all processes, without a wait for its answer; a mapping is the order."""
        line = json.dumps(command[0] if isinstance(command[0], dict) else command)
        for child in self.children:
            with suppress(BrokenPipeError):  # the answer that is missing tells why
                child.stdin.write(line.encode() + b"\n")
                child.stdin.flush()

    def _answer(self, number: int) -> dict[str, Any]:
        child = self.children[number]
        while b"\n" not in self._rest[number]:
            if not select.select([child.stdout], [], [], self._silence)[0]:
                waited = format_duration(self._silence)
                raise WorkerFailed(f"nothing happened for {waited}; the measuring process was ended")
            read = os.read(child.stdout.fileno(), 1 << 16)
            if not read:
                words = [line.strip() for line in self._log.read_text("utf-8", errors="replace").splitlines()]
                last = f": {next(filter(None, reversed(words)), '')[:240]}".rstrip(": ")
                raise WorkerFailed(f"the measuring process ended: {describe_exit(child.wait() or 0)}{last}")
            self._rest[number] += read
        line, _, self._rest[number] = self._rest[number].partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Let the processes give back what they hold, and end them."""
        for child in self.children:
            with suppress(BrokenPipeError):
                child.stdin.close()
        for child in self.children:
            child.wait(_CLOSING_SECONDS)
            child.kill()
            child.wait()
            child.stdout.close()


def _rank(rank: int, ranks: int, port: int, threads: int) -> dict[str, str]:
    return {
        "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": str(threads),
    }  # fmt: skip


def caches(folder: Path) -> dict[str, str]:
    """Return the environment in which a process keeps all code that it compiles below a folder."""
    kinds = {
        "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "TTRAIN_CACHE": "ttrain",
        "XDG_CACHE_HOME": "user",
    }  # fmt: skip
    for kind in kinds.values():
        (folder / kind).mkdir(parents=True, exist_ok=True)
    return {variable: str(folder / kind) for variable, kind in kinds.items()}


class Neighbour:
    """Processes that keep cores busy. They stand still but while they are let run."""

    def __init__(self, worker: Worker | None = None) -> None:
        """A `worker` that has started does its steps for ever; without one a process keeps one core busy."""
        if worker is None:
            self._children = [Child([sys.executable, "-c", "while True: pass"], orphaned=signal.SIGKILL)]
        else:
            self._children = worker.children
            worker.tell("repeat")
        self._send(signal.SIGSTOP)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let them run."""
        self._send(signal.SIGCONT)
        try:
            yield
        finally:
            self._send(signal.SIGSTOP)

    def _send(self, number: signal.Signals) -> None:
        for child in self._children:
            child.send(number)

    def close(self) -> None:
        """End them."""
        for child in self._children:
            child.kill()
            child.wait()
