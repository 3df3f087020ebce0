"""Runs a benchmark: starts of single contenders first, then the interleaved steps; results are saved as they come."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import psutil

from ttrain.bench.contender import compiles
from ttrain.bench.process import Caches, Event, WorkerFailed, events
from ttrain.bench.progress import Progress
from ttrain.bench.results import JobResult, Result, Row
from ttrain.bench.settings import BenchConfig
from ttrain.bench.studies import Study
from ttrain.bench.workload import Job
from ttrain.core.errors import UserError
from ttrain.core.units import format_bytes, format_duration
from ttrain.device.settings import DeviceConfig
from ttrain.engine.settings import EngineConfig

Start = Callable[[Mapping[str, Any], Path, Mapping[str, str] | None], Iterator[Event]]
# Whom to leave out first where not all fit into memory side by side.
_EXPENDABLE = ("dynamic", "compile_all", "compile", "static", "traced", "eager")
_MEMORY_SHARE = 0.85  # of what is available


@dataclass
class Bench:
    """One run of a study. `save` is called whenever `result` has grown."""

    study: Study
    config: BenchConfig
    device: DeviceConfig
    engine: EngineConfig
    plugins: list[str]
    result: Result
    progress: Progress
    save: Callable[[], None] = lambda: None
    start: Start = events
    _numbers: Iterator[int] = field(default_factory=count)

    def run(self) -> None:
        """Measure everything. Interrupted by KeyboardInterrupt, what was found so far is in `result`."""
        with tempfile.TemporaryDirectory(prefix="ttrain-bench-", ignore_cleanup_errors=True) as folder:
            for job in self.study.jobs:
                self._job(job, Path(folder) / job.precision)
        self.result.complete = True
        self.save()

    def _job(self, job: Job, folder: Path) -> None:
        work, rows = job.work, {name: Row(name) for name in self.study.contenders}
        found = JobResult(work.title, job.precision, work.item_plural, work.items_per_step, asdict(work), rows)
        self.result.jobs.append(found)
        caches = Caches(folder / "caches")
        if self.config.startup:
            for row in rows.values():
                self._starts(job, row, folder, caches)
                self.save()
        taking_part = [name for name, row in rows.items() if row.status != "failed"]
        for name in _too_many(rows, taking_part):
            taking_part.remove(name)
        if taking_part:
            environment = caches.all() if self.config.startup else None
            self._together(job, found, taking_part, folder, environment)
        self.save()

    def _order(self, do: str, job: Job, contenders: list[str]) -> dict[str, Any]:
        return {
            "do": do, "job": job.to_dict(), "contenders": contenders, "plugins": self.plugins,
            "device": asdict(self.device), "engine": asdict(self.engine), "reference": self.study.reference,
            "seconds": self.config.seconds, "rounds": self.config.rounds,
        }  # fmt: skip

    def _starts(self, job: Job, row: Row, folder: Path, caches: Caches) -> None:
        """Cold and warm start of one contender, each in a new process."""
        two = compiles(row.contender)
        for temperature in ["cold", "warm"] if two else ["warm"]:
            label = f"{job.precision}: {f'{temperature} start' if two else 'start'} of {row.contender}"
            with self.progress.stage(label) as stage:
                order = self._order("alone", job, [row.contender])
                for event in self._events(order, folder, caches.of(row.contender), row):
                    note_start(row, event, temperature)
                stage.done(row.reason or f"first step after {format_duration(_first_step(row, temperature))}")
            if row.status == "failed":
                return

    def _together(
        self, job: Job, found: JobResult, names: list[str], folder: Path, environment: Mapping[str, str] | None
    ) -> None:
        rows = [found.rows[name] for name in names]
        with self.progress.stage(f"{job.precision}: interleaved steps") as stage:
            order = self._order("together", job, names)
            rounds = 0
            for event in self._events(order, folder, environment, *rows):
                note_event(found, event)
                if event["event"] == "building":
                    stage.tell(f"building {event['contender']}")
                elif event["event"] == "round":
                    rounds += 1
                    stage.tell(f"round {rounds} of {self.config.rounds}", rounds / self.config.rounds)
            stage.done(f"{rounds} rounds")

    def _events(
        self, order: Mapping[str, Any], folder: Path, environment: Mapping[str, str] | None, *rows: Row
    ) -> Iterator[Event]:
        """The events of one process; a process that dies fails the rows that it was started for."""
        try:
            place = folder / f"process{next(self._numbers)}"
            with closing(self.start(order, place, environment)) as found:  # type: ignore[type-var]
                for event in found:
                    if event["event"] == "refused":
                        raise UserError(event["reason"])
                    yield event
        except WorkerFailed as error:
            for row in rows:
                if row.status != "failed":
                    row.fail(str(error))


def note_start(row: Row, event: Event, temperature: str) -> None:
    """Enter what a start found into the row."""
    if event["event"] == "failed":
        row.fail(event["reason"])
        return
    if temperature == "cold":
        row.cold_s = event["first_step_s"]
        return
    row.warm_s, row.imports_s = event["first_step_s"], event["imports_s"]
    row.base_bytes, row.peak_bytes, row.steady_bytes = event["base_bytes"], event["peak_bytes"], event["steady_bytes"]
    row.losses, row.facts = event["losses"], event["facts"]
    row.side, row.description = event["side"], event["description"]


def note_event(found: JobResult, event: Event) -> None:
    """Enter one event of the interleaved process into the job's rows."""
    kind = event["event"]
    row = found.rows[event["contender"]] if "contender" in event else None
    if kind == "environment":
        found.device, found.parameters = event["device"], event["parameters"]
        found.flops_per_step, found.peak_flops = event["flops_per_step"], event["peak_flops"]
    elif kind == "round":
        found.others_cpu = event["others_cpu"]
        for turn in event["turns"]:
            _note_turn(found.rows[turn["contender"]], turn)
    elif row is not None:
        _note_contender(row, event)


def _note_contender(row: Row, event: Event) -> None:
    kind = event["event"]
    if kind == "failed":
        row.fail(event["reason"])
    elif kind == "built":
        row.side, row.description = event["side"], event["description"]
    elif kind == "checked":
        row.losses, row.checked_against = event["losses"], event["reference"]
        row.loss_difference, row.weight_difference = event["loss_difference"], event["weight_difference"]
        row.status, row.reason = ("invalid", event["problem"]) if event["problem"] else ("ok", None)
    elif kind == "facts":
        row.facts = event["facts"]


def _note_turn(row: Row, turn: Mapping[str, Any]) -> None:
    times = sorted(1e3 * seconds for seconds in turn["seconds"])
    middle = len(times) // 2
    row.round_ms.append(times[middle] if len(times) % 2 else (times[middle - 1] + times[middle]) / 2)
    row.fastest_ms = min(times[0], row.fastest_ms or times[0])


def _first_step(row: Row, temperature: str) -> float:
    return (row.cold_s if temperature == "cold" else row.warm_s) or 0.0


def _too_many(rows: Mapping[str, Row], names: list[str]) -> list[str]:
    """Contenders that must stay out so that the others fit into memory together; their rows say so."""
    needs = {name: (rows[name].peak_bytes or 0) - (rows[name].base_bytes or 0) for name in names}
    available, out = _MEMORY_SHARE * psutil.virtual_memory().available, []
    for name in _EXPENDABLE:
        total = sum(needs.values())
        if total <= available or len(needs) <= 2:
            break
        if name in needs:
            del needs[name]
            out.append(name)
            rows[name].status = "left out"
            rows[name].reason = f"all together need {format_bytes(total)}, {format_bytes(available)} can be used"
    return out
