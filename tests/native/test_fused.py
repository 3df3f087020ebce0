"""Programs of elementwise steps: any program over any broadcast equals the steps one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.native.conftest import NativeDevice
from tests.native.test_numbers import run_all
from tests.ops.harness import assert_within
from ttrain.core.spec import DType
from ttrain.graph import op
from ttrain.ops.program import step
from ttrain.testing.compare import Tolerance

BINARY = ("add", "subtract", "multiply", "gelu_grad", "tanh_grad", "relu_grad")
UNARY = ("scale", "gelu", "tanh", "relu", "cast", "sigmoid", "dropout")
ATTRIBUTES: dict[str, dict[str, Any]] = {
    "scale": {"factor": -0.75},
    "gelu": {"approximate": "tanh"},
    "gelu_grad": {"approximate": "none"},
    "dropout": {"p": 0.5, "stream": 9},
}

Fused = tuple[list[torch.Tensor], dict[str, Any]]  # inputs and attributes of one fused op


@st.composite
def programs(draw: st.DrawFn) -> Fused:
    """Inputs and attributes of one fused op. Input 0 has the whole shape, the last is a seed."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)) + [draw(st.sampled_from([1, 7, 16, 40]))])
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    inputs = [torch.randn(shape, generator=generator).to(dtype)]
    for _ in range(draw(st.integers(0, 3))):
        lead = draw(st.integers(0, len(shape)))
        smaller = [draw(st.sampled_from([1, size])) for size in shape[lead:]]
        inputs.append(torch.randn(smaller, generator=generator).to(dtype))
    inputs.append(torch.tensor(2**40 + 3))
    count, seed, steps = len(inputs), len(inputs) - 1, []
    for number in range(draw(st.integers(1, 6))):
        name = draw(st.sampled_from(BINARY + UNARY))
        whole = [0, *range(count, count + number)]  # the first operand gives a result its shape
        first = draw(st.sampled_from(whole))
        attributes = dict(ATTRIBUTES.get(name, {}))
        if name == "cast":
            attributes["dtype"] = draw(st.sampled_from([DType.FP32, DType.BF16]))
        operands = [first]
        if name == "dropout":
            operands.append(seed)
        elif name in BINARY:
            others = whole if name.endswith("_grad") else [*whole, *range(1, seed)]
            operands.append(draw(st.sampled_from(others)))
        steps.append(step(name, *operands, **attributes))
    last = len(steps) - 1
    results = sorted({last, *draw(st.lists(st.integers(0, last), max_size=2))})
    return inputs, {"program": tuple(steps), "results": tuple(results)}


@settings(
    max_examples=1,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(cases=st.lists(programs(), min_size=40, max_size=40))
def test_any_program_equals_its_steps(
    device: NativeDevice, cases: list[tuple[list[torch.Tensor], dict[str, Any]]]
) -> None:
    runs = [("fused", inputs, attributes) for inputs, attributes in cases]
    for (_, inputs, attributes), outputs in zip(runs, run_all(device, runs), strict=True):
        exact = [x.double() if x.is_floating_point() else x for x in inputs]
        expected = op("fused").reference(*exact, **attributes)
        for got, wanted in zip(outputs, expected, strict=True):
            unit = DType.BF16 if got.dtype is torch.bfloat16 else DType.FP32
            allowed = Tolerance(1.01, 1.01) if unit is DType.BF16 else Tolerance(400, 400)
            assert_within(
                got.double().numpy(), np.broadcast_to(wanted.numpy(), got.shape), unit, allowed, str(attributes)
            )
