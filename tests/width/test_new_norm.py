"""A norm that nobody wrote a kernel for: one function, and it trains on every engine and device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ttnn.runs import sgd
from tests.width.tools import PLACES, WIDTH, Regression, check, on_mock, registered, train, train_in_torch
from ttrain import ops
from ttrain.graph import Value, composite
from ttrain.nn.initialize import Constant
from ttrain.nn.layers import Linear
from ttrain.nn.module import Parameter, use


def rms_norm_of_test(x: Value, weight: Value, eps: float = 1e-6) -> Value:
    """y = x / sqrt(mean(x^2) + eps) * weight over the last axis of x; weight [C] (Zhang and Sennrich, 2019)."""
    return x / ops.sqrt(ops.mean(x * x, -1) + eps) * weight


class Normed(Regression):
    def __init__(self) -> None:
        self.first, self.second = Linear(WIDTH, WIDTH), Linear(WIDTH, WIDTH)
        self.weight = Parameter((WIDTH,), Constant(1.0))
        self.name_parameters()

    def predict(self, x: Value) -> Value:
        y = self.first(x)
        return self.second(y.graph.apply("rms_norm_of_test", y, use(y.graph, self.weight, y.spec.dtype), eps=1e-6))


def declare() -> None:
    composite(rms_norm_of_test)


def model() -> Any:
    return Normed()


def optimizer() -> Any:
    return sgd(momentum=0, clip_norm=None, weight_decay=0)


def in_torch(parameters: Any, fields: Any) -> torch.Tensor:
    y = torch.nn.functional.linear(fields["inputs"], parameters["first.weight"], parameters["first.bias"])
    y = torch.nn.functional.rms_norm(y, (WIDTH,), parameters["weight"], 1e-6)
    return torch.nn.functional.linear(y, parameters["second.weight"], parameters["second.bias"])


@pytest.fixture(autouse=True)
def _declared() -> Iterator[None]:
    with registered():
        declare()
        yield


@pytest.mark.parametrize("place", PLACES)
def test_it_trains_as_torch_does(place: str) -> None:
    check(train(place, model(), optimizer()), train_in_torch(model(), in_torch))


def test_a_mocked_board_takes_its_ops(tmp_path: Path) -> None:
    assert on_mock(__name__, tmp_path) == {"computes": False, "zero": True, "steps": 3}
