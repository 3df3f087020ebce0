"""Contenders of a benchmark as their starter sees them: who they are, their rows, their processes and their turns."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import Any

from ttrain.bench.process import Neighbour, Worker, WorkerFailed
from ttrain.bench.results import OURS, PYTORCH, Row
from ttrain.bench.settings import BASELINES, BenchConfig
from ttrain.bench.workload import Case, TrainingWork
from ttrain.device.settings import DeviceConfig
from ttrain.engine.settings import EngineConfig

Clock = Callable[[], float]
LEAST_ROUNDS = 3
MOST_STEPS = 2000  # per turn
NOTICE_SECONDS = 0.3  # an engine looks for neighbours ten times a second


@dataclass
class Seat:
    """An engine or a baseline, the device it runs on and the number of its processes; at a case also its row."""

    own: str
    device: DeviceConfig
    engine: EngineConfig
    variant: str = ""
    mode: str = "none"  # of `parallel`
    ranks: int = 1
    row: Row = field(default_factory=lambda: Row("", ""))
    order: dict[str, Any] = field(default_factory=dict)  # what its process is told to build
    folder: Path = field(default_factory=Path)  # of what its process prints
    make_worker: Callable[..., Worker] = Worker
    worker: Worker | None = None  # stays from turn to turn; None: started anew for each
    step_seconds: float = 0.0
    settle: int = 1  # steps that warm the caches up again and are not timed
    timed: int = 1
    beside: Neighbour | None = None  # runs meanwhile

    @property
    def name(self) -> str:
        shared = f" {self.mode} x{self.ranks}" if self.ranks > 1 else ""
        return f"{self.own}{shared}{', ' if self.variant else ''}{self.variant}"

    @property
    def side(self) -> str:
        return PYTORCH if self.own in BASELINES else OURS

    def can_do(self, case: Case) -> bool:
        """Return False for a product by more than one way of PyTorch, or shared."""
        return isinstance(case.work, TrainingWork) or (self.ranks == 1 and self.own not in ("compile", "compile_all"))

    def at(self, case: Case, folder: Path, plugins: list[str], make_worker: Callable[..., Worker]) -> Seat:
        """Return the same contender at a case."""
        order = {
            "case": asdict(case), "name": self.own, "mode": self.mode, "plugins": plugins,
            "device": asdict(self.device), "engine": asdict(self.engine),
        }  # fmt: skip
        row = Row(self.name, self.side)
        return replace(self, row=row, order=order, folder=folder, make_worker=make_worker)

    def size(self, turn_seconds: float) -> None:
        """Fit a turn into `turn_seconds`: at least one untimed and one timed step.

        Beside a neighbour it begins with steps in which it can be noticed.
        """
        step_seconds = max(self.step_seconds, 1e-9)
        steps = min(max(round(turn_seconds / step_seconds), 2), MOST_STEPS)
        settle = max(1, steps // 5)
        self.timed = steps - settle
        noticed = 0 if self.beside is None else min(ceil(NOTICE_SECONDS / step_seconds), 10 * MOST_STEPS)
        self.settle = max(settle, noticed)

    def turn(self, each: bool) -> None:
        """Settle, time, and enter the times into the row."""
        with ExitStack() as stack:
            if self.beside is not None:
                stack.enter_context(self.beside.running())
            worker = self.worker or stack.enter_context(self.once())[0]
            self.row.turn(worker.ask("turn", self.settle, self.timed, each))

    @contextmanager
    def once(
        self, environment: Mapping[str, str] | None = None, memory: bool = False
    ) -> Iterator[tuple[Worker, dict[str, Any]]]:
        """Start a process, give it with what its start found, and end it."""
        worker = self.make_worker(self.order, self.folder, self.ranks, environment)
        try:
            answer = worker.ask("start", memory)
            self.row.description = answer["description"]
            yield worker, answer
        finally:
            worker.close()


def seats_of(config: BenchConfig, variants: Mapping[str, tuple[DeviceConfig, EngineConfig]]) -> list[Seat]:
    """Return who takes part, in the order of the rows.

    `variants` are the configs of device and engine by variant; the first is that of the baselines.
    """
    found = []
    for name in dict.fromkeys([*config.baselines, *config.engines]):
        if name in BASELINES:
            found.append(Seat(name, *next(iter(variants.values()))))
        else:
            found += [Seat(name, *both, variant) for variant, both in variants.items()]
    if config.ranks == 1:
        return found
    shared = []
    for one in found:
        shared += [one] if one.side == OURS else []
        modes = ("ddp", "zero1") if one.side == OURS else ("ddp",)
        shared += [replace(one, mode=mode, ranks=config.ranks) for mode in modes]
    return shared


def take_turns(
    seats: Sequence[Seat], rounds: int, seconds: float, each: bool, seed: int, clock: Clock = time.perf_counter
) -> None:
    """Give everybody a turn in every round, in random order.

    It ends with the last round, or when the time is up after LEAST_ROUNDS. One that fails takes no further part.
    """
    order, stop = random.Random(seed), clock() + seconds
    for number in range(rounds):
        if number >= LEAST_ROUNDS and clock() >= stop:
            return
        shuffled = [seat for seat in seats if seat.row.status != "failed"]
        order.shuffle(shuffled)
        for seat in shuffled:
            with failing(seat.row):
                seat.turn(each)


@contextmanager
def failing(row: Row) -> Iterator[None]:
    """Take a contender out whose process fails."""
    try:
        yield
    except WorkerFailed as error:
        row.status, row.reason = "failed", str(error)
