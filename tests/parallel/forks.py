"""Ranks as forks of a process that has imported everything, so that a test starts many of them in seconds.

    python tests/parallel/forks.py --folder outputs/forks

Prints one line of JSON: for every fault that a rank can have, how all ranks ended.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.hurry import hurry

os.environ["OMP_NUM_THREADS"] = "1"

IMPORTED = (
    "torch", "tokenizers", "safetensors.numpy", "ttrain.device.torch.device", "ttrain.engine.static",
    "ttrain.tasks.train", "ttrain.train.loop.loop",
)  # fmt: skip
TINY = [
    "model=mlp", "model.width=32", "data=regression", "data.examples=64", "device=cpu", "device.threads=1",
    "logger=jsonl", "train.batch_size=4", "train.steps=6", "train.save_every=2", "train.eval_every=null",
    "train.log_every=1", "train.peak_tflops=1",
]  # fmt: skip
TOGETHER = 4  # cases
LIMIT = 60.0  # seconds for all ranks to end

Change = Callable[[int], None]  # of the program, in a rank of this number


def import_all() -> None:
    """Once, before the forks."""
    for module in (*IMPORTED, "ttrain.parallel.distributed", "ttrain.tasks.training.attempt"):
        importlib.import_module(module)
    hurry()


def environments(count: int) -> list[dict[str, str]]:
    """As torchrun sets them, where rank 0 is the one that the others meet at."""
    if count == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    every = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    every |= {"LOCAL_WORLD_SIZE": str(count), "GLOO_SOCKET_IFNAME": "lo"}
    return [{**every, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def start(
    overrides: list[str],
    log: Path,
    environment: Mapping[str, str] | None = None,
    change: Callable[[], None] = lambda: None,
) -> int:
    """Trains in a forked process, after a change of the program there; its id."""
    child = os.fork()
    if child:
        return child
    os.environ |= environment or {}
    try:
        change()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        from ttrain.cli import main

        code = main(overrides)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException as error:
        os.write(2, "\n".join([repr(error), *getattr(error, "__notes__", [])]).encode() + b"\n")
        code = 99
    os._exit(code)


def ended(child: int) -> int | None:
    """The exit code of a child, None while it runs."""
    found, status = os.waitpid(child, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


class Forks:
    """Ranks that run, each with overrides of its own."""

    def __init__(self, overrides: Sequence[list[str]], log: Path, change: Change = lambda rank: None) -> None:
        self.logs = [log.with_name(f"{log.name}.{rank}") for rank in range(len(overrides))]
        for own in self.logs:
            own.touch()
        self.codes: list[int | None] = [None] * len(overrides)
        given = enumerate(environments(len(overrides)))
        self.ids = [start(overrides[rank], self.logs[rank], own, partial(change, rank)) for rank, own in given]

    def poll(self) -> bool:
        """Whether all have ended."""
        for rank, child in enumerate(self.ids):
            if self.codes[rank] is None:
                self.codes[rank] = ended(child)
        return None not in self.codes

    def wait(self, limit: float = LIMIT) -> bool:
        """Whether all end in time; the others are killed."""
        until = time.monotonic() + limit
        while not self.poll():
            if time.monotonic() > until:
                for child, code in zip(self.ids, self.codes, strict=True):
                    if code is None:
                        os.kill(child, signal.SIGKILL)
                        os.waitpid(child, 0)
                return False
            time.sleep(0.01)
        return True

    def said(self, *starts: str) -> list[list[str]]:
        """Lines of the output that start so, by rank."""
        lines = [log.read_text(errors="replace").splitlines() for log in self.logs]
        return [[line for line in own if line.startswith(starts)] for own in lines]


def at_step(rank: int, number: int, fault: Callable[[], object]) -> Change:
    """A fault of one rank as it begins a step."""

    def change(here: int) -> None:
        from ttrain.train.steps.step import TrainStep

        run = TrainStep.__call__

        def start(self: TrainStep, batch: Any, rates: Any, step: int, *given: Any) -> Any:
            if here == rank and step == number:
                fault()
            return run(self, batch, rates, step, *given)

        TrainStep.__call__ = start  # type: ignore[method-assign]

    return change


def under_way(rank: int, number: int, fault: Callable[[], object]) -> Change:
    """A fault of one rank in a step, as its first exchange has been started; another rank is late for it."""

    def change(here: int) -> None:
        from ttrain.parallel.distributed import CommunicationThread

        start, step = CommunicationThread.start, [0]

        def started(self: CommunicationThread, launches: Any) -> None:
            start(self, launches)
            if here == rank and step[0] == number:
                fault()

        CommunicationThread.start = started  # type: ignore[method-assign]
        at_step(here, number, partial(step.__setitem__, 0, number))(here)

    return change


def _late(rank: int) -> None:
    """Rank 1 fails while rank 0, which it exchanges gradients with, has yet to come."""
    under_way(1, 3, _raise)(rank)
    at_step(0, 3, lambda: time.sleep(1000))(rank)


def _no_room(rank: int) -> None:
    """The first shard of rank 1 can't be written. Held-out data is not for it to hash: rank 0 does."""
    from ttrain.tasks.training import attempt
    from ttrain.train.checkpoint import save as saver

    if rank:
        attempt.held_out_hash = lambda *given: 1 / 0

    write, left = saver.write_rank_files, [rank]

    def write_rank_files(*given: Any) -> Any:
        if left and left.pop():
            raise OSError("no room on this machine")
        return write(*given)

    saver.write_rank_files = write_rank_files


def _raise() -> None:
    from ttrain.core.errors import TtrainError

    raise TtrainError("the cable was pulled")


def _version(rank: int) -> None:
    import ttrain

    ttrain.__version__ = f"0.{rank}"


def _data(rank: int) -> None:
    from ttrain.data.regression import RegressionDataset

    made = RegressionDataset.__init__

    def init(self: RegressionDataset, *given: Any) -> None:
        made(self, *given)
        self.description["sha256"] = f"{rank}"

    RegressionDataset.__init__ = init  # type: ignore[method-assign]


def _overflow(rank: int) -> None:
    """Rank 1's rows of step 4 are so large that their loss is infinite."""
    from ttrain.train.steps.phases import BatchReader

    read = BatchReader.__call__

    def inputs(self: BatchReader, number: int) -> Any:
        batch = read(self, number)
        return {**batch, "inputs": batch["inputs"] * (1e30 if rank == 1 and number == 4 else 1)}

    BatchReader.__call__ = inputs  # type: ignore[method-assign]


GROWING = ["train.gradient_accumulation=2", "train.batch_schedule=[2,4]", "train.phase_steps=3"]
FAULTS: dict[str, tuple[Change, list[list[str]]]] = {
    "raises": (at_step(1, 3, _raise), [[], []]),
    "leader_raises": (at_step(0, 3, _raise), [[], []]),
    "fails": (at_step(1, 3, lambda: 1 / 0), [[], []]),
    "hangs": (at_step(1, 3, lambda: time.sleep(1000)), [[], []]),
    "killed": (under_way(1, 3, lambda: os.kill(os.getpid(), signal.SIGKILL)), [[], []]),
    "leader_killed": (at_step(0, 3, lambda: os.kill(os.getpid(), signal.SIGKILL)), [[], []]),
    "late": (_late, [[], []]),
    "stopped": (under_way(1, 3, lambda: os.kill(os.getpid(), signal.SIGINT)), [[], []]),
    "config": (lambda rank: None, [[], ["optimizer.lr=0.5"]]),
    "mistake": (lambda rank: None, [["train.gradient_accumulation=4"]] * 2),
    "own_mistake": (lambda rank: None, [[], ["train.stepz=3"]]),
    "version": (_version, [[], []]),
    "data": (_data, [[], []]),
    "no_room": (_no_room, [[], []]),
    "overflow": (_overflow, [GROWING] * 2),
    "skipped": (_overflow, [["guard.nonfinite=skip", "guard.max_skips=1"]] * 2),
    "absent": (lambda rank: os._exit(0) if rank else None, [[], []]),
}
WAITING = ("hangs", "absent")  # until the time-out
LATE = (*WAITING, "killed", "leader_killed", "late")  # to end, and idle meanwhile
SHARDED = ("overflow",)  # where each rank updates its part


class Case:
    """Two ranks, one of which has a fault."""

    def __init__(self, name: str, folder: Path) -> None:
        change, own = FAULTS[name]
        mode = "zero1" if name in SHARDED else "ddp"
        timeout = 3 if name in WAITING else 60
        common = [*TINY, f"parallel={mode}", f"parallel.timeout={timeout}", f"run.dir={folder / name}"]
        self._forks = Forks([[*common, *each] for each in own], folder / f"{name}.log", change)
        self._checkpoints, self._until = folder / name / "checkpoints", time.monotonic() + LIMIT

    def is_over(self) -> bool:
        """Whether all ranks have ended, or had the time for it."""
        return self._forks.poll() or time.monotonic() > self._until

    def result(self) -> dict[str, Any]:
        forks = self._forks
        return {
            "ended": forks.wait(0.0), "codes": forks.codes, "said": forks.said("ttrain: ", "Traceback"),
            "saved": sorted(path.name for path in self._checkpoints.glob("*")),
            "notes": [line for own in forks.said("This was", "WARNING") for line in own],
        }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--faults", nargs="*", default=list(FAULTS))
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    os.environ["XDG_CACHE_HOME"] = str(options.folder / "cache")
    import_all()
    results: dict[str, Any] = {}
    cases: dict[str, Case] = {}
    waiting = sorted(options.faults, key=lambda name: name not in LATE)
    while waiting or cases:
        while waiting and len(cases) < TOGETHER:
            name = waiting.pop(0)
            cases[name] = Case(name, options.folder)
        results |= {name: cases.pop(name).result() for name in list(cases) if cases[name].is_over()}
        time.sleep(0.01)
    print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
