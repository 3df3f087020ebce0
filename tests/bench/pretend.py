"""Small work, and contenders and processes that only pretend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ttrain.bench.contender import Contender
from ttrain.bench.settings import GPTBenchConfig, MLPBenchConfig
from ttrain.bench.workload import Case, GPTWork, LlamaWork, MLPWork
from ttrain.device.settings import DeviceConfig

SMALL_LLAMA = LlamaWork(1, 4, 16, context=8, rows=4, vocabulary=11, bias=False, kv_heads=2, hidden=24)
SMALL_GPT = GPTWork(layers=1, heads=2, width=16, context=8, rows=4, vocabulary=11, bias=False)
SMALL_MLP = MLPWork(layers=2, width=8, rows=4)
ONE_THREAD = DeviceConfig(name="cpu", threads=1)
MLP_CONFIG = MLPBenchConfig(size="tiny", startup=False, baselines=["eager"], engines=["static"])
GPT_CONFIG = GPTBenchConfig(startup=False)


def case(precision: str = "fp32") -> Case:
    return Case(SMALL_GPT, precision, seed=3)


class Pretender(Contender):
    """Advances a clock by a fixed time per step."""

    side = "ttrain"
    description = "pretends"

    def __init__(self, name: str, seconds: float, clock: Any) -> None:
        self.name, self.seconds, self.clock = name, seconds, clock
        self.numbers: list[int] = []
        self.waits = 0

    def build(self) -> None: ...

    def step(self, number: int) -> float:
        self.numbers.append(number)
        self.clock.now += self.seconds
        return 1 / number

    def loss(self, handle: float) -> float:
        return handle

    def weight(self, path: str) -> np.ndarray:
        return np.zeros(1, np.float32)

    def synchronize(self) -> None:
        self.waits += 1


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def environment_event() -> dict[str, Any]:
    device = {"name": "cpu", "hardware": "a processor", "threads": 2, "torch": "2"}
    return {"event": "environment", "device": device, "flops_per_step": 2e6, "peak_flops": 1e11, "parameters": 8320}


def built_events(name: str, side: str, problem: str | None = None) -> list[dict[str, Any]]:
    checked = {
        "event": "checked", "contender": name, "reference": "eager", "losses": [1.0, 0.5], "problem": problem,
        "loss_difference": 0.5 if problem else 0.0, "weight_difference": 0.0,
    }  # fmt: skip
    return [{"event": "built", "contender": name, "side": side, "description": name}, checked]


def round_event(number: int, **seconds: float) -> dict[str, Any]:
    turns = [{"contender": name, "round": number, "seconds": [s, s, 3 * s]} for name, s in seconds.items()]
    return {"event": "round", "turns": turns, "others_cpu": 0.25}


def alone_event(name: str, side: str, seconds: float, gigabytes: float = 1.0) -> dict[str, Any]:
    size = int(gigabytes * 2**30)
    return {
        "event": "alone", "contender": name, "side": side, "description": name, "imports_s": 2.0, "build_s": 0.1,
        "first_step_s": seconds, "base_bytes": 2**28, "peak_bytes": 2**28 + size, "steady_bytes": size,
        "losses": [1.0], "facts": {},
    }  # fmt: skip


Script = Callable[[Mapping[str, Any]], Iterator[dict[str, Any]]]


class Processes:
    """Stands for measuring processes: a script answers each order."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.orders: list[tuple[str, list[str], Mapping[str, str] | None]] = []
        self.closed = 0

    def __call__(
        self, order: Mapping[str, Any], folder: Path, environment: Mapping[str, str] | None = None
    ) -> Iterator[dict[str, Any]]:
        self.orders.append((order["do"], order["contenders"], environment))
        try:
            yield from self.script(order)
        finally:
            self.closed += 1


def quick(order: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Everybody starts in a second and takes 1 ms per step; ours half of it."""
    names = order["contenders"]
    sides = {name: "PyTorch" if name in ("eager", "compile", "compile_all") else "ttrain" for name in names}
    if order["do"] == "alone":
        yield alone_event(names[0], sides[names[0]], 1.0)
        return
    yield environment_event()
    for name in names:
        yield from built_events(name, sides[name])
    for number in range(order["rounds"]):
        yield round_event(number, **{name: 1e-3 if sides[name] == "PyTorch" else 5e-4 for name in names})
