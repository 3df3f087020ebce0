"""Gradients that no update waits for: freed as backward makes them, with the same numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ttrain
from tests.native.conftest import require_compiler
from ttrain.graph import Kind
from ttrain.train.steps import update_graph

SIZES = ["layers=3", "heads=2", "width=32", "context=4", "vocabulary=11"]
MODEL = ["model=nano-gpt", *(f"model.{size}" for size in SIZES), "train.batch_size=1", "device=cpu"]
FEW_KERNELS = ["model=mlp", "model.width=32", "model.layers=4", "data=regression", *MODEL[-2:]]  # to compile
WHOLE = 1 << 40  # bytes that no model here has


def trained(monkeypatch: pytest.MonkeyPatch, least: int, *overrides: str) -> tuple[Any, dict[str, np.ndarray], Any]:
    """Losses, parameters, and the session after three steps with updates of so many bytes of gradients."""
    monkeypatch.setattr(update_graph, "FREED", least)
    ids = np.random.default_rng(0).integers(0, 11, (3, 1, 5))
    model, batches = MODEL, [{"tokens": row[:, :-1], "targets": row[:, 1:]} for row in ids]
    if "engine=traced" in overrides:
        model, numbers = FEW_KERNELS, np.random.default_rng(0).normal(size=(3, 1, 32)).astype(np.float32)
        batches = [{"inputs": row, "targets": row} for row in numbers]
    with ttrain.Training(ttrain.load_config(*model, "optimizer.clip_norm=null", *overrides)) as training:
        losses = [training.step(batch, lr=0.01).loss for batch in batches]
        return losses, training.parameters(), training._built["train"].plan and training._session


@pytest.mark.parametrize(
    "overrides",
    [
        ["engine=dynamic", "optimizer=muon"],
        ["engine=static", "precision=bf16", "train.ema=0.9"],
        ["engine=static", "precision=bf16_true", "optimizer.stochastic_rounding=true"],
        ["engine=traced", "precision=bf16"],
    ],
    ids=" ".join,
)
def test_the_numbers_are_the_same_to_the_bit(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if "engine=traced" in overrides:
        require_compiler()
    kept, freed = (trained(monkeypatch, least, *overrides) for least in (WHOLE, 4096))
    assert freed[0] == kept[0] and freed[0][0] != freed[0][1]
    assert all(np.array_equal(freed[1][path], value) for path, value in kept[1].items())


def test_it_takes_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = [trained(monkeypatch, least, "engine=static")[2] for least in (WHOLE, 4096)]
    plans = [session.engine.build("again", session.graph.trace_train).plan for session in sessions]
    gradients = [session.state.nbytes(Kind.GRADIENT) for session in sessions]
    kept, freed = (plan.arena_bytes + nbytes for plan, nbytes in zip(plans, gradients, strict=True))
    assert gradients[0] > 0 == gradients[1] and freed < 0.7 * kept
    nodes = plans[1].graph.nodes
    updates = [time for time, node in enumerate(nodes) if node.op.name == "update"]
    assert len(updates) > 6 and updates[0] < len(nodes) / 2  # not behind all of backward


@pytest.mark.parametrize("override", ["optimizer.clip_norm=1", "guard.nonfinite=skip", "train.gradient_accumulation=2"])
def test_what_waits_for_all_gradients_keeps_them(override: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_graph, "FREED", 4096)
    overrides = ["engine=dynamic", "optimizer.clip_norm=null", "train.batch_size=2", override]
    with ttrain.Training(ttrain.load_config(*MODEL, *overrides)) as training:
        graph = training._session.graph
        assert not graph.frees and len(graph.updates) == len(graph.shards) == 2
        assert training._session.state.nbytes(Kind.GRADIENT) > 0
