"""Checkpoints of AGILLM hold the vocabulary without padding, whatever it ran with; tied weights are in them once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models.session import Session, tensor_by_tensor_equal, token_batch
from ttrain.config import build
from ttrain.config.compose import load
from ttrain.graph import Kind
from ttrain.models.agillm import AGILLM
from ttrain.models.settings import AGILLMConfig
from ttrain.optim.adamw import AdamW
from ttrain.optim.settings import AdamWConfig
from ttrain.train.checkpoint.checkpoint import read_checkpoint
from ttrain.train.checkpoint.save import CheckpointContent, save_checkpoint

SIZE: dict[str, Any] = {"layers": 1, "heads": 2, "width": 8, "rank": 6, "context": 10, "vocabulary": 37}


def session(**changes: Any) -> Session:
    return Session(AGILLM(AGILLMConfig(**{**SIZE, **changes})), AdamW(AdamWConfig(lr=1e-2)), 2)


def trained(steps: int = 3, **changes: Any) -> Session:
    ours = session(**changes)
    for step in range(1, steps + 1):
        ours.train(token_batch(37, 2, 10, step), step, {"lr": 1e-2})
    return ours


def saved(folder: Path, ours: Session) -> Any:
    return save_checkpoint(folder, ours.state, CheckpointContent(3, {}))


def logits(ours: Session) -> np.ndarray:
    given = {"tokens": token_batch(37, 1, 10, 9)["tokens"], "position": 7}
    found: np.ndarray = ours.run(ours.graph.trace_logits, given)["logits"]
    return found[:, :37]


@pytest.mark.parametrize(("before", "after"), [(32, 1), (1, 32), (32, 100)])
def test_a_checkpoint_loads_at_another_padding(tmp_path: Path, before: int, after: int) -> None:
    ours = trained(pad_vocabulary=before)
    other = session(pad_vocabulary=after)
    read_checkpoint(saved(tmp_path, ours).path).load(other.state)
    kept = (Kind.PARAMETER, Kind.OPTIMIZER)
    assert tensor_by_tensor_equal(*({n: s.state.read(n) for n in s.state.names(*kept)} for s in (ours, other)))
    assert logits(ours) == pytest.approx(logits(other), rel=1e-5, abs=1e-6)  # products of another shape
    steps = [s.train(token_batch(37, 2, 10, 4), 4, {"lr": 1e-2})["loss"] for s in (ours, other)]
    assert steps[0] == pytest.approx(steps[1], rel=1e-6)


def test_files_hold_only_ids_that_exist(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    (file,) = saved(tmp_path, trained(pad_vocabulary=32)).path.glob("parameters*.safetensors")
    shapes = {name: tensor.shape for name, tensor in load_file(file).items()}
    assert shapes["embedding.weight"] == shapes["sat_head.weight"] == (37, 8)
    assert shapes["ar_head.bias"] == (37,)


def test_padding_that_follows_from_the_device_is_not_kept() -> None:
    config = load(["model=agillm", "model.preset=femto_1x", "model.vocabulary=40", "device=n300"])
    model: Any = build.build_model(*config.model_parts)
    assert model.config.pad_vocabulary == 32 and model.embedding.weight.padding == 24
    assert build.resolved_model(config.model, model)["pad_vocabulary"] is None
