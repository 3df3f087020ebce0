"""An attention bias that nobody wrote a kernel for, on heads that share keys: one function over ops."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.ttnn.runs import sgd
from tests.width.tools import PLACES, TIME, WIDTH, Regression, check, registered, train, train_in_torch
from ttrain import ops
from ttrain.core.spec import DType
from ttrain.graph import Value, composite
from ttrain.nn.initialize import Normal
from ttrain.nn.layers import Linear
from ttrain.nn.module import Buffer, Parameter, use, use_buffer

HEADS, KV_HEADS = 4, 2


def relative_bias_of_test(distances: Value, table: Value) -> Value:
    """bias [1, H, T, T]: table [distances, H] at distances int64 [T, T] (Raffel et al., 2020)."""
    time, heads = distances.shape[0], table.shape[1]
    by_pair = ops.reshape(ops.embedding(distances, table), (time * time, heads))
    return ops.reshape(ops.transpose(by_pair), (1, heads, time, time))


def distances(shape: tuple[int, ...]) -> np.ndarray:
    """Row of the table for each query and key."""
    query, key = np.indices(shape)
    return key - query + TIME - 1


class Biased(Regression):
    """Causal attention over a window of 6 keys, each with a learned bias for its distance."""

    def __init__(self) -> None:
        self.query, self.projection = Linear(WIDTH, WIDTH), Linear(WIDTH, WIDTH)
        self.key, self.value = (Linear(WIDTH, WIDTH // HEADS * KV_HEADS) for _ in range(2))
        self.table = Parameter((2 * TIME - 1, HEADS), Normal(1.0))
        self.distances = Buffer((TIME, TIME), distances, dtype=DType.INT64)
        self.name_parameters()

    def predict(self, x: Value) -> Value:
        table, distances = use(x.graph, self.table, x.spec.dtype), use_buffer(x.graph, self.distances)
        bias = x.graph.apply("relative_bias_of_test", distances, table)
        given = (self.query(x), self.key(x), self.value(x))
        return self.projection(ops.attention(*given, heads=HEADS, kv_heads=KV_HEADS, bias=bias, window=6))


def declare() -> None:
    composite(relative_bias_of_test)


def model() -> Any:
    return Biased()


def optimizer() -> Any:
    return sgd(momentum=0, clip_norm=None, weight_decay=0)


def in_torch(parameters: Any, fields: Any) -> torch.Tensor:
    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, parameters[f"{name}.weight"], parameters[f"{name}.bias"])

    def by_heads(name: str, heads: int) -> torch.Tensor:
        split = linear(name, fields["inputs"]).unflatten(-1, (heads, WIDTH // HEADS)).transpose(1, 2)
        return split.repeat_interleave(HEADS // heads, 1)

    bias = parameters["table"][torch.from_numpy(distances((TIME, TIME)))].permute(2, 0, 1)[None]
    behind = torch.arange(TIME)[:, None] - torch.arange(TIME)
    bias = bias.masked_fill((behind < 0) | (behind >= 6), float("-inf"))
    q, k, v = by_heads("query", HEADS), by_heads("key", KV_HEADS), by_heads("value", KV_HEADS)
    mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, bias)
    return linear("projection", mixed.transpose(1, 2).flatten(2))


@pytest.fixture(autouse=True)
def _declared() -> Iterator[None]:
    with registered():
        declare()
        yield


@pytest.mark.parametrize("place", PLACES)
def test_it_trains_as_torch_does(place: str) -> None:
    check(train(place, model(), optimizer()), train_in_torch(model(), in_torch))
