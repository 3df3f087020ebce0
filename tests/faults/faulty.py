"""A plugin, `plugins=[faulty] engine=faulty`: the static engine with faults at chosen optimizer steps.

Faults are noted in faults.txt over all processes of a run, so that each of `engine.faults` happens once:
`engine.faults=[kill@5,hang@9]` kills the process after step 5 and, after a restart, hangs after step 9.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
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

NOTED = Path("faults.txt")


@dataclass
class FaultyConfig(EngineConfig):
    """Faults that happen."""

    name: str = option("faulty", "registered name of the engine")
    faults: list[str] = option([], "kind@step, in the order in which they happen")


class FaultyStep(StaticStep):
    engine: FaultyEngine

    def start(self, inputs: Mapping[str, HostValue]) -> Callable[[], dict[str, Any]]:
        read = super().start(inputs)
        done = NOTED.read_text().split() if NOTED.exists() else []
        for fault in self.engine.faults[len(done) : len(done) + 1]:
            kind, _, step = fault.partition("@")
            if inputs.get("step") == int(step):
                NOTED.write_text(" ".join([*done, kind]))
                happen(kind)
        return read


class FaultyEngine(StaticEngine):
    step_class = FaultyStep

    def __init__(self, config: FaultyConfig, device: Device, state: State) -> None:
        super().__init__(device, state, config.rematerialize)
        self.faults = config.faults


def happen(kind: str) -> None:
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "memory":
        raise MemoryError
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


register("engine", "faulty", config=FaultyConfig, target=FaultyEngine)
