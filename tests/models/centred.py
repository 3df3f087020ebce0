"""A model with buffers: a derived table, and a running mean that is saved."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ttrain import ops
from ttrain.core.spec import DType, TensorSpec
from ttrain.graph import Graph, Value
from ttrain.models.base import LOSS_WEIGHT, SCALAR
from ttrain.nn.layers import Linear
from ttrain.nn.module import Buffer, Module, use_buffer

WIDTH, KEEP = 8, 0.75


def waves(shape: tuple[int, ...]) -> np.ndarray:
    return np.sin(1 + np.arange(shape[0]))


@dataclass
class CentredConfig:
    name: str = "centred"


class Centred(Module):
    """Regression on inputs less their running mean, plus a table."""

    def __init__(self, compute: DType = DType.FP32, saved: bool = True) -> None:
        self.config, self.compute = CentredConfig(), compute
        self.linear = Linear(WIDTH, WIDTH)
        self.table = Buffer((WIDTH,), waves)
        self.mean = Buffer((WIDTH,), np.zeros, saved=saved)
        self.name_parameters()

    def batch_specs(self, rows: int) -> dict[str, TensorSpec]:
        return dict.fromkeys(("inputs", "targets"), TensorSpec((rows, WIDTH)))

    def loss(self, graph: Graph, rows: int, training: bool) -> Value:
        given = {name: graph.input(name, spec) for name, spec in self.batch_specs(rows).items()}
        mean = use_buffer(graph, self.mean)
        if training:
            now = ops.reduce_sum(given["inputs"], [0]) * (1 / rows)
            mean = ops.assign(mean, mean * KEEP + now * (1 - KEEP))
        x = given["inputs"] - mean + use_buffer(graph, self.table)
        y = ops.cast(self.linear(ops.cast(x, self.compute)), DType.FP32)
        return ops.squared_error(y, given["targets"], graph.input(LOSS_WEIGHT, SCALAR))
