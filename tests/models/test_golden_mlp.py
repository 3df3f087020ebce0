"""The multilayer perceptron with SGD against torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.models.session import Session, initial_values, relative_error, tensor_by_tensor_equal
from ttrain.models.mlp import MLP
from ttrain.models.settings import MLPConfig
from ttrain.optim.groups import learning_rates
from ttrain.optim.schedules import schedule
from ttrain.optim.settings import ScheduleConfig, SGDConfig
from ttrain.optim.sgd import SGD

ROWS, STEPS = 8, 20
FUNCTIONS = {
    "relu": torch.nn.ReLU(),
    "tanh": torch.nn.Tanh(),
    "gelu": torch.nn.GELU(),
    "gelu_tanh": torch.nn.GELU(approximate="tanh"),
}
OPTIMIZERS = {"plain": {}, "momentum": {"momentum": 0.9}, "nesterov": {"momentum": 0.9, "nesterov": True}}


def plain_mlp(model: MLP, values: dict[str, np.ndarray]) -> torch.nn.Sequential:
    layers: list[torch.nn.Module] = []
    for index, layer in enumerate(model.layers):
        outputs, inputs = layer.weight.shape
        linear_layer = torch.nn.Linear(inputs, outputs, bias=model.config.bias)
        for name, parameter in linear_layer.named_parameters():
            parameter.data = torch.from_numpy(values[f"layers.{index}.{name}"].copy())
        layers += [linear_layer, FUNCTIONS[model.config.activation]]
    return torch.nn.Sequential(*layers[:-1])


def batches() -> list[dict[str, np.ndarray]]:
    generator = np.random.default_rng(0)
    drawn = [generator.standard_normal((ROWS, 5 + 3)).astype(np.float32) for _ in range(STEPS)]
    return [{"inputs": both[:, :5].copy(), "targets": both[:, 5:].copy()} for both in drawn]


def rate(step: int) -> float:
    """Linear warm-up over 3 steps, then a line to zero at step 20, the last."""
    index = step - 1
    return 0.1 * (index + 1) / 4 if index < 3 else 0.1 * (1 - (index - 3) / 16)


def plain_run(plain: torch.nn.Module, options: dict[str, Any]) -> list[float]:
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, weight_decay=0.01, **options)
    losses = []
    for step, batch in enumerate(batches(), 1):
        optimizer.param_groups[0]["lr"] = rate(step)
        loss = torch.nn.functional.mse_loss(
            plain(torch.from_numpy(batch["inputs"])), torch.from_numpy(batch["targets"])
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("activation", "options"), [*zip(FUNCTIONS, [*OPTIMIZERS, "plain"])])
def test_twenty_sgd_steps_equal_pytorch_on_both_engines(activation: str, options: str) -> None:
    model = MLP(MLPConfig(inputs=5, outputs=3, width=16, layers=3, activation=activation))
    values = initial_values(model, seed=2)
    plain = plain_mlp(model, values)
    expected = plain_run(plain, OPTIMIZERS[options])
    config = SGDConfig(lr=0.1, weight_decay=0.01, decay_rule="all", clip_norm=None, **OPTIMIZERS[options])
    shape = ScheduleConfig("linear", warmup=3, min_lr_ratio=0.0)
    rates = learning_rates(model.parameters(), config, schedule(shape, STEPS))
    runs = {}
    for engine in ("dynamic", "static"):
        ours = Session(model, SGD(config), ROWS, engine=engine, values=values)
        losses = [ours.train(batch, step, rates(step))["loss"] for step, batch in enumerate(batches(), 1)]
        np.testing.assert_allclose(losses, expected, rtol=1e-5, err_msg=engine)
        runs[engine] = losses, ours.parameters()
    wanted = (parameter.detach().numpy() for parameter in plain.parameters())
    for (path, value), reference in zip(runs["static"][1].items(), wanted, strict=True):
        assert relative_error(value, reference) < 1e-4, path
    assert runs["dynamic"][0] == runs["static"][0]
    assert tensor_by_tensor_equal(runs["dynamic"][1], runs["static"][1])
