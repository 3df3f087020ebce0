"""Objectives with a second model, heads and vectors on the reference functions of Tenstorrent's device."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.models.session import open_cpu
from tests.train.reading import write_documents, write_rows
from tests.ttnn.runs import golden
from ttrain import load_config
from ttrain.cli import main
from ttrain.config import build
from ttrain.objectives import distillation
from ttrain.train.runs.warm_start import Origin

MODEL = ["model=llama", "model.layers=1", "model.heads=2", "model.kv_heads=1", "model.width=64", "model.hidden=96"]
MODEL += ["model.context=32", "data=documents", "data.tokenizer=byte", "data.held_out=0.3", "train.batch_size=4"]
MODEL += ["device=cpu", "device.threads=1", "engine=static", "schedule=constant", "optimizer=sgd"]


@pytest.fixture(autouse=True, scope="module")
def files(shared: Path) -> None:
    pytest.importorskip("ttnn", reason="the package ttnn is not installed")
    write_documents(words=30)
    write_rows("labels.jsonl", [{"text": f"word {n}", "label": n % 3} for n in range(20)])
    write_rows("pairs.jsonl", [{"anchor": f"word {n}", "positive": f"{n} words"} for n in range(20)])
    teacher = ["data.sources=[words.jsonl]", "train.steps=1", "run.dir=teacher", "logger=jsonl", "sample.tokens=1"]
    assert main([*MODEL, *teacher, "train.peak_tflops=1", "guard.check_learning=null"]) == 0


def stepped(device: Any, config: Any) -> Any:
    """Numbers of one step."""
    data = build.build_dataset(config)
    config = build.learned_from(config, data)
    model = build.build_model(config, data.vocabulary)
    with closing(device), closing(build.build_session(model, device, config)) as session:
        Origin().set_values(session, 3)
        return session.train_step(session.build_training(), 0)(data.batch("train", 0, 0, 4), {"lr": 0.1}, 1)


@pytest.mark.parametrize(
    ("objective", "source", "more"),
    [
        ("distillation", "words", ["objective.teacher=teacher"]),
        ("classification", "labels", ["precision=bf16"]),
        ("embedding", "pairs", ["train.gradient_accumulation=2"]),
    ],
)
def test_a_step_is_that_of_the_cpu(
    objective: str, source: str, more: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distillation, "_AT_ONCE", 50 * 257)  # in several parts
    config = load_config(*MODEL, f"objective={objective}", f"data.sources=[{source}.jsonl]", *more)
    theirs, ours = stepped(golden(), config), stepped(open_cpu(), config)
    close = 2e-3 if "precision=bf16" in more else 1e-5
    assert theirs.loss == pytest.approx(ours.loss, rel=close)
    assert theirs.grad_norm == pytest.approx(ours.grad_norm, rel=close)
    assert theirs.metrics == pytest.approx(ours.metrics, rel=close)
