"""A plugin, `plugins=[faulty] engine=faulty`: the static engine with faults at chosen optimizer steps.

Faults are numbered over all processes of a run, by a file, so that each of `engine.faults` happens once:
`engine.faults=[kill@5,hang@9]` kills the process during step 5 and, after a restart, hangs in step 9.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttrain.config.registry import register
from ttrain.core.options import option
from ttrain.device.base import Device
from ttrain.engine.base import HostValue
from ttrain.engine.settings import EngineConfig
from ttrain.engine.state import State
from ttrain.engine.static import StaticEngine, StaticStep


@dataclass
class FaultyConfig(EngineConfig):
    """Which faults happen, and where they are counted."""

    name: str = option("faulty", "registered name of the engine")
    faults: list[str] = option([], "kind@step, in the order in which they happen")
    counter: str = option("faults.txt", "file with a line for every fault that happened")
    rows: int | None = option(None, "sequences per micro-batch that memory has room for")


class FaultyStep(StaticStep):
    engine: FaultyEngine

    def __call__(self, inputs: Mapping[str, HostValue]) -> dict[str, Any]:
        config = self.engine.config
        rows = len(inputs["inputs"]) if "inputs" in inputs else 0  # type: ignore[arg-type]
        if config.rows is not None and self.name != "evaluate" and rows > config.rows:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you asked for 9 bytes.")
        outputs = super().__call__(inputs)
        if "step" not in inputs or self.name == "evaluate":
            return outputs
        kind = self._due(int(inputs["step"]))  # type: ignore[arg-type]
        if kind == "nan":
            outputs["loss" if "loss" in outputs else "grad_norm"] = float("nan")
        return outputs

    def _due(self, step: int) -> str | None:
        """The fault of this step, if it is the next one; it happens here unless it is a value."""
        counter = Path(self.engine.config.counter)
        done = len(counter.read_text().splitlines()) if counter.exists() else 0
        if done >= len(self.engine.config.faults):
            return None
        kind, _, at = self.engine.config.faults[done].partition("@")
        if int(at) != step:
            return None
        with open(counter, "a") as file:
            file.write(f"{kind}\n")
        happen(kind)
        return kind


class FaultyEngine(StaticEngine):
    """Adds the faults to every step that is given the optimizer step's number."""

    step_class = FaultyStep

    def __init__(self, config: FaultyConfig, device: Device, state: State) -> None:
        super().__init__(device, state, config.rematerialize)
        self.config = config


def happen(kind: str) -> None:
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "abort":
        os.abort()
    if kind == "exit":
        os._exit(9)
    if kind == "exception":
        raise RuntimeError("an injected fault")
    if kind == "memory":
        raise MemoryError
    if kind == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)


register("engine", "faulty", config=FaultyConfig, target=FaultyEngine)
