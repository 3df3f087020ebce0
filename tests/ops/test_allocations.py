"""Launches that take memory: the list in the kernels' documentation, held exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.profiler import ProfilerActivity, profile

from tests.ops.harness import Interpreter, bound, cases_of, draw, record, recorded_by_models
from ttrain.core.processor import vector_extensions
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.base import Device, serves
from ttrain.device.torch.device import TorchDevice
from ttrain.device.torch.kernels.costs import multiplies_faster_in_fp32
from ttrain.graph import REGISTRY, Case, Op

FRESH = {
    "layer_norm",
    "add_layer_norm",
    "layer_norm_grad",
    "log_sum_exp",
    "top_k",
    "sort_by_expert",
}  # aten returns new tensors
PRODUCTS = {"matmul", "linear", "head_cross_entropy", "head_log_probs"}
WIDENED = {"softmax_grad", "gather", "scatter"}  # of a scale that is no power of two; of scores, fp32 in models
EXPECTED = {DType.FP32: FRESH, DType.BF16: FRESH | WIDENED}
ONEDNN = {
    *PRODUCTS,
    "int8_matmul",
    "nf4_matmul",
    "attention",
    "attention_grad",
}  # scratch in bf16, on processors where oneDNN has such products, and they are not slower than those in fp32


@pytest.fixture(scope="module")
def cpu() -> Device:
    return TorchDevice("cpu", threads=1)


def allocates(launch: Callable[[], Any]) -> bool:
    """True if a warm launch takes memory from torch's allocator."""
    launch()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        launch()
    results = trace.profiler.kineto_results  # type: ignore[union-attr]
    return any(event.name() == "[memory]" for event in results.events())


def takes_memory(device: Device, op: Op, case: Case, dtype: DType) -> bool:
    graph, _, outputs = record(op, case, dtype)
    node, interpreter = graph.nodes[0], Interpreter(device)
    if not serves(device.kernels, op.name, [None if v is None else v.spec for v in node.inputs], node.attributes):
        return False
    interpreter.run(graph, draw(op, case, dtype))
    ins = [None if value is None else interpreter.buffers[value] for value in node.inputs]
    return allocates(bound(interpreter, node, ins, [interpreter.buffers[output] for output in outputs]))


@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16])
def test_only_the_listed_kernels_allocate(cpu: Device, dtype: DType) -> None:
    tried = [op for op in REGISTRY.values() if recorded_by_models(op) and op.name in cpu.kernels]
    found = {op.name for op in tried for case in cases_of(op) if takes_memory(cpu, op, case, dtype)}
    scratch = ONEDNN if dtype is DType.BF16 else set()
    assert EXPECTED[dtype] <= found <= EXPECTED[dtype] | scratch
    assert found & scratch in (set(), scratch)
    if {"avx512_bf16", "amx_bf16"} & set(vector_extensions()) and not multiplies_faster_in_fp32():
        assert found & scratch == scratch


def test_operands_of_two_dtypes_are_cast_first(cpu: Device) -> None:
    """The case that the registry's cases don't show."""
    full, half = TensorSpec((4, 8), DType.FP32), TensorSpec((4, 8), DType.BF16)
    kernel, result = cpu.kernels["multiply"], cpu.allocate(full)
    assert allocates(kernel.bind([cpu.allocate(full), cpu.allocate(half)], [result], {}, []))
    assert not allocates(kernel.bind([cpu.allocate(full), cpu.allocate(full)], [result], {}, []))
