"""Optimizers that torch lacks, or has in another form, beside plain formulas at fp64: 20 updates on every engine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.native.conftest import require_compiler
from tests.optim.test_contract import gradient
from tests.ttnn.runs import ENGINES, cpu, golden
from ttrain.core.spec import DType
from ttrain.engine.state import State
from ttrain.nn.initialize import Normal
from ttrain.nn.layers import Embedding, LayerNorm, Linear
from ttrain.nn.module import Module
from ttrain.optim.adamw import AdamW
from ttrain.optim.groups import learning_rates
from ttrain.optim.lion import Lion
from ttrain.optim.settings import AdamWConfig, LionConfig
from ttrain.train.steps.step_graph import StepGraph

PLACES = ("cpu dynamic", "cpu static", "cpu traced", "golden static")
STEPS = 20
Tensor = torch.Tensor


class Layers(Module):
    """What a model is made of: a table, a wide and a tall matrix with biases, a norm, a head."""

    def __init__(self) -> None:
        self.config, self.compute = None, DType.FP32
        self.embedding = Embedding(11, 8, Normal(1.0))
        self.wide, self.tall = Linear(20, 8), Linear(8, 24)
        self.norm = LayerNorm(8)
        self.head = Linear(8, 11)
        self.name_parameters()


Formula = Callable[[str, Tensor, Tensor, dict[str, Tensor], float, int], Tensor]  # -> the new parameter


def decayed(p: Tensor, lr: float, weight_decay: float) -> Tensor:
    return p * (1 - lr * weight_decay * (p.dim() > 1))


def lion(name: str, p: Tensor, g: Tensor, kept: dict[str, Tensor], lr: float, step: int) -> Tensor:
    m = kept.get("m", torch.zeros_like(p))
    kept["m"] = 0.99 * m + 0.01 * g
    return decayed(p, lr, 0.5) - lr * (0.9 * m + 0.1 * g).sign()


def cautious(name: str, p: Tensor, g: Tensor, kept: dict[str, Tensor], lr: float, step: int) -> Tensor:
    m, v = (kept.get(key, torch.zeros_like(p)) for key in "mv")
    m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g**2
    kept |= {"m": m, "v": v}
    change = m / (1 - 0.9**step) / ((v / (1 - 0.95**step)).sqrt() + 1e-8)
    agreeing = (change * p >= 0) & (p.dim() > 1)
    return p - lr * (change + 0.5 * torch.where(agreeing, p, 0))


TABLE: dict[str, tuple[Any, Formula]] = {
    "lion": (Lion(LionConfig(lr=0.01, weight_decay=0.5)), lion),
    "cautious": (AdamW(AdamWConfig(lr=0.01, weight_decay=0.5, cautious=True)), cautious),
}


def rate(step: int) -> float:
    return 1 / (1 + step % 7)


class Run:
    """Updates on gradients that the test writes. Accumulation makes the update a step of its own."""

    def __init__(self, place: str, optimizer: Any, model: Any) -> None:
        device, engine = place.split()
        if device == "golden":
            pytest.importorskip("ttnn", reason="the package ttnn is not installed")
        elif engine == "traced":
            require_compiler()
        self.model, self.optimizer = model, optimizer
        self.graph = StepGraph(model, optimizer, rows=1, accumulation=2)
        self.state = State(golden() if device == "golden" else cpu(), self.graph.state_tensors())
        for path, parameter in model.parameters().items():
            self.state.write(path, gradient(path, parameter.shape, 99))
        self.step = ENGINES[engine](self.state.device, self.state).build("update", self.graph.trace_update)
        self.rates = learning_rates(model.parameters(), optimizer.config, rate)

    def advance(self, step: int) -> None:
        for path, parameter in self.model.parameters().items():
            self.state.write(f"{path}/gradient", gradient(path, parameter.shape, step))
        given = {**self.rates(step), "step": step, "rounding_seed": 2**40 + step}
        self.step({name: value for name, value in given.items() if name in self.step.inputs})


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", TABLE)
def test_twenty_updates_are_those_of_the_formula(name: str, place: str) -> None:
    optimizer, formula = TABLE[name]
    optimizer.config.clip_norm = 1.0
    run = Run(place, optimizer, Layers())
    shapes = {path: parameter.shape for path, parameter in run.model.parameters().items()}
    values = {path: torch.from_numpy(gradient(path, shape, 99)).double() for path, shape in shapes.items()}
    kept: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for step in range(1, STEPS + 1):
        run.advance(step)
        gradients = {path: torch.from_numpy(gradient(path, shape, step)).double() for path, shape in shapes.items()}
        norm = torch.stack([g.norm() for g in gradients.values()]).norm()
        lr = optimizer.config.lr * rate(step)
        for path, p in values.items():
            values[path] = formula(path, p, gradients[path] / (norm + 1e-6), kept[path], lr, step)
    for path, wanted in values.items():
        scale = float(wanted.abs().max())
        np.testing.assert_allclose(run.state.read(path), wanted.numpy(), rtol=0, atol=1e-5 * scale, err_msg=path)
