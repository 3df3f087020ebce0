"""Runs a benchmark: starts, memory and steps in turns of every contender; results are saved as they come."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import Any

import psutil

from ttrain.bench.contender import loss_difference, problem
from ttrain.bench.entrants import Entrant, modelled
from ttrain.bench.modelled import enter_times
from ttrain.bench.process import Neighbour, Worker, WorkerFailed, caches
from ttrain.bench.results import MOCKED, SIMULATED, CaseResult, Result, Row, finite
from ttrain.bench.settings import BenchConfig
from ttrain.bench.workload import Case
from ttrain.core.units import format_bytes, format_duration
from ttrain.device.info import MOCK, SIMULATOR, info_of

Clock = Callable[[], float]
LEAST_ROUNDS = 3
MOST_STEPS = 2000  # per turn
NOTICE_SECONDS = 0.3  # an engine looks for neighbours ten times a second
COMPILERS = ("traced", "compile", "compile_all")  # keep machine code on disk: a cold start differs from a warm one
# Who is built first: whoever no longer fits into memory side by side with the others is left out.
_ORDER = ("eager", "compile", "static", "traced", "compile_all", "dynamic")
_SPARE = 1.15  # times the memory of the largest contender so far that has to be free for the next one
# glibc keeps up to 64 MiB of free memory for later; here it gives back what is more than a MiB, so that it is not taken
# for memory in use.
_TRIMMING = {"MALLOC_TRIM_THRESHOLD_": str(2**20), "MALLOC_TOP_PAD_": "0"}


@dataclass
class Seat:
    """A contender at a case, with its row, its process and the size of its turns."""

    entrant: Entrant
    row: Row
    open: Callable[..., Worker]  # (entrant, environment) -> a process that has built nothing yet
    worker: Worker | None = None  # stays from turn to turn; None: started anew for each
    step_seconds: float = 0.0
    settle: int = 1  # steps that warm the caches up again and are not timed
    timed: int = 1
    beside: Neighbour | None = None  # runs meanwhile

    def size(self, turn_seconds: float) -> None:
        """Fit a turn into `turn_seconds`: at least one untimed and one timed step. Beside a neighbour it begins with
        steps in which it can be noticed.
        """
        step_seconds = max(self.step_seconds, 1e-9)
        steps = min(max(round(turn_seconds / step_seconds), 2), MOST_STEPS)
        settle = max(1, steps // 5)
        self.timed = steps - settle
        noticed = 0 if self.beside is None else min(ceil(NOTICE_SECONDS / step_seconds), 10 * MOST_STEPS)
        self.settle = max(settle, noticed)

    def turn(self, each: bool) -> None:
        """Settle, time, and enter the times into the row."""
        with nullcontext() if self.beside is None else self.beside.running():
            if self.worker is not None:
                self.row.turn(self.worker.ask("turn", self.settle, self.timed, each))
                return
            with self.once() as (worker, _):
                self.row.turn(worker.ask("turn", self.settle, self.timed, each))

    @contextmanager
    def once(
        self, environment: Mapping[str, str] | None = None, memory: bool = False
    ) -> Iterator[tuple[Worker, dict[str, Any]]]:
        """Start a process, give it with what its start found, and end it."""
        worker = self.open(self.entrant, environment)
        try:
            answer = worker.ask("start", memory)
            self.row.description = answer["description"]
            yield worker, answer
        finally:
            worker.close()


def take_turns(
    seats: Sequence[Seat], rounds: int, seconds: float, each: bool, seed: int, clock: Clock = time.perf_counter
) -> Iterator[int]:
    """Give everybody a turn in every round, in random order, until all rounds are done or the time is up after
    LEAST_ROUNDS. Yield the number of rounds done. Who fails takes no further part.
    """
    order, stop = random.Random(seed), clock() + seconds
    for number in range(rounds):
        if number >= LEAST_ROUNDS and clock() >= stop:
            return
        shuffled = [seat for seat in seats if seat.row.status != "failed"]
        order.shuffle(shuffled)
        for seat in shuffled:
            with _failing(seat.row):
                seat.turn(each)
        yield number + 1


@dataclass
class Bench:
    """One run of a benchmark. `save` is called whenever `result` has grown, `say` with every finished stage."""

    config: BenchConfig
    entrants: list[Entrant]
    seed: int
    plugins: list[str]
    result: Result
    save: Callable[[], None]
    say: Callable[[str], None] = print
    make_worker: Callable[..., Worker] = Worker
    _folder: Path = field(default_factory=Path)

    def run(self) -> None:
        """Measure everything. Interrupted by KeyboardInterrupt, what was found so far is in `result`."""
        resident = self.config.resident_batch
        with tempfile.TemporaryDirectory(prefix="ttrain-bench-", ignore_cleanup_errors=True) as folder:
            for size in dict.fromkeys(self.config.size):
                for precision in dict.fromkeys(self.config.precision):
                    self._folder = Path(folder) / f"{size} {precision}"
                    # The factors of a product stay on the device anyway.
                    self._case(Case(size, precision, self.seed, resident and not size.startswith("mm")))
                    self.save()
        self.result.complete = True
        self.save()

    def _case(self, case: Case) -> None:
        entrants = [entrant for entrant in self.entrants if entrant.can_do(case)]
        found = CaseResult.of(case, [Row(entrant.name, entrant.side) for entrant in entrants])
        self.result.cases.append(found)
        if any(modelled(entrant.device) for entrant in entrants):
            with self._stage(found, "cost model"):
                enter_times(case, found, entrants)
            return

        def opened(entrant: Entrant, environment: Mapping[str, str] | None = None) -> Worker:
            order = {
                "case": case.plain(), "name": entrant.own, "mode": entrant.mode, "plugins": self.plugins,
                "device": asdict(entrant.device), "engine": asdict(entrant.engine),
            }  # fmt: skip
            return self.make_worker(order, self._folder, entrant.ranks, environment)

        seats = [Seat(entrant, row, opened) for entrant, row in zip(entrants, found.rows, strict=True)]
        if "start" in self.config.measure:
            self._starts(found, seats, case.seed)
        if "memory" in self.config.measure:
            self._memory(found, seats)
        if "steps" in self.config.measure:
            self._steps(found, [seat for seat in seats if seat.row.status != "failed"], case.seed)

    @contextmanager
    def _stage(self, found: CaseResult, label: str, row: Row | None = None) -> Iterator[None]:
        """Say how long a stage took, and why its contender failed where it did."""
        started = time.monotonic()
        with nullcontext() if row is None else _failing(row):
            yield
        why = f": {row.reason}" if row is not None and row.reason else ""
        passed = format_duration(time.monotonic() - started)
        self.say(f"{found.size} in {found.precision}: {label}{'' if row is None else row.contender}{why} ({passed})")
        self.save()

    def _starts(self, found: CaseResult, seats: Sequence[Seat], seed: int) -> None:
        """Time starts in turns, each round with empty caches of its own; whoever compiles starts a second time."""
        order = random.Random(seed)
        for number in range(self.config.starts):
            for seat in order.sample(seats, len(seats)):
                row, environment = seat.row, caches(self._folder / f"caches{number}" / seat.entrant.name)
                samples = {"cold ": row.cold_s, "warm ": row.warm_s}
                for heat, kept in samples.items() if seat.entrant.own in COMPILERS else [("", row.warm_s)]:
                    if row.status != "failed":
                        with self._stage(found, f"{heat}start of ", row), seat.once(environment) as (_, answer):
                            kept.append(answer["first_step_s"])
                            row.imports_s = answer["imports_s"]

    def _memory(self, found: CaseResult, seats: Sequence[Seat]) -> None:
        for row, seat in ((seat.row, seat) for seat in seats if seat.row.status != "failed"):
            with self._stage(found, "memory of ", row), seat.once(_TRIMMING, memory=True) as (_, answer):
                row.base_bytes, row.peak_bytes = answer["base_bytes"], answer["peak_bytes"]
                row.steady_bytes, row.planned_bytes = answer["steady_bytes"], answer["planned_bytes"]

    def _steps(self, found: CaseResult, listed: Sequence[Seat], seed: int) -> None:
        """Build everybody, check that they do the same work, and let them take turns."""
        with ExitStack() as opened:
            seats = self._build(found, listed, opened)
            if self.config.beside is not None:
                seats += [beside for seat in list(seats) for beside in self._beside(found, seat, opened)]
            for seat in seats:
                seat.size(self.config.seconds / (self.config.rounds * len(seats)))
            cpu, each = _CpuShare(), found.device.get("name") == "cpu" or found.basis == MOCKED
            with self._stage(found, "steps"):
                for _ in take_turns(seats, self.config.rounds, self.config.seconds, each, seed):
                    found.others_cpu = cpu.others()
            for seat in seats:
                if seat.worker is not None and seat.beside is None and seat.row.status == "ok":
                    with _failing(seat.row):
                        self._facts(found, seat.row, seat.worker)

    def _build(self, found: CaseResult, listed: Sequence[Seat], opened: ExitStack) -> list[Seat]:
        """Start and check contenders one after the other; the first one is the reference of the others."""
        reference: tuple[str, list[float]] | None = None
        largest, seats = 0, list[Seat]()
        for seat in sorted(listed, key=lambda each: _ORDER.index(each.entrant.own)):
            row, free, device = seat.row, psutil.virtual_memory().available, seat.entrant.device
            if len(seats) > 1 and largest * _SPARE > free:
                row.status = "left out"
                row.reason = f"the largest so far needs {format_bytes(largest)}, {format_bytes(free)} are free"
                continue
            with self._stage(found, "building ", row), ExitStack() as one:
                worker, answer = one.enter_context(seat.once())
                largest = max(largest, answer["rss"] * seat.entrant.ranks)
                row.losses, seat.step_seconds = [finite(loss) for loss in answer["losses"]], answer["step_seconds"]
                if info_of(device).mode(device) == MOCK:
                    row.status, found.basis = "ok", MOCKED
                else:
                    reference = self._check(found, row, worker, answer["losses"], reference)
                if not found.device or info_of(device).exclusive(device):
                    self._facts(found, row, worker)
                if not info_of(device).exclusive(device):
                    seat.worker = worker
                    opened.push(one.pop_all())
                seats.append(seat)
        return seats

    def _check(
        self,
        found: CaseResult,
        row: Row,
        worker: Worker,
        losses: list[float],
        reference: tuple[str, list[float]] | None,
    ) -> tuple[str, list[float]]:
        """Compare a contender with the reference, or make it that where there is none. Return the reference."""
        weights = str(self._folder / "weights")
        if reference is None:
            worker.ask("write_weights", weights)
            row.status, row.checked_against = "ok", row.contender
            return row.contender, losses
        name, expected = reference
        loss, way = loss_difference(losses, expected), worker.ask("weight_difference", weights)
        row.checked_against, row.loss_difference, row.weight_difference = name, finite(loss), finite(way)
        row.reason = problem(found.precision, loss, way, name)
        row.status = "invalid" if row.reason else "ok"
        return reference

    def _facts(self, found: CaseResult, row: Row, worker: Worker) -> None:
        """Enter what a contender tells of itself and of its device."""
        answer = worker.ask("facts", "memory" in self.config.measure)
        row.facts, row.planned_ms = answer["facts"], answer["planned_ms"]
        found.device = found.device or answer["device"]
        found.basis = SIMULATED if found.device.get("mode") == SIMULATOR else found.basis

    def _beside(self, found: CaseResult, seat: Seat, opened: ExitStack) -> list[Seat]:
        """Return a second seat of a contender beside a neighbour, with a row of its own; none where that fails."""
        row = Row(f"{seat.row.contender} beside", seat.row.side, seat.row.description, seat.row.status)
        row.checked_against, row.beside = seat.row.checked_against, self.config.beside
        found.rows.append(row)
        with self._stage(found, "neighbour of ", row):
            same = None
            if self.config.beside == "same":
                same, _ = opened.enter_context(seat.once())
            near = Neighbour(same)
            opened.callback(near.close)
            return [replace(seat, row=row, beside=near)]
        return []


@contextmanager
def _failing(row: Row) -> Iterator[None]:
    """Take a contender out whose process fails."""
    try:
        yield
    except WorkerFailed as error:
        row.fail(str(error))


class _CpuShare:
    """Share of all cores that other processes used since the start."""

    def __init__(self) -> None:
        self._busy, self._own, self._start = self._read()

    def _read(self) -> tuple[float, float, float]:
        times, process = psutil.cpu_times(), psutil.Process()
        idle = times.idle + getattr(times, "iowait", 0.0)
        own = [each.cpu_times() for each in (process, *process.children(recursive=True))]
        return sum(times[:8]) - idle, sum(each.user + each.system for each in own), time.perf_counter()

    def others(self) -> float:
        busy, own, now = self._read()
        elapsed = max(now - self._start, 1e-9) * (psutil.cpu_count() or 1)
        return max(0.0, (busy - self._busy) - (own - self._own)) / elapsed
