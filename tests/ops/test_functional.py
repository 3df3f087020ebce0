"""Composites against torch.nn.functional in fp64: values and gradients, by an oracle that shares no line with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.ops.harness import Interpreter, as_torch
from ttrain import ops
from ttrain.autodiff import backward
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.torch.device import TorchDevice
from ttrain.graph import REGISTRY, Composite, Graph, Value

ROWS, WIDTH, VOCABULARY = 7, 6, 5
TARGETS = np.array([0, 4, -1, 2, 2, -1, 3])
WEIGHT = np.array(0.3)

Ours = Callable[..., Value]


def tensor(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape)


def targets(value: Value) -> Value:
    return value.graph.input("targets", TensorSpec(TARGETS.shape, DType.INT64))


def weight(value: Value) -> Value:
    return value.graph.input("weight", TensorSpec((), DType.FP64))


HIDDEN, HEAD, BIAS = tensor(ROWS, WIDTH), tensor(VOCABULARY, WIDTH), tensor(VOCABULARY)
X = tensor(3, 4, WIDTH)
# name -> ours, torch's, the tensors that get a gradient
PAIRS: dict[str, tuple[Ours, Callable[..., Any], Sequence[np.ndarray]]] = {
    "head_cross_entropy with a bias, smoothed": (
        lambda h, w, b: ops.head_cross_entropy(h, w, b, targets(h), weight(h), 0.1)[0],
        lambda h, w, b: 0.3 * F.cross_entropy(
            F.linear(h, w, b), torch.from_numpy(TARGETS), ignore_index=-1, reduction="sum", label_smoothing=0.1
        ),
        [HIDDEN, HEAD, BIAS],
    ),
    "squared_error": (
        lambda x: ops.squared_error(x, x.graph.input("truth", TensorSpec(X.shape, DType.FP64)), weight(x)),
        lambda x: 0.3 * F.mse_loss(x, torch.from_numpy(X[::-1].copy()), reduction="sum"),
        [X],
    ),
    "gelu": (lambda x: ops.gelu(x, approximate="none"), lambda x: F.gelu(x), [X]),
    "gelu, tanh": (lambda x: ops.gelu(x), lambda x: F.gelu(x, approximate="tanh"), [X]),
    "softmax": (lambda x: ops.softmax(x, 0.5), lambda x: F.softmax(0.5 * x, -1), [X]),
    "head_matmul": (
        lambda x, m: ops.head_matmul(x, m, 2),
        lambda x, m: F.linear(x.unflatten(2, (2, WIDTH // 2)), m.t()).flatten(2),
        [X, tensor(WIDTH // 2, 4)],
    ),
    "global_norm": (
        lambda x, y: ops.global_norm([x, y]),
        lambda x, y: torch.linalg.vector_norm(torch.cat([x.flatten(), y.flatten()])),
        [X, HEAD],
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=["kernels", "bodies"])
def interpreter(request: pytest.FixtureRequest) -> Callable[[], Interpreter]:
    """The device's own rows for composites, and their bodies alone."""
    composites = [op.name for op in REGISTRY.values() if isinstance(op, Composite) and request.param == "bodies"]
    device = TorchDevice("cpu", threads=1)
    return lambda: Interpreter(device, decomposing=composites)


@pytest.mark.parametrize("name", PAIRS)
def test_values_and_gradients_are_those_of_torch(name: str, interpreter: Callable[[], Interpreter]) -> None:
    feeds = {"targets": TARGETS, "weight": WEIGHT, "truth": X[::-1].copy()}
    assert_equals_torch(*PAIRS[name], feeds, interpreter())


def assert_equals_torch(
    ours: Ours, theirs: Callable[..., Any], arrays: Sequence[np.ndarray], feeds: Mapping[str, Any], run: Interpreter
) -> None:
    """The value, and the gradient of every array, for a random gradient of the value."""
    graph = Graph()
    given = [graph.input(str(index), TensorSpec(array.shape, DType.FP64)) for index, array in enumerate(arrays)]
    y = ours(*given)
    cotangent = tensor(*y.shape) if y.shape else np.array(0.7)
    product = ops.multiply(y, graph.input("cotangent", y.spec))
    gradients = backward(ops.reduce_sum(product, range(y.spec.rank)), given)
    run.run(graph, {**feeds, "cotangent": cotangent, **{str(index): array for index, array in enumerate(arrays)}})
    leaves = [as_torch(array).requires_grad_(True) for array in arrays]  # type: ignore[union-attr]
    expected = theirs(*leaves)
    wanted = torch.autograd.grad(expected, leaves, torch.from_numpy(cotangent))
    np.testing.assert_allclose(run.read(y), expected.detach().numpy(), rtol=1e-10, atol=1e-12)
    for got, gradient in zip(gradients, wanted, strict=True):
        np.testing.assert_allclose(run.read(got), gradient.numpy(), rtol=1e-9, atol=1e-12)
