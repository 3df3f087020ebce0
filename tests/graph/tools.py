"""Helpers of the tests of graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

import torch

from tests.plan.interpreter import random_tensors, run_plainly, specs
from ttrain.core.spec import DType, TensorSpec
from ttrain.graph import Graph, Kind, Stage, Value

ROWS, PAIR = TensorSpec((4, 3)), TensorSpec((2, 3))


def parameter(graph: Graph, name: str, *shape: int) -> Value:
    return graph.state_value(name, TensorSpec(shape), Kind.PARAMETER)


def tokens(graph: Graph, name: str, *shape: int) -> Value:
    return graph.input(name, TensorSpec(shape, DType.INT64))


def recorded(make: Callable[..., Any], known: Mapping[str, Any], **changed: Any) -> Graph:
    """The graph of a function whose parameters are `known` by name: specs are step inputs, shapes are parameters.

    Other state is a pair of kind and spec; `graph` is the graph. A value that the function returns is output `y`, and
    lists are of outputs, also in a tuple of what it recorded; dicts name them.
    """
    graph, values = Graph(), dict[str, Any]()
    for name in signature(make).parameters:
        given = graph if name == "graph" else {**known, **changed}[name]
        if isinstance(given, TensorSpec):
            values[name] = graph.input(name, given)
        elif isinstance(given, tuple):
            kind, spec = given if given and isinstance(given[0], Kind) else (Kind.PARAMETER, TensorSpec(given))
            values[name] = graph.state_value(name, spec, kind)
        else:
            values[name] = given
    made = make(**values)
    for part in made if isinstance(made, tuple) else (made,):
        outputs = {"y": part} if isinstance(part, Value) and part is made else part
        outputs = {str(number): value for number, value in enumerate(part)} if isinstance(part, list) else outputs
        for name, value in outputs.items() if isinstance(outputs, dict) else ():
            graph.output(name, value)
    return graph


def names(graph: Graph, stage: Stage | None = None) -> list[str]:
    return [node.op.name for node in graph.nodes if stage in (None, node.stage)]


def assert_same_meaning(before: Graph, after: Graph, exact: bool = False) -> None:
    """Equal outputs and equal state, value by value in fp64 arithmetic, which is rounded unless it is `exact`."""
    assert specs(before.inputs) == specs(after.inputs) and specs(before.state) == specs(after.state)
    given = random_tensors(specs(before.inputs), 0), random_tensors(specs(before.state), 1), exact
    near = 1e-12 if exact else 1e-4
    for expected, actual in zip(run_plainly(before, *given), run_plainly(after, *given), strict=True):
        assert expected.keys() == actual.keys()
        for name in expected:
            torch.testing.assert_close(actual[name], expected[name], rtol=near, atol=near, equal_nan=True)
