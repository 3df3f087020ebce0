"""Ranks as forks of a process that has imported everything, so that a test starts many of them in seconds."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from tests.forked import ForkedChild

os.environ["OMP_NUM_THREADS"] = "1"

TINY = [
    "model=mlp", "model.width=32", "data=regression", "data.examples=64", "device=cpu", "device.threads=1",
    "logger=jsonl", "train.batch_size=4", "train.steps=6", "train.save_every=2", "train.eval_every=null",
    "train.log_every=1", "train.peak_tflops=1",
]  # fmt: skip
LIMIT = 60.0  # seconds for all ranks to end

Change = Callable[[int], None]  # of the program, in a rank of this number


def free_port() -> int:
    with socket.socket() as given:
        given.bind(("127.0.0.1", 0))
        return int(given.getsockname()[1])


def environments(count: int) -> list[dict[str, str]]:
    """Return the variables that torchrun sets. The others meet at rank 0."""
    if count == 1:
        return [{}]
    every = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    every |= {"LOCAL_WORLD_SIZE": str(count), "GLOO_SOCKET_IFNAME": "lo"}
    return [{**every, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def wrap(place: str, around: Callable[..., Any]) -> None:
    """Let a function of the program be `around`, which is given the function before its arguments."""
    owner, _, name = place.rpartition(".")
    owned = resolve_name(owner)
    inner = getattr(owned, name)
    setattr(owned, name, lambda *given: around(inner, *given))


def at_step(rank: int, number: int, fault: Callable[[], object]) -> Change:
    """A fault of one rank as it begins a step."""

    def step(run: Any, self: Any, batch: Any, rates: Any, step: int, *given: Any) -> Any:
        if step == number:
            fault()
        return run(self, batch, rates, step, *given)

    return lambda here: wrap("ttrain.train.steps.step:TrainStep.__call__", step) if here == rank else None


def under_way(rank: int, number: int, fault: Callable[[], object]) -> Change:
    """A fault of one rank in a step, as its first exchange has been started; another rank is late for it."""
    reached: list[int] = []

    def start(start: Any, *given: Any) -> None:
        start(*given)
        if reached:
            fault()

    def change(here: int) -> None:
        if here == rank:
            wrap("ttrain.parallel.distributed:CommunicationThread.start", start)
            at_step(rank, number, lambda: reached.append(number))(rank)

    return change


def _stopped(rank: int) -> None:
    """A signal to rank 1. Between two steps with nothing due, ranks exchange the numbers of a step and no more."""
    asked: list[str] = []

    def note(name: str) -> None:
        def exchange(exchange: Any, *given: Any) -> Any:
            asked.append(name)
            return exchange(*given)

        wrap(f"ttrain.parallel.distributed:DistributedWorld.{name}", exchange)

    def check() -> None:
        assert asked == ["gather"], asked

    for name in ("gather", "broadcast"):
        note(name)
    at_step(rank, 1, asked.clear)(rank)
    at_step(rank, 2, check)(rank)
    under_way(1, 3, lambda: os.kill(os.getpid(), signal.SIGINT))(rank)


def _late(rank: int) -> None:
    """Rank 1 fails while rank 0, which it exchanges gradients with, has yet to come."""
    under_way(1, 3, _raise)(rank)
    at_step(0, 3, _hang)(rank)


def _no_room(rank: int) -> None:
    """The first shard of rank 1 can't be written. Held-out data is not for it to hash: rank 0 does."""
    left = [rank]

    def write(write: Any, *given: Any) -> Any:
        if left and left.pop():
            raise OSError("no room on this machine")
        return write(*given)

    wrap("ttrain.train.checkpoint.save.write_rank_files", write)
    if rank:
        wrap("ttrain.tasks.training.attempt.held_out_hash", lambda *given: 1 / 0)


def _hang() -> None:
    resolve_name("ttrain.parallel.failure_store")._GRACE_SECONDS = 1.0  # then its watch ends it
    time.sleep(1000)


def _raise() -> None:
    from ttrain.core.errors import TtrainError

    raise TtrainError("the cable was pulled")


def _version(rank: int) -> None:
    resolve_name("ttrain").__version__ = f"0.{rank}"


def _data(rank: int) -> None:
    def init(init: Any, self: Any, *given: Any) -> None:
        init(self, *given)
        self.description["sha256"] = f"{rank}"

    wrap("ttrain.data.synthetic.regression:RegressionDataset.__init__", init)


def _overflow(rank: int) -> None:
    """Rank 1's rows of step 4 are so large that their loss is infinite."""

    def read(read: Any, self: Any, number: int) -> Any:
        batch = read(self, number)
        return {**batch, "inputs": batch["inputs"] * (1e30 if rank == 1 and number == 4 else 1)}

    wrap("ttrain.train.steps.phases:BatchReader.__call__", read)


GROWING = ["train.gradient_accumulation=2", "train.batch_schedule=[2,4]", "train.phase_steps=3"]
FAULTS: dict[str, tuple[Change, list[list[str]]]] = {
    "raises": (at_step(1, 3, _raise), [[], []]),
    "leader_raises": (at_step(0, 3, _raise), [[], []]),
    "fails": (at_step(1, 3, lambda: 1 / 0), [[], []]),
    "hangs": (at_step(1, 3, _hang), [[], []]),
    "killed": (under_way(1, 3, lambda: os.kill(os.getpid(), signal.SIGKILL)), [[], []]),
    "leader_killed": (at_step(0, 3, lambda: os.kill(os.getpid(), signal.SIGKILL)), [[], []]),
    "late": (_late, [[], []]),
    "stopped": (_stopped, [[], []]),
    "config": (lambda rank: None, [[], ["optimizer.lr=0.5"]]),
    "mistake": (lambda rank: None, [["train.gradient_accumulation=4"]] * 2),
    "own_mistake": (lambda rank: None, [[], ["train.stepz=3"]]),
    "version": (_version, [[], []]),
    "data": (_data, [[], []]),
    "no_room": (_no_room, [[], []]),
    "overflow": (_overflow, [GROWING] * 2),
    "skipped": (_overflow, [["guard.nonfinite=skip", "guard.max_skips=1"]] * 2),
    "divided": (_overflow, [["guard.nonfinite=skip", "guard.max_skips=1"]] * 2),
    "absent": (lambda rank: os._exit(0) if rank else None, [[], []]),
}
WAITING = ("hangs", "absent")  # until the time-out
LATE = ("absent", "hangs", "killed", "leader_killed", "late")  # to end, and idle meanwhile
MODES = {"overflow": "zero1", "divided": "zero3"}  # of others ddp


class Forks:
    """Ranks that run, each with overrides of its own, and perhaps a fault of FAULTS."""

    def __init__(self, overrides: Sequence[list[str]], log: Path, fault: str = "") -> None:
        self.logs = [log.with_name(f"{log.name}.{rank}") for rank in range(len(overrides))]
        self.processes: list[ForkedChild] = []
        for rank, own in enumerate(environments(len(overrides))):
            module, words = ("tests.parallel.forks", [fault, f"{rank}"]) if fault else ("ttrain", [])
            command = ["python", "-m", module, *words, *overrides[rank]]
            self.processes.append(ForkedChild(command, {"OMP_NUM_THREADS": "1", **own}, self.logs[rank]))

    @property
    def codes(self) -> list[int | None]:
        """Exit codes; None while a rank runs."""
        return [process.poll() for process in self.processes]

    def poll(self) -> bool:
        """True if all have ended."""
        return None not in self.codes

    def wait(self, limit: float = LIMIT) -> bool:
        """True if all end in time; the others are killed."""
        until = time.monotonic() + limit
        for process in self.processes:
            process.wait(max(0.0, until - time.monotonic()))
        in_time = self.poll()
        for process in self.processes:
            process.kill()
            process.wait()
        return in_time

    def said(self, *starts: str) -> list[list[str]]:
        """Lines of the output that start so, by rank."""
        lines = [log.read_text(errors="replace").splitlines() for log in self.logs]
        return [[line for line in own if line.startswith(starts)] for own in lines]


def begun(names: Sequence[str], folder: Path) -> dict[str, Forks]:
    """Start pairs of ranks at once, one of which has a fault."""
    found = {}
    for name in names:
        mode, timeout = MODES.get(name, "ddp"), 3 if name in WAITING else 60
        common = [*TINY, f"parallel={mode}", f"parallel.timeout={timeout}", f"run.dir={folder / name}"]
        found[name] = Forks([[*common, *own] for own in FAULTS[name][1]], folder / f"{name}.log", name)
    return found


def outcomes(ranks: dict[str, Forks], folder: Path) -> dict[str, dict[str, Any]]:
    """Wait for pairs of ranks to end; return the outcomes by fault."""
    return {
        name: {
            "ended": pair.wait(), "codes": pair.codes, "said": pair.said("ttrain: ", "Traceback"),
            "saved": sorted(path.name for path in (folder / name / "checkpoints").glob("*")),
            "notes": [line for own in pair.said("This was", "WARNING") for line in own],
        }
        for name, pair in ranks.items()
    }  # fmt: skip


if __name__ == "__main__":  # a rank with a fault
    from ttrain.cli import main

    FAULTS[sys.argv[1]][0](int(sys.argv[2]))
    sys.exit(main(sys.argv[3:]))
