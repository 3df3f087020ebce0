"""task=verify: every op and the configured model against PyTorch in fp64, and the engines against one another."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttrain.config import build
from ttrain.config.registry import family_that, names
from ttrain.config.schema import Config
from ttrain.core.errors import CaptureError, ConfigError
from ttrain.core.files import to_json, write_chosen
from ttrain.core.spec import DType
from ttrain.core.waiting import Waiting
from ttrain.device.family import family_of

if TYPE_CHECKING:
    from ttrain.device.base import Device
    from ttrain.engine.base import Engine
    from ttrain.engine.state import State
    from ttrain.verify.compare import Comparison
    from ttrain.verify.run import MakeEngine

VOCABULARY = 65  # of a language model whose config leaves it to a tokenizer


def run(config: Config) -> None:
    """Prints the report, writes verify.json=<file> if asked, and raises VerifyError where something is off."""
    from ttrain.verify import report
    from ttrain.verify.ops import chosen_ops

    chosen = [] if config.verify.skip_ops else chosen_ops(config.verify.ops)
    engines = names("engine") if config.verify.engines == "all" else [config.engine.name]
    with closing(_device(config)) as device:
        if not device.computes:
            raise ConfigError(
                f"device={config.device.name}: computes no values, so there is nothing to verify. Use a device that "
                f"computes, or on a {family_that(lambda each: each.golden).title} device verify.golden=true."
            )
        work = _Work(config, device, engines)
        print(work.title, flush=True)
        with Waiting("Comparing ops with PyTorch") as waiting:
            found = work.ops(chosen, waiting) if chosen else []
        with Waiting("Comparing the model with PyTorch"):
            found += work.model() if config.verify.model else []
    _print(report.COLUMNS, report.rows(found), work.notes)
    if config.verify.json is not None:
        content = to_json(report.to_dict(found, work.head))
        write_chosen("verify.json", Path(config.verify.json), content)
    report.verdict(found)
    print(f"verify: all {len(found)} comparisons passed.")


def _device(config: Config) -> Device:
    if not config.verify.golden:
        return build.build_device(config.device, config.precision)
    family = family_of(config.device)
    if not family.golden:
        other = family_that(lambda each: each.golden)
        raise ConfigError(
            f"verify.golden=true: device={config.device.name} has no reference functions. Use a {other.title} device, "
            f"such as device={other.example}."
        )
    return family.reference(family.held(config.device, config.precision.name))


class _Work:
    """One run of verify on one device."""

    def __init__(self, config: Config, device: Device, engines: list[str]) -> None:
        self.config, self.device = config, device
        self.dtype: DType = config.precision.compute
        self.notes: list[str] = []
        self.engines = [name for name in engines if self._available(name)]

    @property
    def title(self) -> str:
        golden = f" by {family_of(self.config.device).golden}" if self.config.verify.golden else ""
        engines = ", ".join(self.engines)
        return f"Verifying on {self.device.name}{golden}, {self.dtype}, engine {engines}, against PyTorch in fp64."

    @property
    def head(self) -> dict[str, Any]:
        facts = {
            "device": self.device.name,
            "golden": self.config.verify.golden,
            "precision": self.config.precision.name,
        }
        return {**facts, "engines": self.engines, "model": self.config.model.name, "notes": self.notes}

    def make(self, name: str) -> MakeEngine:
        """The engine's constructor."""
        engine = dataclasses.replace(self.config.engine, name=name)

        def built(device: Device, state: State) -> Engine:
            return build.build_engine(engine, device, state)

        return built

    def ops(self, chosen: list[Any], waiting: Waiting) -> list[Comparison]:
        """Every op in all its cases, forward and backward."""
        from ttrain.verify.cases import cases_of
        from ttrain.verify.models import equal_engines
        from ttrain.verify.ops import reach, run_trials, trials
        from ttrain.verify.tolerances import GRADIENT

        if bare := [op.name for op in chosen if not cases_of(op)]:
            self.notes.append(f"Without cases to run, so not verified: {', '.join(bare)}.")
        chosen = [op for op in chosen if cases_of(op)]
        reached = {op: reach(op, self.device) for op in chosen}
        absent = [op.name for op in chosen if not reached[op].outputs]
        inner = [op.name for op in chosen if reached[op].outputs and not reached[op].alone]
        if absent:
            self.notes.append(f"No kernel on {self.device.name}: {', '.join(absent)}.")
        if inner:
            self.notes.append(f"Verified through the backward of their forward op only: {', '.join(inner)}.")
        planned = [trial for op in chosen for trial in trials(op, self.dtype, reached[op])]
        factor, uniform = self.config.verify.tolerance, self.device.uniform_compute
        results = {name: run_trials(self.device, self.make(name), planned) for name in self.engines}
        found = [
            one
            for name, outputs in results.items()
            for trial in waiting.each(planned)
            for one in trial.compared(outputs, name, factor, uniform)
        ]
        return found + equal_engines("ops", results, self.dtype, GRADIENT[self.dtype] * factor, self._exact())

    def model(self) -> list[Comparison]:
        """Loss and gradients of the configured model."""
        from ttrain.verify.models import ModelTrial, equal_engines
        from ttrain.verify.tolerances import MODEL

        config = self.config
        model = build.build_model(*config.model_parts, VOCABULARY)
        if self.device.uniform_compute:
            model.follow_compute()
        name = self.config.source.choices.get("model", self.config.model.name)
        trial = ModelTrial(name, model, self.config.verify.rows, self.config.run.seed)
        expected, factor = trial.expected(), self.config.verify.tolerance
        results = {engine: trial.run(self.device, self.make(engine)) for engine in self.engines}
        found = [one for engine, got in results.items() for one in trial.compared(got, expected, engine, factor)]
        return found + equal_engines(name, results, self.dtype, MODEL[self.dtype] * factor, self._exact())

    def _exact(self) -> dict[str, bool]:
        """Which engines run the very kernels that the first one runs; a compiler may reorder sums."""
        return {name: not (self.device.compiles and name == "traced") for name in self.engines}

    def _available(self, name: str) -> bool:
        from ttrain.engine.state import State

        try:
            self.make(name)(self.device, State(self.device, [])).close()
        except CaptureError as error:
            self.notes.append(f"engine={name}: {error}")
            if self.config.verify.engines != "all":
                raise
            return False
        finally:
            self.device.freeze(None)
        return True


def _print(columns: tuple[str, ...], rows: list[tuple[str, ...]], notes: list[str]) -> None:
    lines = [columns, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(columns))]
    for line in lines:
        cells = [
            cell.ljust(w) if i < 3 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())
    for note in notes:
        print(note)
