"""A tiny training command that runs in this process, and helpers that read what it left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import cache_home
from ttrain.cli import main
from ttrain.train.checkpoint.retention import find_checkpoint
from ttrain.train.logging.metrics import read_metrics

TINY = [
    "model=mlp", "model.width=8", "data=regression", "data.examples=64", "device=cpu", "device.threads=1",
    "logger=jsonl", "train.batch_size=4", "train.steps=8", "train.save_every=2", "train.eval_every=null",
    "train.log_every=1", "train.peak_tflops=1",
]  # fmt: skip

Train = Callable[..., int]


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """`train("run.dir=a", ...)` -> exit code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", cache_home(tmp_path))
    return lambda *overrides: main([*TINY, *overrides])


def tensors(run: str | Path) -> dict[str, bytes]:
    """Every tensor of the newest checkpoint."""
    from safetensors.numpy import load_file

    files = find_checkpoint(Path(run), "last").path.glob("*.safetensors")
    return {name: array.tobytes() for file in files for name, array in load_file(file).items()}


def losses(run: str | Path) -> list[tuple[int, float | None]]:
    return [(line["step"], line["train/loss"]) for line in read_metrics(Path(run) / "metrics.jsonl") if "lr" in line]
