"""A tiny training command that runs in this process, and helpers that read what it left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import cache_home
from ttrain.cli import main
from ttrain.data.regression import RegressionDataset
from ttrain.train.checkpoint.retention import find_checkpoint
from ttrain.train.logging.metrics import read_metrics

TINY = [
    "model=mlp", "model.width=8", "data=regression", "data.examples=64", "device=cpu", "device.threads=1",
    "logger=jsonl", "train.batch_size=4", "train.steps=8", "train.save_every=2", "train.eval_every=null",
    "train.log_every=1", "train.peak_tflops=1",
]  # fmt: skip


class Train:
    """`train("run.dir=a", ...)` -> exit code."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self.request = request

    def __call__(self, *overrides: str) -> int:
        return main([*TINY, *overrides])

    def told(self, *overrides: str, code: int = 0) -> str:
        """What it writes to stderr where it exits so; never a traceback."""
        return self.command(*TINY, *overrides, code=code)

    def command(self, *overrides: str, code: int = 0) -> str:
        """The same of any command."""
        capsys = self.request.getfixturevalue("capsys")  # now, lest a test can't have another
        capsys.readouterr()
        assert main([*overrides]) == code
        errors: str = capsys.readouterr().err
        assert "Traceback" not in errors, errors
        return errors


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Train:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", cache_home(tmp_path))
    return Train(request)


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


def tensors(run: str | Path) -> dict[str, bytes]:
    """Every tensor of the newest checkpoint."""
    from safetensors.numpy import load_file

    files = find_checkpoint(Path(run), "last").path.glob("*.safetensors")
    return {name: array.tobytes() for file in files for name, array in load_file(file).items()}


def losses(run: str | Path) -> list[tuple[int, float | None]]:
    return [(line["step"], line["train/loss"]) for line in read_metrics(Path(run) / "metrics.jsonl") if "lr" in line]
