"""A tiny training command that runs in this process, and helpers that read what it left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import Told
from ttrain.cli import main
from ttrain.data.synthetic.regression import RegressionDataset
from ttrain.train.logging.metrics import read_metrics

TINY = [
    "model=mlp", "model.width=8", "data=regression", "data.examples=64", "device=cpu", "device.threads=1",
    "logger=jsonl", "train.batch_size=4", "train.steps=8", "train.save_every=2", "train.eval_every=null",
    "train.log_every=1", "train.peak_tflops=1",
]  # fmt: skip


class Train:
    """`train("run.dir=a", ...)` -> exit code."""

    def __init__(self, command: Told) -> None:
        self.command = command

    def __call__(self, *overrides: str) -> int:
        return main([*TINY, *overrides])

    def told(self, *overrides: str, code: int = 0) -> str:
        """Return its stderr if it exits with this code; never a traceback."""
        return self.command(*TINY, *overrides, code=code)


@pytest.fixture
def train(inside: Path, told: Told) -> Train:
    return Train(told)


@pytest.fixture
def spoiled(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`spoiled({5: {"inputs": nan}})` multiplies a field of the batch of a step, at most so many `times`.

    Returns the spoiled batches by step.
    """
    original, found = RegressionDataset.batch, dict[int, dict[str, np.ndarray]]()

    def spoil(factors: dict[int, dict[str, float]], times: int = 99) -> dict[int, dict[str, np.ndarray]]:
        left = dict.fromkeys(factors, times)

        def batch(self: Any, split: Any, seed: int, first: int, rows: int) -> Any:
            fields, step = original(self, split, seed, first, rows), first // rows + 1
            if split == "train" and left.get(step, 0):
                left[step] -= 1
                found[step] = fields | {name: fields[name] * np.float32(by) for name, by in factors[step].items()}
                return found[step]
            return fields

        monkeypatch.setattr(RegressionDataset, "batch", batch)
        return found

    return spoil


def losses(run: str | Path) -> list[tuple[int, float | None]]:
    return [(line["step"], line["train/loss"]) for line in read_metrics(Path(run) / "metrics.jsonl") if "lr" in line]
