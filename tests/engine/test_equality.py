"""Engines give the same numbers to the bit where the kernels are the same, on devices of every kind."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from itertools import product
from typing import Any

import numpy as np
import pytest

from tests.engine.reference_device import ReferenceDevice
from tests.models.session import Session, open_cpu
from tests.ttnn.runs import adamw, batch, mlp, sgd
from ttrain import ops
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.settings import DeviceConfig
from ttrain.device.torch.device import open_device
from ttrain.engine import dynamic as dynamic_engine
from ttrain.engine.dynamic import DynamicEngine
from ttrain.engine.state import State
from ttrain.graph import REGISTRY, Graph, Op, Value
from ttrain.graph.passes import fuse
from ttrain.models.gpt import GPT
from ttrain.models.settings import GPTConfig

COMPOSITE = tuple(item.name for item in REGISTRY.values() if type(item).decompose is not Op.decompose)
FRESH = ("add", "linear", "matmul", "attention", "softmax", "layer_norm", "reduce_sum", "embedding_grad")
SIZES = {"layers": 2, "heads": 2, "width": 8, "context": 4, "vocabulary": 5, "dropout": 0.25, "activation": "tanh"}
LARGER = {"width": 32, "context": 16, "vocabulary": 29}


def gpt(recompute: str = "none", compute: DType = DType.FP32, **changed: Any) -> GPT:
    return GPT(GPTConfig(**{**SIZES, "recompute": recompute, **changed}), compute)


class Run(Session):
    """Three optimizer steps; keeps the state at the end, and how much memory the state takes."""

    def __init__(self, engine: str, model: Any, optimizer: Any, accumulation: int, device: Any) -> None:
        more = {} if engine == "dynamic" else {"rematerialize": engine == "rematerializing"}
        kind, self.device = "dynamic" if engine == "dynamic" else "static", device
        super().__init__(model, optimizer, 2, engine=kind, gradient_accumulation=accumulation, device=device, **more)
        self.held = getattr(device, "live_bytes", 0)
        for step in (1, 2, 3):
            self.train(batch(model, 2 * accumulation, step), step, {"lr": 1e-3 * step}, 7 * step)
        self.final = {name: self.state.read(name) for name in self.state.names()}


ADAMW = adamw()
CASES: dict[str, tuple[Any, Any, int]] = {
    "mlp accumulated": (lambda: mlp(layers=3, width=6, inputs=None, outputs=None, activation="relu"), ADAMW, 2),
    "gpt recomputed": (lambda: gpt("block"), ADAMW, 1),
    # Adam divides a gradient by its own size: rounding could turn the sign of one that is nearly zero.
    "gpt bf16 accumulated": (lambda: gpt("block", DType.BF16), sgd(clip_norm=None), 2),
}
ON_CPU: dict[str, tuple[Any, Any, int]] = {
    "relu": (lambda: gpt(activation="relu", **LARGER), ADAMW, 1),
    "gelu recomputed": (lambda: gpt("block", activation="gelu_tanh", **LARGER), ADAMW, 1),
    "bf16 gelu": (lambda: gpt("none", DType.BF16, activation="gelu_tanh", **LARGER), ADAMW, 1),
    "bf16 relu recomputed": (lambda: gpt("block", DType.BF16, activation="relu", **LARGER), ADAMW, 2),
}
DEVICES: dict[str, Any] = {
    "complete": ReferenceDevice,
    "primitive": lambda: ReferenceDevice(COMPOSITE),
    "primitive, fresh": lambda: ReferenceDevice(COMPOSITE, FRESH),
    "cpu": open_cpu,
}


@pytest.mark.parametrize(("case", "device"), [*product(CASES, list(DEVICES)[:3]), *((case, "cpu") for case in ON_CPU)])
def test_engines_agree(case: str, device: str) -> None:
    make, optimizer, accumulation = (CASES | ON_CPU)[case]
    engines = ("dynamic", "static", "rematerializing")
    first, *others = (Run(engine, make(), optimizer, accumulation, DEVICES[device]()) for engine in engines)
    # A fused reference rounds once where its parts round twice: only then are the last bits free.
    near = 0.0 if device != "complete" else 1e-4 if make().compute is DType.FP32 else 0.05
    for name, value in first.final.items():
        for run in others:
            np.testing.assert_allclose(run.final[name], value, rtol=near, atol=near, err_msg=name)
        assert np.isfinite(value).all()


def test_dynamic_frees_what_backward_has_passed() -> None:
    peaks = {}
    for recompute in ("none", "block"):
        run = Run("dynamic", gpt(recompute, layers=4, context=32), ADAMW, 1, ReferenceDevice())
        peaks[recompute] = run.device.peak_bytes - run.held
        assert run.device.live_bytes == run.held  # and at the end of a step nothing is left
    assert peaks["block"] < peaks["none"]


def test_any_number_of_threads_gives_the_same_bits() -> None:
    found = []
    for threads in (2, 1):
        with closing(open_device(DeviceConfig(name="cpu", threads=threads, matmul="onednn"))) as opened:
            found.append(Run("static", gpt(**LARGER), ADAMW, 1, opened).final)
    assert not [name for name, value in found[0].items() if value.tobytes() != found[1][name].tobytes()]


def test_dynamic_runs_what_it_recorded_this_time(monkeypatch: pytest.MonkeyPatch) -> None:
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

    device = open_cpu()
    step = DynamicEngine(device, State(device, [])).build("changing", trace)
    for number, now in enumerate(ways, start=1):
        for _ in range(2):
            found = step({"a": np.array([-2.0, 3.0], np.float32), "b": np.array([5.0, -7.0], np.float32)})
            assert {name: value.tolist() for name, value in found.items()} == {now[0]: now[2]}
            assert len(joined) == number
