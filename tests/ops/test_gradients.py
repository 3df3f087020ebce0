"""Every gradient rule against torch autograd on the op's reference in fp64, and against finite differences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tests.ops.harness import Arrays, Interpreter, all_cases, draw, every_op, only, record
from tests.ops.ulp import assert_within
from ttrain.autodiff import backward
from ttrain.core.spec import DType
from ttrain.device.base import Device
from ttrain.graph import Case, Op
from ttrain.testing.cases import (
    DIFFERENTIABLE_OUTPUTS,
    leaves_of,
    output_choices,
    reference_gradients,
    weighted_loss,
)
from ttrain.testing.tolerances import GRADIENT

COMPOSITE = ("attention", "layer_norm", "head_cross_entropy", "cross_entropy", "gelu")


def trained(*dtypes: DType, where: Callable[[Op], bool] = lambda op: True) -> list[Any]:
    """Every case that backward may pass through."""
    return only(all_cases(*dtypes, where=where), lambda op, case, dtype: op.differentiable)


def gradients(
    device: Device, op: Op, case: Case, dtype: DType, arrays: Arrays, chosen: Sequence[int]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Gradients by input name as our graph computes them, and as autograd does."""
    graph, values, outputs = record(op, case, dtype)
    leaves = leaves_of(op, values)
    loss = weighted_loss([outputs[index] for index in chosen], arrays, op.name)
    _, expected = reference_gradients(graph, arrays, loss, leaves)
    found = backward(loss, list(leaves.values()))
    interpreter = Interpreter(device)
    interpreter.run(graph, arrays)
    return {name: interpreter.read(g) for name, g in zip(leaves, found, strict=True)}, expected


@every_op(trained(*GRADIENT))
def test_gradient_equals_autograd(device: Device, op: Op, case: Case, dtype: DType) -> None:
    for chosen in output_choices(op, case, dtype):
        got, expected = gradients(device, op, case, dtype, draw(op, case, dtype), chosen)
        for name, gradient in got.items():
            what = f"d{op.name}/d{name} from outputs {chosen}"
            assert_within(gradient, expected[name], dtype, GRADIENT[dtype], what)


@every_op(trained(DType.FP64, where=lambda op: op.name in COMPOSITE))
def test_gradient_equals_finite_differences_of_the_kernel(device: Device, op: Op, case: Case, dtype: DType) -> None:
    chosen = list(range(DIFFERENTIABLE_OUTPUTS.get(op.name, 1)))
    arrays = draw(op, case, dtype)
    got, _ = gradients(device, op, case, dtype, arrays, chosen)
    weights = [arrays[f"weight of output {number}"] for number in range(len(chosen))]
    generator = np.random.default_rng(0)
    step = 1e-5
    for name, gradient in got.items():
        direction = generator.normal(size=gradient.shape)
        moved = []
        for sign in (1, -1):
            graph, _, outputs = record(op, case, dtype)
            interpreter = Interpreter(device)
            interpreter.run(graph, {**arrays, name: np.asarray(arrays[name]) + sign * step * direction})
            values = [interpreter.read(outputs[index]) for index in chosen]
            moved.append(sum(float((value * weight).sum()) for value, weight in zip(values, weights, strict=True)))
        slope = (moved[0] - moved[1]) / (2 * step)
        expected = float((gradient * direction).sum())
        assert slope == pytest.approx(expected, rel=1e-6, abs=1e-7), f"d{op.name}/d{name}"
