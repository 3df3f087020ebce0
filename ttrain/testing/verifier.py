"""Ops and models, run by engines on a device and held to PyTorch in fp64, and the engines to one another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ttrain.core.errors import ConfigError
from ttrain.core.names import did_you_mean
from ttrain.core.spec import DType
from ttrain.device.base import Device
from ttrain.device.torch.device import TorchDevice
from ttrain.engine.static import StaticEngine
from ttrain.graph import REGISTRY, Op
from ttrain.models.base import Model
from ttrain.testing.cases import cases_of
from ttrain.testing.compare import Comparison, Tolerance, compare, verdict
from ttrain.testing.tolerances import EXACT, GRADIENT, MODEL
from ttrain.testing.trials import MakeEngine, ModelTrial, Trial, reach, run_trials, trials

Each = Callable[[Sequence[Trial]], Iterable[Trial]]


def chosen_ops(names: Sequence[str], key: str = "") -> list[Op]:
    """Return ops by name or family; all where none is named.

    Raises ConfigError with the nearest valid name, after the `key` that the name was given to.
    """
    families = {op.family for op in REGISTRY.values()}
    for name in names:
        if name not in REGISTRY and name not in families:
            raise ConfigError(f"{key}{name}: no such op or family. {did_you_mean(name, {*REGISTRY, *families})}")
        if name in REGISTRY and not cases_of(REGISTRY[name]):
            raise ConfigError(f"{key}{name}: the op has no cases to run. Declare some: see docs/extending.md.")
    return [op for op in REGISTRY.values() if not names or op.name in names or op.family in names]


@dataclass
class Verifier:
    """Compares on one device, by engines of these names. `notes` tells what could not be compared.

    `factor` multiplies every allowed error.
    """

    device: Device
    engines: Mapping[str, MakeEngine]
    dtype: DType = DType.FP32
    factor: float = 1.0
    notes: list[str] = field(default_factory=list)

    def ops(self, chosen: Sequence[Op], each: Each = iter) -> Iterator[Comparison]:
        """Compare ops in all their cases, forward and backward. `each` passes the trials on, for who counts them."""
        reached = {op: reach(op, self.device) for op in chosen if cases_of(op)}
        self._note("Without cases to run, so not verified", [op for op in chosen if op not in reached])
        self._note(f"No kernel on {self.device.name}", [op for op, (seen, _) in reached.items() if not seen])
        inner = [op for op, (seen, alone) in reached.items() if seen and not alone]
        self._note("Verified through the backward of their forward op only", inner)
        planned = [trial for op, seen in reached.items() for trial in trials(op, self.dtype, *seen)]
        yield from self._compare("ops", planned, GRADIENT[self.dtype], each)

    def model(self, name: str, model: Model, rows: int = 2, seed: int = 0) -> Iterator[Comparison]:
        """Compare the loss of a model and the gradients of its parameters."""
        if self.device.uniform_compute:
            model.follow_compute()
        yield from self._compare(name, [ModelTrial(name, model, rows, seed)], MODEL[self.dtype])

    def _compare(
        self, subject: str, planned: Sequence[Trial], allowed: Tolerance, each: Each = iter
    ) -> Iterator[Comparison]:
        """Compare every engine with PyTorch, and those after the first one with it as well, of which the worst."""
        results = {name: run_trials(self.device, make, planned) for name, make in self.engines.items()}
        for engine, outputs in results.items():
            for trial in each(planned):
                yield from trial.compared(outputs, engine, self.factor, self.device.uniform_compute)
        (first, base), *others = results.items()
        for engine, values in others:
            labels: dict[str, Any] = {"subject": subject, "quantity": f"{engine} against {first}", "engine": engine}
            compiled = self.device.compiles and engine == "traced"  # other engines run the kernels of the first
            bound = allowed * self.factor if compiled else EXACT
            found = [
                compare(values[name], np.asarray(wanted), self.dtype, bound, case=name, dtype=self.dtype, **labels)
                for name, wanted in base.items()
                if not isinstance(wanted, Exception) and not isinstance(values.get(name, wanted), Exception)
            ]
            if found:
                yield max(found, key=lambda one: one.badness)

    def _note(self, what: str, ops: Sequence[Op]) -> None:
        if ops:
            self.notes.append(f"{what}: {', '.join(op.name for op in ops)}.")


def check_ops(
    *names: str, device: Device | None = None, dtype: DType = DType.FP32, engine: MakeEngine = StaticEngine
) -> None:
    """Hold ops, by name or family, to their fp64 references: every case that they declare, forward and gradients.

    `device` is an open one, the CPU where none is given. Raises VerifyError naming what is off by more than rounding
    explains, ConfigError for an op that there is not.
    """
    with closing(_cpu()) if device is None else nullcontext(device) as opened:
        verdict(list(Verifier(opened, {getattr(engine, "name", "given"): engine}, dtype).ops(chosen_ops(names))))


def check_model(model: Model, rows: int = 2, device: Device | None = None, engine: MakeEngine = StaticEngine) -> None:
    """Hold the loss of a model and the gradient of each parameter to autograd over the fp64 references of its ops.

    `rows` are sequences or examples of a batch of random numbers. Raises VerifyError.
    """
    with closing(_cpu()) if device is None else nullcontext(device) as opened:
        verifier = Verifier(opened, {getattr(engine, "name", "given"): engine}, model.compute)
        verdict(list(verifier.model("model", model, rows)))


def _cpu() -> Device:
    return TorchDevice("cpu")
