"""Training something new on every kind of device and engine, and the same in torch at fp64."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import forked
from tests.models.session import initial_values
from tests.native.conftest import require_compiler
from tests.ttnn.runs import Outcome, cpu, golden, run, step_inputs
from ttrain import ops
from ttrain.core.spec import DType, TensorSpec
from ttrain.graph import REGISTRY, Graph, Value
from ttrain.models.base import LOSS_WEIGHT, SCALAR
from ttrain.nn.module import Module

PLACES = ("cpu dynamic", "cpu static", "cpu traced", "golden dynamic", "golden static")
ROWS, TIME, WIDTH, STEPS = 2, 9, 24, 3
Tensors = dict[str, torch.Tensor]


class Regression(Module, ABC):
    """Squared error of `predict`, which maps [rows, TIME, WIDTH] to the same."""

    config: Any = None
    compute = DType.FP32

    def batch_specs(self, rows: int) -> dict[str, TensorSpec]:
        return {name: TensorSpec((rows, TIME, WIDTH)) for name in ("inputs", "targets")}

    @abstractmethod
    def predict(self, x: Value) -> Value: ...

    def loss(self, graph: Graph, rows: int, training: bool) -> Value:
        fields = [graph.input(name, spec) for name, spec in self.batch_specs(rows).items()]
        return ops.squared_error(self.predict(fields[0]), fields[1], graph.input(LOSS_WEIGHT, SCALAR))


@contextmanager
def registered() -> Iterator[None]:
    """Ops that are declared inside are gone afterwards: other tests run every op of the registry."""
    before = dict(REGISTRY)
    try:
        yield
    finally:
        REGISTRY.clear()
        REGISTRY.update(before)


def train(place: str, model: Any, optimizer: Any) -> Outcome:
    device, engine = place.split()
    if device == "golden":
        pytest.importorskip("ttnn", reason="the package ttnn is not installed")
    elif engine == "traced":
        require_compiler()
    return run(model, optimizer, golden() if device == "golden" else cpu(), engine=engine, rows=ROWS, steps=STEPS)


Update = Callable[[str, torch.Tensor, torch.Tensor, float], torch.Tensor]


def plain_descent(name: str, parameter: torch.Tensor, gradient: torch.Tensor, lr: float) -> torch.Tensor:
    return parameter - lr * gradient


def train_in_torch(
    model: Any, predict: Callable[[Tensors, Mapping[str, Any]], torch.Tensor], update: Update = plain_descent
) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses and final parameters in fp64; `predict(parameters, inputs of the step)` is the model's formula."""
    values = initial_values(model, 7)
    parameters = {name: torch.from_numpy(np.array(value)).double() for name, value in values.items()}
    losses = []
    for step in range(1, STEPS + 1):
        given = step_inputs(model, _AnyInputs(), ROWS, step)
        fields = {n: torch.from_numpy(np.array(v)) for n, v in given.items()}
        fields = {n: v.double() if v.is_floating_point() else v for n, v in fields.items()}
        leaves = {name: value.requires_grad_(True) for name, value in parameters.items()}
        error = predict(leaves, fields) - fields["targets"]
        loss = fields[LOSS_WEIGHT] * (error**2).sum()
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        losses.append(float(loss.detach()))
        pairs = zip(leaves.items(), gradients, strict=True)
        parameters = {n: update(n, p.detach(), g, float(fields["lr"])) for (n, p), g in pairs}
    return losses, {name: value.numpy() for name, value in parameters.items()}


class _AnyInputs:
    inputs: tuple[str, ...] = ()


def check(outcome: Outcome, expected: tuple[list[float], dict[str, np.ndarray]], rtol: float = 1e-4) -> None:
    """fp32 beside fp64, over STEPS steps."""
    losses, parameters = expected
    np.testing.assert_allclose(outcome.losses, losses, rtol=rtol)
    for name, wanted in parameters.items():
        scale = float(np.abs(wanted).max())
        np.testing.assert_allclose(outcome.state[name], wanted, rtol=0, atol=rtol * scale, err_msg=name)


def on_mock(folder: Path, *modules: str) -> list[dict[str, Any]]:
    """What a process says that took the step of each module on a mocked board, whose validators take every op."""
    pytest.importorskip("ttnn", reason="the package ttnn is not installed")
    order = json.dumps({"board": "n150", "modules": modules})
    done = forked.run("tests.ttnn.mock_child", order, TTRAIN_CACHE=str(folder), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()[-len(modules) :]]
