"""Runs a benchmark: starts of single contenders first, then the interleaved steps; results are saved as they come."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import psutil

from ttrain.bench.contender import compiles
from ttrain.bench.findings import note_event, note_host, note_memory, note_start
from ttrain.bench.process import Caches, Event, WorkerFailed, events
from ttrain.bench.progress import Progress
from ttrain.bench.results import MOCKED, CaseResult, Result, Row
from ttrain.bench.settings import BenchConfig, StartupBenchConfig, TimedConfig, TrainingBenchConfig
from ttrain.bench.studies import Study
from ttrain.bench.workload import Case, ProductWork
from ttrain.core.errors import UserError
from ttrain.core.units import format_bytes, format_duration
from ttrain.device.family import Variant, family_of
from ttrain.device.settings import DeviceConfig
from ttrain.engine.settings import EngineConfig

Start = Callable[[Mapping[str, Any], Path, Mapping[str, str] | None], Iterator[Event]]
# Whom to leave out first where not all fit into memory side by side.
_EXPENDABLE = ("dynamic", "compile_all", "compile", "static", "traced", "eager")
_MEMORY_SHARE = 0.85  # of what is available
# glibc keeps up to 64 MiB of free memory for later; here it gives back what is more than a MiB, so that it is not taken
# for memory in use.
_TRIMMING = {"MALLOC_TRIM_THRESHOLD_": str(2**20), "MALLOC_TOP_PAD_": "0"}
_APART_ROUNDS = 3  # of variants that need a process each


@dataclass
class Bench:
    """One run of a study. `save` is called whenever `result` has grown.

    `modelled` says whether a chip is meant that is not here: then times come from the cost model. `mocked`
    says whether the host's time per step is measured on a mocked board as well.
    """

    study: Study
    config: BenchConfig
    device: DeviceConfig
    engine: EngineConfig
    plugins: list[str]
    result: Result
    progress: Progress
    save: Callable[[], None] = lambda: None
    start: Start = events
    modelled: bool = False
    mocked: bool = False
    _numbers: Iterator[int] = field(default_factory=count)

    def run(self) -> None:
        """Measure everything. Interrupted by KeyboardInterrupt, what was found so far is in `result`."""
        self.result.kind = self.study.kind
        with tempfile.TemporaryDirectory(prefix="ttrain-bench-", ignore_cleanup_errors=True) as folder:
            if self.modelled:
                self._model()
            if self.mocked:
                self._mock(Path(folder))
            if not self.modelled and not self.mocked:
                for number, case in enumerate(self.study.cases):
                    self._case(number, case, Path(folder) / f"case{number}")
        self.result.complete = True
        self.save()

    def _model(self) -> None:
        """Every case on the cost model."""
        from ttrain.bench.modelled import modelled

        listed = list(zip(self.study.cases, self.study.variants, strict=True))
        with self.progress.stage(f"cost model of {self.device.name}") as stage:
            for number, (case, variants) in enumerate(listed):
                stage.tell(case.work.title, number / len(listed))
                self.result.cases.append(modelled(case, variants, self.device))
                self.save()
            stage.done(f"{len(listed)} cases; there is no card here")

    def _mock(self, folder: Path) -> None:
        """Host time per step by engine, of every case that trains."""
        device = family_of(self.device).mocked(self.device)
        assert device is not None  # or nobody would have asked
        for case, variants in zip(self.study.cases, self.study.variants, strict=True):
            if isinstance(case.work, ProductWork):
                continue
            rows = {name: Row(name) for name in dict.fromkeys(each.engine for each in variants)}
            found = CaseResult.of(case)
            found.rows, found.basis = rows, MOCKED
            self.result.cases.append(found)
            for row in rows.values():
                with self.progress.stage(f"{case.title}, {case.precision}: host dispatch of {row.contender}") as stage:
                    order = self._order("host", case, [row.contender], device)
                    for event in self._events(order, folder, None, row):
                        note_host(found, row, event)
                    stage.done(row.reason or f"{row.round_ms[0] if row.round_ms else 0:.3g} ms on a mocked board")
                self.save()

    def _case(self, number: int, case: Case, folder: Path) -> None:
        study = self.study
        chip = study.kind == "chip"
        names = [variant.name for variant in study.variants[number]] if chip else study.contenders
        rows = {name: Row(name) for name in names}
        found = CaseResult.of(case)
        found.rows = rows
        self.result.cases.append(found)
        caches = Caches(folder / "caches")
        label = f"{case.title}, {case.precision}" if len(study.cases) > 1 else case.precision
        if chip:
            self._apart(case, found, study.variants[number], folder, label)
        elif study.kind == "startup":
            self._startup(case, rows, folder, label)
        elif study.kind == "memory":
            for row in rows.values():
                self._memory(case, row, folder, label)
            self._contest(case, found, folder, None, label)
        else:
            separate = isinstance(self.config, TrainingBenchConfig) and self.config.startup
            if separate:
                for row in rows.values():
                    self._starts(case, row, folder, caches, label)
                    self.save()
            self._contest(case, found, folder, caches if separate else None, label)
        self.save()

    def _contest(self, case: Case, found: CaseResult, folder: Path, caches: Caches | None, label: str) -> None:
        """Interleaved steps of everybody who can take part."""
        taking_part = [name for name, row in found.rows.items() if row.status != "failed"]
        for name in _too_many(found.rows, taking_part):
            taking_part.remove(name)
        if taking_part:
            self._together(case, found, taking_part, folder, caches.all() if caches else None, label)

    def _order(self, do: str, case: Case, contenders: list[str], device: DeviceConfig | None = None) -> dict[str, Any]:
        timed = self.config if isinstance(self.config, TimedConfig) else TimedConfig()
        return {
            "do": do, "case": case.to_dict(), "contenders": contenders, "plugins": self.plugins,
            "device": asdict(device or self.device), "engine": asdict(self.engine), "reference": self.study.reference,
            "seconds": timed.seconds, "rounds": timed.rounds,
            "planned": self.study.kind == "memory",
            "beside": getattr(self.config, "beside", None),
        }  # fmt: skip

    def _starts(self, case: Case, row: Row, folder: Path, caches: Caches, label: str) -> None:
        """Cold and warm start of one contender, each in a new process."""
        two = compiles(row.contender)
        for temperature in ["cold", "warm"] if two else ["warm"]:
            name = f"{label}: {f'{temperature} start' if two else 'start'} of {row.contender}"
            with self.progress.stage(name) as stage:
                order = self._order("alone", case, [row.contender])
                for event in self._events(order, folder, caches.of(row.contender), row):
                    note_start(row, event, temperature)
                stage.done(row.reason or f"first step after {format_duration(_first_step(row, temperature))}")
            if row.status == "failed":
                return

    def _startup(self, case: Case, rows: Mapping[str, Row], folder: Path, label: str) -> None:
        """Starts in turns, each round with empty caches of its own."""
        assert isinstance(self.config, StartupBenchConfig)
        order, repeats = random.Random(case.seed), self.config.repeats
        for number in range(repeats):
            caches, turns = Caches(folder / f"round{number}"), list(rows.values())
            order.shuffle(turns)
            for row in turns:
                if row.status != "failed":
                    self._starts(case, row, folder, caches, f"{label}, {number + 1} of {repeats}")
                    row.status = "ok" if row.warm_samples_s and row.status != "failed" else row.status
                    self.save()

    def _memory(self, case: Case, row: Row, folder: Path, label: str) -> None:
        """Peak memory of one contender in a new process."""
        with self.progress.stage(f"{label}: memory of {row.contender}") as stage:
            order = self._order("memory", case, [row.contender])
            for event in self._events(order, folder, _TRIMMING, row):
                note_memory(row, event)
            stage.done(row.reason or f"{format_bytes(row.used_bytes or 0)} used")
        self.save()

    def _together(
        self,
        case: Case,
        found: CaseResult,
        names: list[str],
        folder: Path,
        environment: Mapping[str, str] | None,
        label: str,
    ) -> None:
        rows = [found.rows[name] for name in names]
        with self.progress.stage(f"{label}: interleaved steps") as stage:
            order = self._order("together", case, names)
            rounds = 0
            for event in self._events(order, folder, environment, *rows):
                note_event(found, event)
                if event["event"] == "building":
                    stage.tell(f"building {event['contender']}")
                elif event["event"] == "round":
                    rounds += 1
                    stage.tell(f"round {rounds} of {order['rounds']}", rounds / order["rounds"])
            stage.done(f"{rounds} rounds")

    def _apart(self, case: Case, found: CaseResult, variants: tuple[Variant, ...], folder: Path, label: str) -> None:
        """Variants whose device has to be opened otherwise, each in a process of its own, in turns."""
        order = random.Random(case.seed)
        for number in range(_APART_ROUNDS):
            turns = list(variants)
            order.shuffle(turns)
            for variant in turns:
                row = found.rows[variant.name]
                device = family_of(self.device).variant(self.device, variant)
                if device is None:
                    row.status, row.reason = "left out", "one product can't be shared between sub-devices yet"
                elif row.status != "failed":
                    self._variant(case, found, row, variant, device, folder, f"{label}, {number + 1}: {variant.name}")
                    self.save()

    def _variant(
        self, case: Case, found: CaseResult, row: Row, variant: Variant, device: DeviceConfig, folder: Path, label: str
    ) -> None:
        with self.progress.stage(label) as stage:
            order = self._order("together", case, [variant.engine], device)
            order["seconds"] /= _APART_ROUNDS * len(found.rows)
            alone = replace(found, rows={variant.engine: row})
            for event in self._events(order, folder, None, row):
                note_event(alone, event)
            found.device, found.flops_per_step, found.peak_flops = alone.device, alone.flops_per_step, alone.peak_flops
            found.parameters, found.others_cpu = alone.parameters, alone.others_cpu
            stage.done(row.reason or "")

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
