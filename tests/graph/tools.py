"""What the tests of graphs share."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.plan.interpreter import random_tensors, run_plainly, specs
from ttrain.core.spec import DType, TensorSpec
from ttrain.graph import Graph, Kind, Stage, Value


def parameter(graph: Graph, name: str, *shape: int) -> Value:
    return graph.state_value(name, TensorSpec(shape), Kind.PARAMETER)


def tokens(graph: Graph, name: str, *shape: int) -> Value:
    return graph.input(name, TensorSpec(shape, DType.INT64))


def names(graph: Graph, stage: Stage | None = None) -> list[str]:
    return [node.op.name for node in graph.nodes if stage in (None, node.stage)]


def assert_same_meaning(before: Graph, after: Graph, seed: int = 0) -> None:
    """Equal outputs and equal state, value by value in fp64 arithmetic."""
    assert specs(before.inputs) == specs(after.inputs) and specs(before.state) == specs(after.state)
    inputs, state = random_tensors(specs(before.inputs), seed), random_tensors(specs(before.state), seed + 1)
    for expected, actual in zip(run_plainly(before, inputs, state), run_plainly(after, inputs, state), strict=True):
        assert expected.keys() == actual.keys()
        for name in expected:
            torch.testing.assert_close(actual[name], expected[name], rtol=1e-4, atol=1e-4, equal_nan=True)


Pass = Callable[[Graph], Graph]
