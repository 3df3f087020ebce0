"""Plans executed to the byte give the numbers that the graph means."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import accumulate

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.graph.tools import assert_same_meaning
from tests.plan.interpreter import random_tensors, run_plainly, run_planned, specs
from tests.plan.random_graphs import kernel_tables, step_graphs
from tests.ttnn.runs import adamw, gpt
from ttrain.autodiff.rematerialize import rematerialize
from ttrain.core.spec import DType
from ttrain.device.base import Kernel, align
from ttrain.device.null import NullDevice
from ttrain.engine.state import State
from ttrain.engine.static import StaticEngine
from ttrain.graph import REGISTRY, Graph
from ttrain.graph.passes import fuse, merge_common_subexpressions, remove_dead_code, store_early
from ttrain.graph.verify import verify
from ttrain.plan import build_plan
from ttrain.plan.arena import GradientReuse
from ttrain.train.steps.step_graph import StepGraph

RELAXED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}


Tensors = Mapping[str, torch.Tensor]


def assert_same(
    actual: tuple[Tensors, Tensors], expected: tuple[Tensors, Tensors], compute: DType = DType.FP32
) -> None:
    """Equal outputs and equal state."""
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            near = 0.05 if compute is DType.BF16 or tensor.dtype is torch.bfloat16 else 1e-3
            torch.testing.assert_close(ours[name], tensor, rtol=near, atol=near, equal_nan=True)


def reusable(graph: Graph) -> GradientReuse:
    """The memory of all state, in two runs."""
    ends = list(accumulate(align(value.spec.nbytes) for value in graph.state.values()))
    firsts = [end + 64 * (2 * number >= len(ends)) for number, end in enumerate([0, *ends[:-1]])]
    tensors = zip(graph.state.items(), firsts, strict=False)
    places = {name: (first, value.spec.nbytes) for (name, value), first in tensors}
    return GradientReuse((ends[-1] if ends else 0) + 128, places)


@settings(max_examples=150, derandomize=True, **RELAXED)
@given(graph=step_graphs(), kernels=kernel_tables(), seed=st.integers(0, 99))
def test_a_plan_followed_to_the_byte_computes_what_the_graph_means(
    graph: Graph, kernels: dict[str, Kernel], seed: int
) -> None:
    verify(graph, "recording")
    inputs, state = random_tensors(specs(graph.inputs), seed), random_tensors(specs(graph.state), seed + 1)
    reuse = reusable(graph)
    plan = build_plan(graph, kernels, reuse=reuse)
    assert_same(run_planned(plan, kernels, inputs, state, reuse), run_plainly(graph, inputs, state))


@settings(max_examples=100, derandomize=True, **RELAXED)
@given(graph=step_graphs(floats=(DType.FP32, DType.FP64)))
def test_passes_keep_what_a_graph_means(graph: Graph) -> None:
    fuse_all = partial(fuse, kernels=REGISTRY)
    for rewriting in (remove_dead_code, merge_common_subexpressions, fuse_all, rematerialize, store_early):
        assert_same_meaning(graph, verify(rewriting(graph), str(rewriting)), exact=True)


STEPS = [
    (DType.FP32, "none", 1), (DType.FP32, "block", 1), (DType.FP32, "none", 2), (DType.BF16, "block", 2),
]  # fmt: skip


@pytest.mark.parametrize(("compute", "recompute", "gradient_accumulation"), STEPS)
def test_the_planned_training_step_of_a_transformer(compute: DType, recompute: str, gradient_accumulation: int) -> None:
    """The planned step, after every pass, equals the recorded step value by value."""
    sizes = {"layers": 2, "heads": 2, "width": 8, "context": 4, "vocabulary": 2}
    model = gpt(compute, dropout=0.2, recompute=recompute, **sizes)
    device, steps = NullDevice(), StepGraph(model, adamw(), 2, gradient_accumulation)
    engine = StaticEngine(device, State(device, steps.state_tensors()))
    for trace in steps.train_steps().values():
        recorded = Graph()
        trace(recorded)
        inputs, state = random_tensors(specs(recorded.inputs), 0), random_tensors(specs(recorded.state), 1)
        state = {name: value.abs() if name.endswith("second_moment") else value for name, value in state.items()}
        inputs["step"] = torch.tensor(3.0)
        plan = build_plan(engine.derive(trace), device.kernels)
        planned = run_planned(plan, device.kernels, inputs, state)
        assert_same(planned, run_plainly(recorded, inputs, state), compute)
