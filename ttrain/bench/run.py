"""Run a benchmark: starts, memory and steps of the contenders, in turns; results are saved as they come."""

from __future__ import annotations

import math
import os
import random
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import psutil

import ttrain
from ttrain.bench.contender import STEPS, enter_times, loss_difference, modelled, problem
from ttrain.bench.results import MOCKED, OURS, PYTORCH, SIMULATED, CaseResult, Result, Row, finite
from ttrain.bench.settings import BASELINES, BenchConfig
from ttrain.bench.workload import Case
from ttrain.core.cores import OtherWork, affinity_cores, default_threads
from ttrain.core.units import format_bytes, format_duration
from ttrain.core.waiting import Waiting, waited_for
from ttrain.device.info import MOCK, SIMULATOR, info_of
from ttrain.device.settings import DeviceConfig
from ttrain.engine.settings import EngineConfig
from ttrain.train.supervise.child import Child, describe_exit
from ttrain.train.supervise.launch import rank_environment

# These keep machine code on disk: a cold start differs from a warm one.
COMPILERS = ("traced", "compile", "compile_all", "reduce_overhead")
# Who is built first: whoever no longer fits into memory side by side with the others is left out.
_ORDER = ("eager", "compile", "static", "traced", "reduce_overhead", "compile_all", "dynamic")
_SPARE = 1.15  # times the memory of the largest contender so far that has to be free for the next one
LEAST_ROUNDS = 3
MOST_STEPS = 2000  # per turn
SILENCE_SECONDS = 1200.0  # longest wait for an answer; a cold compilation is part of one
_CLOSING_SECONDS = 5.0
# glibc keeps up to 64 MiB of free memory for later; here it gives back what is more than a MiB, so that it is not taken
# for memory in use.
_TRIMMING = {"MALLOC_TRIM_THRESHOLD_": str(2**20), "MALLOC_TOP_PAD_": "0"}


class WorkerFailed(Exception):
    """A contender raised an error, or its measuring process ended."""


class Worker:
    """The measuring process of a contender, or one for each rank of it. See `child` for the messages."""

    def __init__(self, folder: Path, ranks: int = 1, environment: Mapping[str, str] | None = None) -> None:
        """`folder` takes what the processes print."""
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / "output.txt"
        root = str(Path(ttrain.__file__).resolve().parent.parent)  # so that it finds this very ttrain
        path = {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
        self.links, self.children = list[Any](), list[Child]()
        for place in _places(ranks):
            ours, theirs = Pipe()
            command = [sys.executable, "-m", "ttrain.bench.child", str(theirs.fileno())]
            given = {**path, **place, **(environment or {})}
            self.children.append(Child(command, given, self._log, signal.SIGKILL, [theirs.fileno()]))
            theirs.close()
            self.links.append(ours)

    def ask(self, *message: Any) -> Any:
        """Give a message to all processes and return the answer of the first. Raises WorkerFailed."""
        for link in self.links:
            with suppress(OSError):  # the answer that is missing tells why
                link.send(message)
        answers = [self._answer(number) for number in range(len(self.links))]
        if failed := next((answer["failed"] for answer in answers if "failed" in answer), None):
            raise WorkerFailed(failed)
        return answers[0]["ok"]

    def _answer(self, number: int) -> dict[str, Any]:
        link = self.links[number]
        try:
            if link.poll(SILENCE_SECONDS):
                return link.recv()
        except (EOFError, OSError):
            words = [line.strip() for line in self._log.read_text("utf-8", errors="replace").splitlines()]
            last = f": {next(filter(None, reversed(words)), '')[:240]}".rstrip(": ")
            code = self.children[number].wait() or 0
            raise WorkerFailed(f"the measuring process ended: {describe_exit(code)}{last}") from None
        waited = format_duration(SILENCE_SECONDS)
        raise WorkerFailed(f"nothing happened for {waited}; the measuring process was ended")

    def close(self) -> None:
        """Let the processes give back what they hold, and end them."""
        for link in self.links:
            link.close()
        for child in self.children:
            child.wait(_CLOSING_SECONDS)
            child.kill()
            child.wait()


def _places(ranks: int) -> list[dict[str, str]]:
    """Return the environments that make processes ranks of one another; an empty one for a process by itself."""
    if ranks == 1:
        return [{}]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        shared = {**rank_environment(ranks, probe.getsockname()[1]), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


@dataclass(eq=False)
class Entry:
    """A contender at a case: its row, its process and the size of its turns."""

    own: str  # of an engine or a baseline
    case: Case
    folder: Path  # of what its process prints
    mode: str = "none"  # of `parallel`
    ranks: int = 1
    row: Row = field(init=False)
    worker: Worker | None = None  # stays from turn to turn; None: started anew for each
    settle: int = 1  # steps that warm the caches up again and are not timed
    timed: int = 1

    def __post_init__(self) -> None:
        shared = f" {self.mode} x{self.ranks}" if self.ranks > 1 else ""
        self.row = Row(f"{self.own}{shared}", PYTORCH if self.own in BASELINES else OURS)

    def size(self, turn_seconds: float, step_seconds: float) -> None:
        """Fit a turn into `turn_seconds`: at least one timed step, and an untimed one unless a step takes longer."""
        steps = min(max(round(turn_seconds / max(step_seconds, 1e-9)), 1), MOST_STEPS)
        self.settle = 0 if steps == 1 else max(1, steps // 5)
        self.timed = steps - self.settle


def entries_of(config: BenchConfig, case: Case, folder: Path) -> list[Entry]:
    """Return who takes part, in the order of the rows."""
    found = []
    for name in dict.fromkeys([*config.baselines, *config.engines]):
        ours = name not in BASELINES
        ways = [("none", 1)] if ours or config.ranks == 1 else []
        if config.ranks > 1:
            ways += [(mode, config.ranks) for mode in (("ddp", "zero1") if ours else ("ddp",))]
        found += [Entry(name, case, folder, *way) for way in ways]
    return found


@contextmanager
def failing(row: Row) -> Iterator[None]:
    """Take a contender out whose process fails."""
    try:
        yield
    except WorkerFailed as error:
        row.status, row.reason = "failed", str(error)


@dataclass
class Bench:
    """One run of a benchmark. `save` is called whenever `result` has grown, `say` with every finished stage."""

    config: BenchConfig
    device: DeviceConfig
    engine: EngineConfig
    seed: int
    plugins: list[str]
    result: Result
    save: Callable[[], None]
    say: Callable[[str], None] = print
    make_worker: Callable[..., Worker] = Worker
    clock: Callable[[], float] = time.perf_counter

    def run(self) -> None:
        """Measure everything. Interrupted by KeyboardInterrupt, what was found so far is in `result`."""
        with tempfile.TemporaryDirectory(prefix="ttrain-bench-", ignore_cleanup_errors=True) as folder:
            for size in dict.fromkeys(self.config.size):
                for precision in dict.fromkeys(self.config.precision):
                    case = Case(size, precision, self.seed, self.config.resident_batch)
                    self._case(case, Path(folder) / f"{size} {precision}")
                    self.save()
        self.result.complete = True
        self.save()

    def _case(self, case: Case, folder: Path) -> None:
        entries = entries_of(self.config, case, folder)
        found = CaseResult.of(case, [entry.row for entry in entries])
        self.result.cases.append(found)
        if modelled(self.device):
            with self._stage(found, "cost model"):
                for entry in entries:
                    enter_times(case, found, entry.row, self.device, entry.own)
            return
        if "start" in self.config.measure:
            self._starts(found, entries)
        if "memory" in self.config.measure:
            self._memory(found, entries)
        if "steps" in self.config.measure:
            self._steps(found, [entry for entry in entries if entry.row.status != "failed"])

    @contextmanager
    def _stage(self, found: CaseResult, label: str, row: Row | None = None) -> Iterator[None]:
        """Say how long a stage took, and why its contender failed where it did."""
        what = f"{found.size} in {found.precision}: {label}{'' if row is None else row.contender}"
        started = time.monotonic()
        with Waiting(what, self.say), nullcontext() if row is None else failing(row):
            yield
        why = f": {row.reason}" if row is not None and row.reason else ""
        self.say(f"{what}{why} ({format_duration(time.monotonic() - started)})")
        self.save()

    @contextmanager
    def _started(
        self, entry: Entry, environment: Mapping[str, str] | None = None, command: str = "start", *limit: float
    ) -> Iterator[tuple[Worker, dict[str, Any]]]:
        """Start a process of a contender, give it with what its start found, and end it. See Contender.start."""
        device = self.device
        if entry.ranks > 1:
            device = replace(device, threads=max(1, (device.threads or default_threads()) // entry.ranks))
        worker = self.make_worker(entry.folder, entry.ranks, environment)
        try:
            worker.ask("make", self.plugins, entry.own, replace(entry.case), device, self.engine, entry.mode)
            answer = worker.ask(command, *limit)
            entry.row.description = answer["description"]
            yield worker, answer
        finally:
            worker.close()

    def _starts(self, found: CaseResult, entries: Sequence[Entry]) -> None:
        """Time starts in turns, each round with its own empty caches. A contender that compiles starts twice."""
        order = random.Random(self.seed)
        for number in range(self.config.starts):
            for entry in order.sample(entries, len(entries)):
                row, environment = entry.row, caches(entry.folder / f"caches{number}" / entry.row.contender)
                samples = {"cold ": row.cold_s, "warm ": row.warm_s}
                for heat, kept in samples.items() if entry.own in COMPILERS else [("", row.warm_s)]:
                    if row.status != "failed":
                        label = f"{heat}start of "
                        with self._stage(found, label, row), self._started(entry, environment) as (_, answer):
                            kept.append(answer["first_step_s"])

    def _memory(self, found: CaseResult, entries: Sequence[Entry]) -> None:
        for row, entry in ((entry.row, entry) for entry in entries if entry.row.status != "failed"):
            with self._stage(found, "memory of ", row), self._started(entry, _TRIMMING, "memory") as (_, answer):
                for key in ("peak_bytes", "used_bytes", "planned_bytes"):
                    setattr(row, key, answer[key])

    def _steps(self, found: CaseResult, entries: Sequence[Entry]) -> None:
        """Build everybody, check that they do the same work, and let them take turns."""
        with ExitStack() as opened:
            built = self._build(found, entries, opened)
            for entry, step_seconds in built.items():
                entry.size(self.config.seconds / (self.config.rounds * len(built)), step_seconds)
            others, each = OtherWork(children=True), found.device.get("name") == "cpu" or found.basis == MOCKED
            with self._stage(found, "steps"):
                try:
                    self._take_turns([entry for entry in built if not entry.row.round_ms], each)
                finally:
                    found.others_cpu = others.cores() / affinity_cores()
            rounds = [len(entry.row.round_ms) for entry in built if entry.row.status == "ok"]
            if rounds and min(rounds) < self.config.rounds:
                of = f"{found.size} in {found.precision}: {min(rounds)} of {self.config.rounds} rounds"
                self.result.notes.append(f"{of} fitted into bench.seconds={self.config.seconds:g}.")
            # The first times a compiled product, whose rate counts for all.
            for entry in sorted(built, key=lambda each: each.own != "traced"):
                if entry.worker is not None and entry.row.status == "ok":
                    with failing(entry.row):
                        self._facts(found, entry.row, entry.worker)

    def _build(self, found: CaseResult, entries: Sequence[Entry], opened: ExitStack) -> dict[Entry, float]:
        """Start and check contenders one after the other, and return the seconds of a step of each."""
        largest, built, info = 0, dict[Entry, float](), info_of(self.device)
        steps, slow = STEPS, ""  # to compare; the reason to leave out other forms of PyTorch
        seconds = self.config.seconds if self.config.ranks == 1 else math.inf  # ranks would end at different steps
        for entry in sorted(entries, key=lambda each: _ORDER.index(each.own)):
            row, free = entry.row, psutil.virtual_memory().available
            if len(built) > 1 and largest * _SPARE > free:
                row.status = "left out"
                row.reason = f"the largest so far needs {format_bytes(largest)}, {format_bytes(free)} are free"
                continue
            if slow and entry.own in BASELINES:
                row.status, row.reason = "left out", slow
                continue
            with self._stage(found, "building ", row), ExitStack() as one:
                worker, answer = one.enter_context(self._started(entry, None, "start", steps, seconds))
                largest = max(largest, answer["rss"] * entry.ranks)
                row.losses = answer["losses"]
                if info.mode(self.device) == MOCK:
                    row.status, found.basis = "ok", MOCKED
                else:
                    _check(found, entry, worker)
                if not found.device or info.exclusive(self.device):
                    self._facts(found, row, worker)
                if not info.exclusive(self.device):
                    entry.worker = worker
                    opened.push(one.pop_all())
                built[entry] = answer["step_seconds"]
                if len(built) == 1:  # all others do as many steps as it did
                    steps, seconds = len(row.losses), math.inf
                if LEAST_ROUNDS * built[entry] > self.config.seconds:  # so it has no turn
                    row.round_ms = [1e3 * each for each in answer["later_s"]]
                    if row.side == PYTORCH:
                        slow = f"{LEAST_ROUNDS} steps of {row.contender} take longer than bench.seconds"
        return built

    def _take_turns(self, entries: Sequence[Entry], each: bool) -> None:
        """Give everybody a turn in every round, in random order.

        It ends with the last round, or when the time is up after LEAST_ROUNDS. One that fails takes no further part.
        """
        order, stop = random.Random(self.seed), self.clock() + self.config.seconds
        for number in waited_for(range(self.config.rounds), "Round"):
            if number >= LEAST_ROUNDS and self.clock() >= stop:
                return
            going = [entry for entry in entries if entry.row.status != "failed"]
            for entry in order.sample(going, len(going)):
                with failing(entry.row), ExitStack() as stack:
                    worker = entry.worker or stack.enter_context(self._started(entry))[0]
                    seconds = worker.ask("turn", entry.settle, entry.timed, each)
                    entry.row.round_ms.append(1e3 * statistics.median(seconds))

    def _facts(self, found: CaseResult, row: Row, worker: Worker) -> None:
        """Enter what a contender tells of itself and of its device."""
        answer = worker.ask("facts", "memory" in self.config.measure)
        row.facts, row.planned_ms = answer["facts"], answer["planned_ms"]
        found.device = found.device or answer["device"]
        found.basis = SIMULATED if found.device.get("mode") == SIMULATOR else found.basis


def _check(found: CaseResult, entry: Entry, worker: Worker) -> None:
    """Compare a contender with the reference of its case, or make it that where there is none."""
    row, weights = entry.row, str(entry.folder / "weights")
    reference = next((each for each in found.rows if each.checked_against == each.contender), None)
    if reference is None:
        worker.ask("write_weights", weights)
        row.status, row.checked_against = "ok", row.contender
        return
    loss, way = loss_difference(row.losses, reference.losses), worker.ask("weight_difference", weights)
    row.checked_against, row.loss_difference, row.weight_difference = reference.contender, finite(loss), finite(way)
    row.reason = problem(found.precision, loss, way, reference.contender)
    row.status = "invalid" if row.reason else "ok"


def caches(folder: Path) -> dict[str, str]:
    """Return the environment in which a process keeps all code that it compiles below a folder."""
    variables = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TTRAIN_CACHE", "XDG_CACHE_HOME"
    return {variable: str(folder / variable) for variable in variables}
