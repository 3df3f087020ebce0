"""Inputs that couple the rows of a slice: they reach every micro-batch of it, and no other."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.models.session import initial_values, open_cpu
from ttrain import ops
from ttrain.config import build
from ttrain.config.compose import load
from ttrain.core.spec import TensorSpec
from ttrain.graph import Graph, Value
from ttrain.models.base import LOSS_WEIGHT, SCALAR
from ttrain.objectives.base import Objective
from ttrain.parallel.ranks import Ranks
from ttrain.parallel.world import World
from ttrain.train.loop.evaluation import Evaluation
from ttrain.train.steps.step import PROBE, StepResult

ROWS, INPUTS = 8, 3
COMMAND = "model=mlp data=regression model.inputs=3 model.outputs=1 model.width=4 model.layers=1 device=cpu"


class Centred(Objective):
    """The squared distance of predictions from the mean of their slice, which is a constant to the gradient."""

    def probe(self, model: Any, graph: Graph, rows: int) -> dict[str, Value]:
        return {"predicted": ops.reshape(self._predicted(model, graph, rows), (rows,))}

    def coupled(self, outputs: Mapping[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        return {"centre": float(outputs["predicted"].mean())}

    def loss(self, model: Any, graph: Graph, rows: int, training: bool) -> tuple[Value, dict[str, Value]]:
        centre, weight = graph.input("centre", SCALAR), graph.input(LOSS_WEIGHT, SCALAR)
        squared = ops.reduce_sum(_square(self._predicted(model, graph, rows) - centre), [0, 1]) * weight
        return squared, {"centre": centre * (float(rows) * weight)}

    def _predicted(self, model: Any, graph: Graph, rows: int) -> Value:
        predicted: Value = model.layers[0](graph.input("inputs", TensorSpec((rows, INPUTS))))
        return predicted


def _square(x: Value) -> Value:
    return x * x


def stepped(parts: int, slices: int, engine: str) -> tuple[StepResult, dict[str, np.ndarray], float]:
    """Numbers and parameters of one step, and the loss of an evaluation before it."""
    config = load([*COMMAND.split(), f"engine={engine}", f"train.batch_size={ROWS}", "optimizer=sgd"])
    config = replace(config, train=replace(config.train, gradient_accumulation=parts))
    model, ranks, objective = build.build_model(config), Ranks(slices=slices), Centred(config.objective)
    with closing(open_cpu()) as device, closing(build.build_session(model, device, config, ranks=ranks)) as session:
        session.graph = replace(session.graph, objective=objective)
        for name, value in initial_values(model, seed=1).items():
            session.state.write(name, value)
        steps, each = session.build_training(), ROWS // slices // parts
        further: Any = {"probe": steps[PROBE], "coupled": objective.coupled, "each": each}
        told: Any = steps["evaluate"], Held(), ROWS // slices, None
        evaluated = Evaluation(*told, **further)()
        assert evaluated is not None
        result = session.train_step(steps, 0, World(ranks))(Held().batch("train", 0, 0, ROWS), {"lr": 0.1}, 1)
        return result, {name: session.state.read(name) for name in model.parameters()}, evaluated.loss


class Held:
    """Rows of random numbers."""

    fields = {"targets": TensorSpec((1,))}
    val_samples = ROWS

    def batch(self, split: str, seed: int, first: int, rows: int) -> dict[str, np.ndarray]:
        inputs = np.random.default_rng(1).standard_normal((ROWS, INPUTS)).astype(np.float32)
        return {"inputs": inputs[first : first + rows], "targets": np.zeros((rows, 1), np.float32)}


@pytest.mark.parametrize("slices", [1, 2])
def test_a_slice_is_one_whatever_its_micro_batches(slices: int) -> None:
    whole, weights, evaluated = stepped(1, slices, "static")
    for parts, engine in ((2, "static"), (ROWS // slices, "dynamic"), (2, "traced")):
        result, found, again = stepped(parts, slices, engine)
        assert result.loss == pytest.approx(whole.loss, rel=1e-5)
        assert result.metrics["centre"] == pytest.approx(whole.metrics["centre"], rel=1e-5)
        assert again == pytest.approx(evaluated, rel=1e-5) == whole.loss
        for name, value in weights.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-7)
    other, _, _ = stepped(1, 3 - slices, "static")
    assert other.loss != pytest.approx(whole.loss, rel=1e-3)
