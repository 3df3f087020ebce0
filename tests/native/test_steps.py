"""Whole training steps on generated kernels: every node has one, and the static engine agrees."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.models.session import Session, token_batch
from tests.native.conftest import require_compiler
from tests.ttnn.runs import adamw, gpt
from ttrain.core.spec import DType
from ttrain.device.torch.device import TorchDevice
from ttrain.device.torch.native.codegen import Request
from ttrain.device.torch.native.rows import NativeKernels
from ttrain.device.torch.native.toolchain import Toolchain
from ttrain.engine.traced import TracedEngine

ROWS, TIME, VOCABULARY = 3, 24, 29


class Device(TorchDevice):
    """The CPU with its compiled libraries in a folder of the test; its products may be compared with libraries'."""

    def __init__(self, folder: Path, threads: int, compares: bool = False, measures: bool = True) -> None:
        super().__init__("cpu", threads=threads)
        self.folder, self.compares, self.measures = folder, compares, measures

    def compiler(self) -> NativeKernels:
        context = self.context if self.compares else replace(self.context, matmul="own")  # nothing is compared
        return NativeKernels(self.kernels, self.threads, Toolchain(self.folder), context, self.measures)


def session(
    engine: str, folder: Path, compute: DType, dropout: float, make_device: Callable[[Path, int], Device] = Device
) -> Session:
    model = gpt(compute, layers=2, heads=2, width=32, context=TIME, vocabulary=VOCABULARY, dropout=dropout)
    return Session(model, adamw(), ROWS, engine=engine, device=make_device(folder, 2))


def losses(run: Session, count: int) -> list[float]:
    steps = range(1, count + 1)
    return [run.train(token_batch(VOCABULARY, ROWS, TIME, n), n, {"lr": 1e-2}, 1000 + n)["loss"] for n in steps]


@pytest.mark.usefixtures("compiled_as_for_users")
@pytest.mark.parametrize(("compute", "dropout"), [(DType.FP32, 0.2), (DType.BF16, 0.1)])
def test_a_gpt_trains_as_with_the_static_engine(folder: Path, compute: DType, dropout: float) -> None:
    require_compiler()
    traced, static = (session(engine, folder, compute, dropout) for engine in ("traced", "static"))
    got, expected, engine = losses(traced, 12), losses(static, 12), traced.engine
    np.testing.assert_allclose(got, expected, rtol=2e-5 if compute is DType.FP32 else 2e-2)
    assert expected[-1] < expected[0] + 0.5  # not a run that has blown up
    assert isinstance(engine, TracedEngine) and engine.compiler is not None
    step = traced.steps["train"]
    names = {node.op.name for node in step.plan.launched}
    assert names >= {"fused", "update"}
    native = engine.compiler
    assert isinstance(native, NativeKernels)
    others = [node for node in step.plan.launched if native.native(Request.of_node(node)) is None]
    assert not others, "every node runs on generated code"
    assert len(step._bound.launches) == 1, "one call runs the whole step"
    fork = ctypes.c_void_p.in_dll(native._loaded[-1], "ttrain_openmp_fork").value
    assert fork is None, "on threads of its own, as no library multiplies"
    assert engine.counters.compilations <= 1
    engine.close()
