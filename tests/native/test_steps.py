"""Whole training steps on generated kernels: every node has one, and the static engine agrees."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.native.conftest import require_compiler
from ttrain.core.spec import DType
from ttrain.device.torch.device import TorchDevice
from ttrain.device.torch.native import NativeKernels, Toolchain
from ttrain.device.torch.native.request import Request
from ttrain.engine.state import State
from ttrain.engine.static import StaticEngine
from ttrain.engine.traced import TracedEngine
from ttrain.models.gpt import GPT
from ttrain.models.settings import GPTConfig
from ttrain.optim.adamw import AdamW
from ttrain.optim.settings import AdamWConfig
from ttrain.train.steps.step_graph import StepGraph

ROWS, TIME, VOCABULARY = 3, 24, 29


class Device(TorchDevice):
    """The CPU with its compiled libraries in a folder of the test."""

    def __init__(self, folder: Path, threads: int) -> None:
        super().__init__("cpu", threads=threads)
        self.folder = folder

    def compiler(self) -> NativeKernels:
        return NativeKernels(self.kernels, self.threads, Toolchain(self.folder))


def session(
    engine_class: type[StaticEngine],
    folder: Path,
    compute: DType,
    dropout: float,
    make_device: Callable[[Path, int], Device] = Device,
) -> tuple[Any, StaticEngine]:
    device = make_device(folder, 2)
    model = GPT(GPTConfig(layers=2, heads=2, width=32, context=TIME, vocabulary=VOCABULARY, dropout=dropout), compute)
    steps = StepGraph(model, AdamW(AdamWConfig()), ROWS)
    state = State(device, steps.state_tensors())
    generator = np.random.default_rng(0)
    for parameter in steps.parameters:
        values = generator.normal(size=parameter.shape) * 0.1 + (1.0 if "norm" in parameter.path else 0.0)
        state.write(parameter.path, values.astype(np.float32))
    engine = engine_class(device, state)
    return engine.build("train", steps.trace_train), engine


def losses(step: Any, count: int) -> list[float]:
    generator, found = np.random.default_rng(1), []
    for number in range(1, count + 1):
        text = generator.integers(0, VOCABULARY, (ROWS, TIME + 1))
        inputs = {
            "tokens": text[:, :-1].copy(), "targets": text[:, 1:].copy(), "loss_weight": 1 / (ROWS * TIME),
            "lr": 1e-2, "step": number, "seed": 1000 + number,
        }  # fmt: skip
        found.append(step({name: value for name, value in inputs.items() if name in step.inputs})["loss"])
    return found


@pytest.mark.parametrize(("compute", "dropout"), [(DType.FP32, 0.2), (DType.BF16, 0.1)])
def test_a_gpt_trains_as_with_the_static_engine(folder: Path, compute: DType, dropout: float) -> None:
    require_compiler()
    traced, engine = session(TracedEngine, folder, compute, dropout)
    static, _ = session(StaticEngine, folder, compute, dropout)
    got, expected = losses(traced, 12), losses(static, 12)
    np.testing.assert_allclose(got, expected, rtol=2e-5 if compute is DType.FP32 else 2e-2)
    assert expected[-1] < expected[0] + 0.5  # not a run that has blown up
    assert isinstance(engine, TracedEngine) and engine.compiler is not None
    names = {node.op.name for node in traced.plan.launched}
    assert names >= {"fused", "update"}
    native = engine.compiler
    assert isinstance(native, NativeKernels)
    others = [node for node in traced.plan.launched if native.native(Request.of_node(node)) is None]
    assert not others, "every node runs on generated code"
    assert len(traced._bound.launches) == 1, "one call runs the whole step"
    assert engine.counters.compilations <= 1 and engine.counters.allocations_after_first == 0
    engine.close()
