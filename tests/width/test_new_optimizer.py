"""An optimizer that nobody wrote a kernel for: one rule, and it trains on every engine and device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ttnn.runs import mlp
from tests.width.tools import PLACES, check, on_mock, registered, train, train_in_torch
from ttrain import ops
from ttrain.graph import Value
from ttrain.nn.module import Parameter
from ttrain.ops.update import Rule, update_rule
from ttrain.optim.settings import OptimizerConfig

BETAS, DECAY = (0.9, 0.99), 0.1


def lion_of_test(
    parameter: Value,
    gradient: Value,
    momentum: Value,
    lr: Value,
    step: Value,
    beta1: float,
    beta2: float,
    weight_decay: float,
) -> tuple[Value, Value]:
    """c = b1 m + (1 - b1) g;  p <- p - lr (sign(c) + wd p);  m <- b2 m + (1 - b2) g (Chen et al., 2023)."""
    direction = ops.sign(beta1 * momentum + (1 - beta1) * gradient)
    return parameter - lr * (direction + weight_decay * parameter), beta2 * momentum + (1 - beta2) * gradient


class Lion:
    def __init__(self) -> None:
        self.config = OptimizerConfig(clip_norm=None)

    def rule(self, parameter: Parameter, decays: bool) -> Rule:
        settings = (("beta1", BETAS[0]), ("beta2", BETAS[1]), ("weight_decay", DECAY * decays))
        return Rule("lion_of_test", ("momentum",), settings)


class TorchLion:
    """The formulas in torch. Matrices decay."""

    def __init__(self) -> None:
        self.momenta: dict[str, torch.Tensor] = {}

    def __call__(self, name: str, parameter: torch.Tensor, gradient: torch.Tensor, lr: float) -> torch.Tensor:
        momentum = self.momenta.get(name, torch.zeros_like(parameter))
        direction = (BETAS[0] * momentum + (1 - BETAS[0]) * gradient).sign()
        self.momenta[name] = BETAS[1] * momentum + (1 - BETAS[1]) * gradient
        return parameter - lr * (direction + DECAY * (parameter.dim() > 1) * parameter)


def declare() -> None:
    update_rule(lion_of_test)


def model() -> Any:
    return mlp(layers=2, activation="tanh")


def optimizer() -> Any:
    return Lion()


def in_torch(parameters: Any, fields: Any) -> torch.Tensor:
    x = fields["inputs"]
    x = torch.nn.functional.linear(x, parameters["layers.0.weight"], parameters["layers.0.bias"]).tanh()
    return torch.nn.functional.linear(x, parameters["layers.1.weight"], parameters["layers.1.bias"])


@pytest.fixture(autouse=True)
def _declared() -> Iterator[None]:
    with registered():
        declare()
        yield


@pytest.mark.parametrize("place", PLACES)
def test_it_trains_as_torch_does(place: str) -> None:
    check(train(place, model(), optimizer()), train_in_torch(model(), in_torch, TorchLion()))


def test_a_mocked_board_takes_its_ops(tmp_path: Path) -> None:
    assert on_mock(__name__, tmp_path) == {"computes": False, "zero": True, "steps": 3}
