"""Helpers that read what a run left, and write what it reads."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from ttrain.train.checkpoint.checkpoint import read_checkpoint
from ttrain.train.checkpoint.retention import list_checkpoints
from ttrain.train.logging.metrics import read_events, read_metrics


def losses(run: Path | str) -> list[tuple[int, str, float]]:
    lines = read_metrics(Path(run, "metrics.jsonl"))
    return [(line["step"], key, line[key]) for line in lines for key in ("train/loss", "val/loss") if key in line]


def events(run: Path | str, kind: str | None = None) -> list[dict[str, Any]]:
    return [event for event in read_events(Path(run)) if kind in (None, event["kind"])]


def attempts(run: Path | str) -> list[dict[str, Any]]:
    return list(json.loads(Path(run, "run.json").read_text())["attempts"])


def steps_on_disk(run: Path | str) -> list[int]:
    return [checkpoint.step for checkpoint in list_checkpoints(Path(run, "checkpoints"))[0]]


def arrays(run: Path | str, step: int | None = None, files: str = "*") -> dict[str, np.ndarray]:
    """The tensors of a checkpoint, the newest one by default, that lie in files of these names."""
    folder = Path(run, "checkpoints", f"step_{steps_on_disk(run)[-1] if step is None else step:08d}")
    shards = read_checkpoint(folder).path.glob(f"{files}.safetensors")
    return {name: array for shard in shards for name, array in load_file(shard).items()}


def tensors(run: Path | str, step: int | None = None) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in arrays(run, step).items()}


def write_rows(path: Path | str, rows: Iterable[Any]) -> str:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_documents(**counts: int) -> None:
    """Documents of one to eight words in files of these names."""
    generator = np.random.default_rng(0)
    for name, count in counts.items():
        words = [f"{name}{number} " + "word " * int(generator.integers(1, 9)) for number in range(count)]
        write_rows(f"{name}.jsonl", [{"text": text} for text in words])
