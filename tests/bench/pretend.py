"""Small work, and processes that only pretend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ttrain.bench import workload
from ttrain.bench.run import WorkerFailed
from ttrain.bench.settings import BASELINES, BenchConfig
from ttrain.bench.workload import Case
from ttrain.device.settings import DeviceConfig
from ttrain.models.settings import GPTConfig, LlamaConfig
from ttrain.nn.settings import LoraConfig

_SMALL = {"layers": 1, "context": 8, "width": 16, "vocabulary": 11}
_GPT = replace(workload.NAMED["char"], model=GPTConfig(heads=2, bias=False, **_SMALL), rows=4)  # type: ignore[arg-type]
_LLAMA = replace(workload.NAMED["smollm2"], model=LlamaConfig(heads=4, kv_heads=2, hidden=24, **_SMALL), rows=4)  # type: ignore[arg-type]
SMALL: dict[str, Any] = {
    "gpt": _GPT,
    "gpt-bias": replace(_GPT, model=GPTConfig(heads=2, **_SMALL)),  # type: ignore[arg-type]
    "llama": _LLAMA,
    "llama-lora": replace(_LLAMA, lora=LoraConfig(rank=2)),
}
ONE_THREAD = DeviceConfig(name="cpu", threads=1)
QUICK = BenchConfig(size=["4x8"], precision=["fp32"], engines=["static"], baselines=["eager", "compile"])


@pytest.fixture
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `gpt` and so on be sizes."""
    for name, work in SMALL.items():
        monkeypatch.setitem(workload.NAMED, name, work)


def case(size: str = "gpt", precision: str = "fp32", **more: Any) -> Case:
    return Case(size, precision, 3, **more)


class Processes:
    """Makes pretending processes; `answers` replace an answer, or raise it, by command or by (name, command)."""

    def __init__(self, **answers: Any) -> None:
        self.answers: dict[Any, Any] = answers
        self.asked: list[tuple[Any, ...]] = []
        self.started: list[Mapping[str, str] | None] = []  # their environments
        self.open = self.most = 0

    def __call__(self, folder: Path, ranks: int = 1, environment: Mapping[str, str] | None = None) -> Process:
        self.started.append(environment)
        self.open += 1
        self.most = max(self.most, self.open)
        return Process(self)

    def names(self, command: str) -> list[str]:
        """Return the contenders that were given a command, in order."""
        return [name for name, given, *_ in self.asked if given == command]


class Process:
    """Stands for the measuring process of one contender. PyTorch takes 1 ms per step, ours half of it."""

    def __init__(self, made: Processes) -> None:
        self.made, self.name = made, ""

    def ask(self, command: str, *words: Any) -> Any:
        self.name = words[1] if command == "make" else self.name
        self.made.asked.append((self.name, command, *words))
        answer = self.made.answers.get((self.name, command), self.made.answers.get(command))
        if isinstance(answer, BaseException):
            raise answer
        if answer is not None:
            return answer(*words) if callable(answer) else answer
        seconds, size = 1e-3 if self.name in BASELINES else 5e-4, 2**30
        start = {"description": self.name, "first_step_s": 1.0, "losses": [1.0, 0.5], "rss": size}
        start |= {"step_seconds": seconds, "later_s": [seconds]}
        planned = None if self.name in BASELINES else size // 2
        return {
            "start": start,
            "memory": {**start, "peak_bytes": 3 * size, "used_bytes": size, "planned_bytes": planned},
            "weight_difference": 0.0,
            "turn": [seconds, seconds, 3 * seconds],
            "facts": {"device": {"name": "cpu", "threads": 2}, "facts": {"peak_flops": 1e11}, "planned_ms": None},
        }.get(command)

    def close(self) -> None:
        self.made.open -= 1


def failing(name: str, command: str, why: str) -> Processes:
    processes = Processes()
    processes.answers[name, command] = WorkerFailed(why)
    return processes
