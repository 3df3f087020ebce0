"""Dynamic and static give the same numbers to the bit where the kernels are the same, on devices of every kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.engine.reference_device import ReferenceDevice
from tests.models.session import Session
from tests.ttnn.runs import batch
from ttrain.core.spec import DType
from ttrain.graph import REGISTRY, Op
from ttrain.models.gpt import GPT
from ttrain.models.mlp import MLP
from ttrain.models.settings import GPTConfig, MLPConfig
from ttrain.optim.adamw import AdamW
from ttrain.optim.settings import AdamWConfig, SGDConfig
from ttrain.optim.sgd import SGD

COMPOSITE = tuple(item.name for item in REGISTRY.values() if type(item).decompose is not Op.decompose)
FRESH = ("add", "linear", "matmul", "attention", "softmax", "layer_norm", "reduce_sum", "embedding_grad")
SIZES = {"heads": 2, "width": 8, "context": 4, "vocabulary": 5}


def gpt(recompute: str = "none", compute: DType = DType.FP32, **sizes: int) -> GPT:
    chosen = {"layers": 2, **SIZES, **sizes}
    return GPT(GPTConfig(dropout=0.25, recompute=recompute, activation="tanh", **chosen), compute)


def mlp() -> MLP:
    return MLP(MLPConfig(layers=3, width=6, activation="relu"))


class Run(Session):
    """Two optimizer steps; keeps the state at the end, and how much memory the state takes."""

    def __init__(
        self, engine: str, model: Any, optimizer: Any, accumulation: int, without: Sequence[str], fresh: Sequence[str]
    ) -> None:
        settings = {} if engine == "dynamic" else {"rematerialize": engine == "rematerializing"}
        kind, self.device = "dynamic" if engine == "dynamic" else "static", ReferenceDevice(without, fresh)
        super().__init__(
            model, optimizer, 2, engine=kind, gradient_accumulation=accumulation, device=self.device, **settings
        )
        self.held = self.device.live_bytes
        for step in (1, 2):
            self.train(batch(model, 2 * accumulation, step), step, {"lr": 0.01 * step}, 7 * step)
        self.final = {name: self.state.read(name) for name in self.state.names()}


CASES: list[tuple[str, Any, Any, int]] = [
    ("mlp accumulated", mlp, lambda: AdamW(AdamWConfig()), 2),
    ("gpt recomputed", lambda: gpt("block"), lambda: AdamW(AdamWConfig()), 1),
    # Adam divides a gradient by its own size: rounding could turn the sign of one that is nearly zero.
    ("gpt bf16 accumulated", lambda: gpt("block", DType.BF16), lambda: SGD(SGDConfig(clip_norm=None)), 2),
]
DEVICES = {"complete": ((), ()), "primitive": (COMPOSITE, ()), "primitive, fresh": (COMPOSITE, FRESH)}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("model", "optimizer", "gradient_accumulation"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_engines_agree(model: Any, optimizer: Any, gradient_accumulation: int, device: str) -> None:
    runs = [
        Run(engine, model(), optimizer(), gradient_accumulation, *DEVICES[device])
        for engine in ("dynamic", "static", "rematerializing")
    ]
    # A fused reference rounds once where its parts round twice: only then are the last bits free.
    exact = device != "complete"
    for run in runs[1:]:
        for name, value in runs[0].final.items():
            assert_equal(name, run.final[name], value, exact, model().compute)
    assert all(np.isfinite(value).all() for value in runs[0].final.values())


def assert_equal(name: str, actual: np.ndarray, expected: np.ndarray, exact: bool, compute: DType) -> None:
    if exact:
        assert np.array_equal(actual, expected), name
    else:
        tolerance = 1e-4 if compute is DType.FP32 else 0.05
        np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance, err_msg=name)


def test_dynamic_frees_what_backward_has_passed() -> None:
    peaks = {}
    for recompute in ("none", "block"):
        run = Run("dynamic", gpt(recompute, layers=8, context=32), AdamW(AdamWConfig()), 1, (), ())
        peaks[recompute] = run.device.peak_bytes - run.held
        assert run.device.live_bytes == run.held  # and at the end of a step nothing is left
    assert peaks["block"] < peaks["none"]
