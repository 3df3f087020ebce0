"""Plans executed to the byte give the numbers that the graph means."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.plan.interpreter import random_tensors, run_plainly, run_planned, specs
from tests.plan.random_graphs import kernel_tables, step_graphs
from ttrain.device.base import Kernel
from ttrain.graph import Graph
from ttrain.graph.passes import fuse, merge_common_subexpressions, remove_dead_code
from ttrain.graph.verify import verify
from ttrain.plan import build_plan

RELAXED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}


def assert_same(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        tolerance = 0.05 if tensor.dtype is torch.bfloat16 else 1e-3
        torch.testing.assert_close(
            actual[name], tensor, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m, name=name: f"{name}: {m}"
        )


@settings(max_examples=250, derandomize=True, **RELAXED)
@given(graph=step_graphs(), kernels=kernel_tables(), seed=st.integers(0, 99))
def test_a_plan_followed_to_the_byte_computes_what_the_graph_means(
    graph: Graph, kernels: dict[str, Kernel], seed: int
) -> None:
    verify(graph, "recording")
    inputs, state = random_tensors(specs(graph.inputs), seed), random_tensors(specs(graph.state), seed + 1)
    plan = build_plan(graph, kernels)
    for planned, plain in zip(
        run_planned(plan, kernels, inputs, state), run_plainly(graph, inputs, state), strict=True
    ):
        assert_same(planned, plain)
