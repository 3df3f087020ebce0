"""What the plan takes for granted of a device's kernels, held against the kernels of the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from tests.models.session import Session, token_batch
from ttrain import ops
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.base import Device
from ttrain.device.settings import DeviceConfig
from ttrain.engine import dynamic as dynamic_engine
from ttrain.engine.dynamic import DynamicEngine
from ttrain.engine.state import State, StateTensor
from ttrain.engine.static import StaticEngine
from ttrain.graph import Graph, Kind, Value
from ttrain.graph.passes import fuse
from ttrain.models.gpt import GPT
from ttrain.models.settings import GPTConfig
from ttrain.optim.adamw import AdamW
from ttrain.optim.settings import AdamWConfig


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    from ttrain.device.torch.device import cpu

    opened = cpu(DeviceConfig(name="cpu", threads=1))
    yield opened
    opened.close()


SIZES = {"layers": 2, "heads": 2, "width": 32, "context": 16, "vocabulary": 29}


def trained(device: Device, model: GPT, engine: str, accumulation: int = 1, **options: Any) -> dict[str, np.ndarray]:
    """State after three optimizer steps."""
    run = Session(
        model, AdamW(AdamWConfig()), 2, engine=engine, gradient_accumulation=accumulation, device=device, **options
    )
    for step in range(1, 4):
        run.train(token_batch(29, 2 * accumulation, 16, step), step, {"lr": 1e-3 * step}, 5 * step)
    return {name: run.state.read(name) for name in run.state.names()}


@pytest.mark.parametrize(
    ("compute", "recompute", "activation", "accumulation"),
    [
        (DType.FP32, "none", "relu", 1),
        (DType.FP32, "block", "gelu_tanh", 1),
        (DType.BF16, "none", "gelu_tanh", 1),
        (DType.BF16, "block", "relu", 2),
    ],
)
def test_engines_and_rematerialization_agree_to_the_bit(
    device: Device, compute: DType, recompute: str, activation: str, accumulation: int
) -> None:
    model = GPT(GPTConfig(dropout=0.1, recompute=recompute, activation=activation, **SIZES), compute)
    dynamic = trained(device, model, "dynamic", accumulation)
    for rematerialize in (False, True):
        static = trained(device, model, "static", accumulation, rematerialize=rematerialize)
        assert not [name for name, value in static.items() if not np.array_equal(value, dynamic[name])]


def test_any_number_of_threads_gives_the_same_bits() -> None:
    from ttrain.device.torch.device import cpu

    found = []
    for threads in (2, 1):
        with closing(cpu(DeviceConfig(name="cpu", threads=threads, matmul="onednn"))) as opened:
            found.append(trained(opened, GPT(GPTConfig(dropout=0.1, **SIZES), DType.FP32), "static"))
    assert not [name for name, value in found[0].items() if value.tobytes() != found[1][name].tobytes()]


def test_fused_forms_agree_with_their_parts(device: Device) -> None:
    def trace(graph: Graph) -> None:
        x = graph.input("x", TensorSpec((6, 8)))
        up = graph.state_value("up", TensorSpec((16, 8)), Kind.PARAMETER)
        down = graph.state_value("down", TensorSpec((8, 16)), Kind.PARAMETER)
        bias = graph.state_value("bias", TensorSpec((16,)), Kind.PARAMETER)
        norm = graph.state_value("norm", TensorSpec((8,)), Kind.PARAMETER)
        hidden = ops.gelu(ops.add(ops.linear(x, up), bias))
        total = ops.add(x, ops.linear(hidden, down))
        graph.output("y", ops.layer_norm(total, norm, None))
        graph.output("total", total)

    probe = Graph()
    trace(probe)
    results = []
    for kind in (DynamicEngine, StaticEngine):
        state = State(device, [StateTensor(name, value.spec, value.kind) for name, value in probe.state.items()])
        generator = np.random.default_rng(0)
        for name in state.names():
            state.write(name, generator.standard_normal(state.spec(name).shape).astype(np.float32))
        step = kind(device, state).build("forms", trace)
        results.append(step({"x": generator.standard_normal((6, 8)).astype(np.float32)}))
        if kind is StaticEngine:
            assert [node.op.name for node in step.plan.launched] == ["linear", "linear", "add_layer_norm"]
    for name, value in results[0].items():
        np.testing.assert_allclose(results[1][name], value, rtol=1e-5, atol=1e-5)


def test_dynamic_runs_what_it_recorded_this_time(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes run again for a graph that was recorded otherwise than the last one, and only then."""
    joined: list[Graph] = []
    monkeypatch.setattr(dynamic_engine, "fuse", lambda graph, rows: joined.append(graph) or fuse(graph, rows))
    ways: list[tuple[str, Callable[[Value, Value], Value], list[float]]] = [
        ("y", lambda a, b: ops.scale(a, 2.0), [-4.0, 6.0]),
        ("y", lambda a, b: ops.scale(a, 3.0), [-6.0, 9.0]),
        ("y", lambda a, b: ops.scale(b, 3.0), [15.0, -21.0]),
        ("y", lambda a, b: ops.relu(b), [5.0, 0.0]),
        ("z", lambda a, b: ops.relu(b), [5.0, 0.0]),
    ]
    spec, now = TensorSpec((2,)), ways[0]

    def trace(graph: Graph) -> None:
        graph.output(now[0], now[1](graph.input("a", spec), graph.input("b", spec)))

    step = DynamicEngine(device, State(device, [])).build("changing", trace)
    for number, now in enumerate(ways, start=1):
        for _ in range(2):
            found = step({"a": np.array([-2.0, 3.0], np.float32), "b": np.array([5.0, -7.0], np.float32)})
            assert {name: value.tolist() for name, value in found.items()} == {now[0]: now[2]}
            assert len(joined) == number
