"""Every gradient rule against torch autograd on the op's reference in fp64, and against finite differences."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tests.ops.harness import Arrays, Interpreter, all_cases, as_torch, draw, record, reference, rounded
from tests.ops.ulp import Tolerance, assert_within
from ttrain.autodiff import backward
from ttrain.core.spec import DType
from ttrain.device.base import Device
from ttrain.graph.graph import Graph, Value
from ttrain.graph.op import Case, Op
from ttrain.ops import add, cast, multiply, reduce_sum

# Outputs that a loss may be formed from; the others are statistics that only the op's own backward reads.
DIFFERENTIABLE_OUTPUTS = {"add_layer_norm": 2, "split_heads": 3}
TOLERANCES = {DType.FP64: Tolerance(4096, 1024), DType.FP32: Tolerance(64, 24), DType.BF16: Tolerance(6, 4)}
COMPOSITE = ("self_attention", "layer_norm", "add_layer_norm", "linear_cross_entropy", "cross_entropy", "gelu")


def has_gradient(op: Op) -> bool:
    return op.differentiable


def trainable(op: Op, case: Case) -> bool:
    return case.attributes.get("gradients", True)


def leaf_names(op: Op, values: dict[str, Value]) -> list[str]:
    return [n for n, v in values.items() if v.spec.dtype.is_floating and n.partition(".")[0] not in op.constants]


def seeds(outputs: Sequence[Value], name: str) -> list[np.ndarray]:
    """The gradients of the outputs: fixed random numbers."""
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    return [rounded(np.asarray(generator.normal(size=output.shape)), output.spec.dtype) for output in outputs]


def total(graph: Graph, outputs: Sequence[Value], arrays: Arrays, weights: Sequence[np.ndarray]) -> Value:
    """sum(output * weight) over all outputs, a scalar of the graph."""
    loss = None
    for number, (output, weight) in enumerate(zip(outputs, weights, strict=True)):
        name = f"weight of output {number}"
        arrays[name] = weight
        product = multiply(output, graph.input(name, output.spec))
        term = reduce_sum(cast(product, product.spec.dtype.wide), range(product.spec.rank))
        loss = term if loss is None else add(loss, term)
    assert loss is not None
    return loss


def traced_gradients(
    device: Device, op: Op, case: Case, dtype: DType, arrays: Arrays, chosen: Sequence[int], without: Sequence[str] = ()
) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    """Gradients by input name as our graph computes them, and the weights of the loss."""
    graph, values, outputs = record(op, case, dtype)
    kept = [outputs[index] for index in chosen]
    weights = seeds(kept, op.name)
    names = [name for name in leaf_names(op, values) if name not in without]
    gradients = backward(total(graph, kept, arrays, weights), [values[name] for name in names])
    interpreter = Interpreter(device)
    interpreter.run(graph, arrays)
    return {name: interpreter.read(g) for name, g in zip(names, gradients, strict=True)}, weights


def reference_gradients(
    op: Op, case: Case, arrays: Arrays, names: Sequence[str], weights: Sequence[np.ndarray], chosen: Sequence[int]
) -> dict[str, np.ndarray]:
    tensors = {name: as_torch(array) for name, array in arrays.items() if not name.startswith("weight of")}
    leaves = [tensors[name].requires_grad_(True) for name in names]  # type: ignore[union-attr]
    outputs = reference(op, case, list(tensors.values()))
    loss = sum((outputs[index] * torch.from_numpy(weight)).sum() for index, weight in zip(chosen, weights, strict=True))
    assert isinstance(loss, torch.Tensor)
    return {name: g.numpy() for name, g in zip(names, torch.autograd.grad(loss, leaves), strict=True)}


def output_choices(op: Op, case: Case, dtype: DType) -> list[list[int]]:
    count = min(DIFFERENTIABLE_OUTPUTS.get(op.name, 1), len(record(op, case, dtype)[2]))
    alone = [[index] for index in range(count)]
    return [*alone, list(range(count))] if count > 1 else alone


@pytest.mark.parametrize(("op", "case", "dtype"), all_cases(*TOLERANCES, where=has_gradient))
def test_gradient_equals_autograd(device: Device, op: Op, case: Case, dtype: DType) -> None:
    if not trainable(op, case):
        return
    for chosen in output_choices(op, case, dtype):
        arrays = draw(op, case, dtype)
        without = ("weight", "bias") if op.name == "add_layer_norm" and chosen == [0] else ()
        got, weights = traced_gradients(device, op, case, dtype, arrays, chosen, without)
        expected = reference_gradients(op, case, arrays, list(got), weights, chosen)
        for name, gradient in got.items():
            what = f"d{op.name}/d{name} from outputs {chosen}"
            assert_within(gradient, expected[name], dtype, TOLERANCES[dtype], what)


@pytest.mark.parametrize(("op", "case", "dtype"), all_cases(DType.FP64, where=lambda op: op.name in COMPOSITE))
def test_gradient_equals_finite_differences_of_the_kernel(device: Device, op: Op, case: Case, dtype: DType) -> None:
    if not trainable(op, case):
        return
    chosen = list(range(DIFFERENTIABLE_OUTPUTS.get(op.name, 1)))
    arrays = draw(op, case, dtype)
    got, weights = traced_gradients(device, op, case, dtype, arrays, chosen)
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


@pytest.mark.parametrize(("op", "case", "dtype"), all_cases(DType.FP32, where=has_gradient))
def test_backward_reads_only_what_the_op_declares_to_save(op: Op, case: Case, dtype: DType) -> None:
    if not trainable(op, case):
        return
    for chosen in output_choices(op, case, dtype):
        graph, values, outputs = record(op, case, dtype)
        node = graph.nodes[0]
        incoming = [
            graph.input(f"gradient {index}", output.spec) if index in chosen else None
            for index, output in enumerate(outputs)
        ]
        before = len(graph.nodes)
        node.op.vjp(node, *incoming)
        names = {value: name for name, value in values.items()}
        names |= {output: declared.rstrip("*?") for output, declared in zip(outputs, op.outputs, strict=False)}
        read = {names[value] for later in graph.nodes[before:] for value in later.values if value in names}
        assert read <= set(op.saves), f"{op.name} reads {sorted(read - set(op.saves))} and doesn't declare it"


def test_every_saved_name_is_read_by_some_case() -> None:
    """A name in `saves` that no case's backward reads would keep memory alive for nothing."""
    from ttrain.graph.op import REGISTRY

    for op in REGISTRY:
        if not op.differentiable:
            continue
        read: set[str] = set()
        for case in op.cases():
            if not trainable(op, case):
                continue
            graph, values, outputs = record(op, case, DType.FP32)
            incoming = [graph.input(f"gradient {index}", output.spec) for index, output in enumerate(outputs)]
            before = len(graph.nodes)
            op.vjp(graph.nodes[0], *incoming)
            names = {value: name for name, value in values.items()}
            names |= {output: declared.rstrip("*?") for output, declared in zip(outputs, op.outputs, strict=False)}
            read |= {names[value] for later in graph.nodes[before:] for value in later.values if value in names}
        assert set(op.saves) <= read, f"{op.name} declares {sorted(set(op.saves) - read)} saved, no backward reads it"
