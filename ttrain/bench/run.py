"""Runs a benchmark: starts, memory and steps in turns of every contender; results are saved as they come."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from ttrain.bench.contender import loss_difference, problem
from ttrain.bench.modelled import enter_times, modelled
from ttrain.bench.process import Neighbour, Worker, caches
from ttrain.bench.results import MOCKED, SIMULATED, CaseResult, Result, Row, finite
from ttrain.bench.seats import Seat, failing, take_turns
from ttrain.bench.settings import BenchConfig
from ttrain.bench.workload import Case
from ttrain.core.cores import OtherWork, affinity_cores
from ttrain.core.units import format_bytes, format_duration
from ttrain.device.info import MOCK, SIMULATOR, info_of

COMPILERS = ("traced", "compile", "compile_all")  # keep machine code on disk: a cold start differs from a warm one
# Who is built first: whoever no longer fits into memory side by side with the others is left out.
_ORDER = ("eager", "compile", "static", "traced", "compile_all", "dynamic")
_SPARE = 1.15  # times the memory of the largest contender so far that has to be free for the next one
# glibc keeps up to 64 MiB of free memory for later; here it gives back what is more than a MiB, so that it is not taken
# for memory in use.
_TRIMMING = {"MALLOC_TRIM_THRESHOLD_": str(2**20), "MALLOC_TOP_PAD_": "0"}


@dataclass
class Bench:
    """One run of a benchmark. `save` is called whenever `result` has grown, `say` with every finished stage."""

    config: BenchConfig
    seats: list[Seat]
    seed: int
    plugins: list[str]
    result: Result
    save: Callable[[], None]
    say: Callable[[str], None] = print
    make_worker: Callable[..., Worker] = Worker

    def run(self) -> None:
        """Measure everything. Interrupted by KeyboardInterrupt, what was found so far is in `result`."""
        resident = self.config.resident_batch
        with tempfile.TemporaryDirectory(prefix="ttrain-bench-", ignore_cleanup_errors=True) as folder:
            for size in dict.fromkeys(self.config.size):
                for precision in dict.fromkeys(self.config.precision):
                    # The factors of a product stay on the device anyway.
                    case = Case(size, precision, self.seed, resident and not size.startswith("mm"))
                    self._case(case, Path(folder) / f"{size} {precision}")
                    self.save()
        self.result.complete = True
        self.save()

    def _case(self, case: Case, folder: Path) -> None:
        seats = [seat.at(case, folder, self.plugins, self.make_worker) for seat in self.seats if seat.can_do(case)]
        found = CaseResult.of(case, [seat.row for seat in seats])
        self.result.cases.append(found)
        if any(modelled(seat.device) for seat in seats):
            with self._stage(found, "cost model"):
                enter_times(case, found, seats)
            return
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
        with nullcontext() if row is None else failing(row):
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
                row, environment = seat.row, caches(seat.folder / f"caches{number}" / seat.name)
                samples = {"cold ": row.cold_s, "warm ": row.warm_s}
                for heat, kept in samples.items() if seat.own in COMPILERS else [("", row.warm_s)]:
                    if row.status != "failed":
                        with self._stage(found, f"{heat}start of ", row), seat.once(environment) as (_, answer):
                            kept.append(answer["first_step_s"])
                            row.imports_s = answer["imports_s"]

    def _memory(self, found: CaseResult, seats: Sequence[Seat]) -> None:
        for row, seat in ((seat.row, seat) for seat in seats if seat.row.status != "failed"):
            with self._stage(found, "memory of ", row), seat.once(_TRIMMING, memory=True) as (_, answer):
                for key in ("base_bytes", "peak_bytes", "steady_bytes", "planned_bytes"):
                    setattr(row, key, answer[key])

    def _steps(self, found: CaseResult, listed: Sequence[Seat], seed: int) -> None:
        """Build everybody, check that they do the same work, and let them take turns."""
        with ExitStack() as opened:
            seats = self._build(found, listed, opened)
            if self.config.beside is not None:
                seats += [beside for seat in list(seats) for beside in self._beside(found, seat, opened)]
            for seat in seats:
                seat.size(self.config.seconds / (self.config.rounds * len(seats)))
            others, each = OtherWork(children=True), found.device.get("name") == "cpu" or found.basis == MOCKED
            with self._stage(found, "steps"):
                try:
                    take_turns(seats, self.config.rounds, self.config.seconds, each, seed)
                finally:
                    found.others_cpu = others.cores() / affinity_cores()
            for seat in seats:
                if seat.worker is not None and seat.beside is None and seat.row.status == "ok":
                    with failing(seat.row):
                        self._facts(found, seat.row, seat.worker)

    def _build(self, found: CaseResult, listed: Sequence[Seat], opened: ExitStack) -> list[Seat]:
        """Start and check contenders one after the other; the first one is the reference of the others."""
        reference: tuple[str, list[float]] | None = None
        largest, seats = 0, list[Seat]()
        for seat in sorted(listed, key=lambda each: _ORDER.index(each.own)):
            row, free, device = seat.row, psutil.virtual_memory().available, seat.device
            if len(seats) > 1 and largest * _SPARE > free:
                row.status = "left out"
                row.reason = f"the largest so far needs {format_bytes(largest)}, {format_bytes(free)} are free"
                continue
            with self._stage(found, "building ", row), ExitStack() as one:
                worker, answer = one.enter_context(seat.once())
                largest = max(largest, answer["rss"] * seat.ranks)
                row.losses, seat.step_seconds = [finite(loss) for loss in answer["losses"]], answer["step_seconds"]
                if info_of(device).mode(device) == MOCK:
                    row.status, found.basis = "ok", MOCKED
                else:
                    reference = self._check(found, seat, worker, answer["losses"], reference)
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
        seat: Seat,
        worker: Worker,
        losses: list[float],
        reference: tuple[str, list[float]] | None,
    ) -> tuple[str, list[float]]:
        """Compare a contender with the reference, or make it that where there is none. Return the reference."""
        row, weights = seat.row, str(seat.folder / "weights")
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
            near = Neighbour(opened.enter_context(seat.once())[0] if self.config.beside == "same" else None)
            opened.callback(near.close)
            return [replace(seat, row=row, beside=near)]
        return []
