"""Composite ops: the decomposition computes what the op's reference and the fused kernel compute."""

from __future__ import annotations

from tests.ops.harness import (
    Interpreter,
    all_cases,
    assert_within,
    drawn,
    every_op,
    only,
    output_name,
    record,
)
from ttrain.core.spec import DType
from ttrain.device.base import Device
from ttrain.graph import Case, Op
from ttrain.testing.compare import Tolerance
from ttrain.testing.tolerances import tolerance

LOOSER = {DType.FP64: 8, DType.FP32: 4, DType.BF16: 4}
# A sum of bf16 squares, each rounded, and an update formed step by step: fp32 state, bf16 gradients.
ROUNDED_TERMS = {("squared_error", "loss"): Tolerance(4, 4)}


def decomposes(op: Op, case: Case, dtype: DType) -> bool:
    graph, _, _ = record(op, case, dtype)
    return op.decompose(graph.nodes[0], graph.nodes[0].inputs) is not None


COMPOSITE = only(all_cases(DType.FP64, DType.FP32, DType.BF16), decomposes)


def test_the_composite_ops_of_training_decompose() -> None:
    names = {parameter.values[0].name for parameter in COMPOSITE}
    attention, losses = {"attention", "attention_grad"}, {"head_cross_entropy", "squared_error"}
    assert names >= attention | losses | {"linear", "add_layer_norm", "update"}


@every_op(COMPOSITE)
def test_decomposition_equals_reference_and_kernel(device: Device, op: Op, case: Case, dtype: DType) -> None:
    arrays, expected = drawn(op, case, dtype)
    fused_graph, _, fused_outputs = record(op, case, dtype)
    fused = Interpreter(device)
    fused.run(fused_graph, arrays)
    graph, _, outputs = record(op, case, dtype)
    parts = Interpreter(device, decomposing=[op.name])
    parts.run(graph, arrays)
    assert outputs
    for index, output in enumerate(outputs):
        name = output_name(op, case, index)
        unit, allowed = tolerance(op.name, name, output.spec.dtype, dtype)
        if dtype is DType.BF16 and (op.name, name) in ROUNDED_TERMS:
            unit, allowed = DType.BF16, ROUNDED_TERMS[op.name, name]
        allowed = allowed * LOOSER[dtype]
        got = parts.read(output)
        assert_within(got, expected[index].double().numpy(), unit, allowed, f"decomposed {op.name}.{name}")
        assert_within(got, fused.read(fused_outputs[index]), unit, allowed, f"against fused {op.name}.{name}")
