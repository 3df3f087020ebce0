"""Several processes as one contender: ranks of ttrain, or of PyTorch's DistributedDataParallel.

The contender stands in the measuring process and tells its ranks, by lines of text, to do a step; between its turns
they wait for the next line. `python -m ttrain.bench.ranks` is one of them.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from ttrain.bench.contender import Contender
from ttrain.bench.engines import EngineContender, device_of
from ttrain.bench.process import importable
from ttrain.bench.workload import Case
from ttrain.config import registry
from ttrain.core.cores import default_threads
from ttrain.core.errors import TtrainError
from ttrain.engine.settings import EngineConfig
from ttrain.parallel.settings import ParallelConfig


class RanksContender(Contender):
    """Threads are divided among the ranks; each computes an equal share of the batch."""

    def __init__(self, name: str, case: Case, order: Mapping[str, Any]) -> None:
        self.name, self._case, self._order = name, case, order
        self._own, self._mode, count = name.split(" ")
        self._count = int(count.removeprefix("x"))
        self.side = "PyTorch" if self._own in ("eager", "compile") else "ttrain"
        self.description = f"{self._own} in {self._count} processes, {self._mode}"
        self._ranks: list[subprocess.Popen[str]] = []

    def build(self) -> None:
        device = self._order["device"]
        threads = max(1, (device.get("threads") or default_threads()) // self._count)
        order = {
            **self._order, "own": self._own, "mode": self._mode, "case": self._case.to_dict(),
            "device": {**device, "threads": threads},
        }  # fmt: skip
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(self._count):
            environment = {
                **os.environ, **importable(), "RANK": str(rank), "WORLD_SIZE": str(self._count),
                "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(self._count), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port), "OMP_NUM_THREADS": str(threads),
            }  # fmt: skip
            command = [sys.executable, "-m", "ttrain.bench.ranks"]
            pipe = subprocess.PIPE
            self._ranks.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment))
        self._ask(json.dumps(order))

    def step(self, number: int) -> float:
        return float(self._ask(f"step {number}"))

    def loss(self, handle: float) -> float:
        return handle

    def weight(self, path: str) -> np.ndarray:
        return np.array(self._ask(f"weight {path}"), np.float32)

    def close(self) -> None:
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.close()  # which ends it
            rank.wait()

    def _ask(self, line: str) -> Any:
        """Tells all ranks; what the first answers. Raises TtrainError where one has ended."""
        for rank in self._ranks:
            assert rank.stdin is not None
            try:
                rank.stdin.write(line + "\n")
                rank.stdin.flush()
            except BrokenPipeError:
                break
        answers = [rank.stdout.readline() for rank in self._ranks if rank.stdout is not None]
        if ended := [number for number, answer in enumerate(answers) if not answer]:
            raise TtrainError(f"rank {ended[0]} of {self.name} ended by itself")
        return json.loads(answers[0])


def _rank_of(order: Mapping[str, Any]) -> Contender:
    """What one rank does by itself."""
    case, own, mode, device = Case.of(order["case"]), order["own"], order["mode"], device_of(order)
    if own in ("eager", "compile"):
        from ttrain.bench.baselines import DistributedContender

        return DistributedContender(own, case, device)
    engine = EngineConfig(**{**order["engine"], "name": own})
    return EngineContender(own, case, device, engine, ParallelConfig(name=mode))


def _serve() -> None:
    """Does what lines of text ask for, until there are no more."""
    order = json.loads(sys.stdin.readline())
    registry.load_plugins(order["plugins"])
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers:  # libraries may print
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        contender = _rank_of(order)
        contender.build()
        answer: Any = None
        while True:
            print(json.dumps(answer), file=answers, flush=True)
            what, _, argument = sys.stdin.readline().rstrip("\n").partition(" ")
            if not what:
                break
            answer = (
                contender.loss(contender.step(int(argument))) if what == "step" else contender.weight(argument).tolist()
            )
        contender.close()


if __name__ == "__main__":
    _serve()
