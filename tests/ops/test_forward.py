"""Every kernel against its op's reference in fp64, for every case, dtype and device."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from tests.ops.harness import (
    Interpreter,
    all_cases,
    assert_equals_reference,
    assert_same_over,
    cases_of,
    every_op,
    only,
    record,
    recorded_by_models,
    shared_with,
)
from ttrain import ops
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.torch.device import TorchDevice
from ttrain.device.torch.kernels import kernel_table
from ttrain.device.torch.kernels.common import TORCH_DTYPES, Context, spec_of
from ttrain.graph import REGISTRY, Case, Composite, Graph, Op

DTYPES = (DType.FP64, DType.FP32, DType.BF16)


def test_every_op_has_cases() -> None:
    assert [op.name for op in REGISTRY.values() if not cases_of(op)] == []


def test_every_op_has_a_kernel(device: TorchDevice) -> None:
    """The kernel is the op's own, or its body consists of ops with kernels."""
    tried = [op for op in REGISTRY.values() if recorded_by_models(op) and not isinstance(op, Composite)]
    assert [op.name for op in tried if op.name not in device.kernels] == []
    assert sorted(set(device.kernels) - set(REGISTRY)) == []


@every_op(all_cases(*DTYPES, DType.FP16))
def test_kernel_equals_reference(device: TorchDevice, op: Op, case: Case, dtype: DType) -> None:
    if op.name == "embedding_grad" and dtype in (DType.BF16, DType.FP16) and device.kind != device.context.kind:
        pytest.skip("no CUDA: only there does the aten function of this row add in fp32")
    assert_equals_reference(device, op, case, dtype)


def decomposes(op: Op, case: Case, dtype: DType) -> bool:
    graph, _, _ = record(op, case, dtype)
    return op.decompose(graph.nodes[0], graph.nodes[0].inputs) is not None


@every_op(only(all_cases(*DTYPES), decomposes))
def test_decomposition_equals_reference(device: TorchDevice, op: Op, case: Case, dtype: DType) -> None:
    assert_equals_reference(device, op, case, dtype, by_parts=True)


MIXED = {"layer_norm": ("weight", "bias"), "add_layer_norm": ("weight", "bias"), "layer_norm_grad": ("weight",)}


@every_op(all_cases(DType.BF16, where=lambda op: op.name in MIXED))
def test_norms_take_fp32_parameters_in_bf16(device: TorchDevice, op: Op, case: Case, dtype: DType) -> None:
    """A bf16 step feeds norms the fp32 parameters themselves, not copies."""
    assert_equals_reference(device, op, case, dtype, wide=MIXED[op.name])


def writes_over() -> list[Any]:
    """Every device has the same rows that may; where one hasn't, its test fails for want of an input."""
    cpu = TorchDevice("cpu", threads=1)
    return only(all_cases(DType.FP32, DType.BF16), lambda *case: bool(shared_with(cpu, *case)))


@every_op(writes_over())
def test_kernel_may_write_over_the_inputs_it_names(device: TorchDevice, op: Op, case: Case, dtype: DType) -> None:
    """A plan lets elementwise ops write over any input that nothing reads later, others over `overwrites`."""
    over = shared_with(device, op, case, dtype)
    assert over
    assert_same_over(device, op, case, dtype, over)


@pytest.mark.parametrize("dtype", [DType.INT16, DType.INT32, DType.INT64])
def test_windows_of_a_stream_of_any_integers_are_those_of_numpy(device: TorchDevice, dtype: DType) -> None:
    ids = np.random.default_rng(0).integers(0, 2**15, 50)
    starts = np.array([0, 43, 7, 7])
    graph = Graph()
    stream = graph.input("stream", TensorSpec((50,), dtype))
    tokens, targets = ops.token_windows(graph.input("starts", TensorSpec((4,), DType.INT64)), stream, 6)
    interpreter = Interpreter(device)
    interpreter.run(graph, {"starts": starts, "stream": ids})
    for value, first in ((tokens, 0), (targets, 1)):
        assert value.spec == TensorSpec((4, 6), DType.INT64)
        assert np.array_equal(interpreter.read(value), np.stack([ids[at + first :][:6] for at in starts]))


def test_of_a_stream_only_the_windows_are_moved() -> None:
    graph = Graph()
    stream = graph.input("stream", TensorSpec((10**9,), DType.INT32))
    tokens, _ = ops.token_windows(graph.input("starts", TensorSpec((3,), DType.INT64)), stream, 5)
    assert tokens.producer is not None
    assert tokens.producer.op.nbytes(tokens.producer) == 3 * (8 + 6 * 4 + 2 * 5 * 8)


def test_panels_of_experts_are_one_kernel_of_torch_where_it_serves() -> None:
    """That kernel runs on the CPU too; so its calls are tested, not its speed or its bits on a GPU."""
    cuda = replace(Context.of(torch.device("cpu")), kind="cuda", capability=(9, 0))
    table, offsets = kernel_table(cuda), torch.tensor([0, 4, 4, 12])
    rows, weight, dy = (torch.randn(shape).bfloat16() for shape in ((12, 16), (3, 8, 16), (12, 8)))
    panels = list(zip(pairwise(offsets.tolist()), weight.float(), strict=True))
    product = torch.cat([rows[a:b].float() @ w.T for (a, b), w in panels])
    outer = torch.stack([dy[a:b].float().T @ rows[a:b].float() for (a, b), _ in panels])
    given: list[tuple[str, list[torch.Tensor], torch.Tensor, dict[str, bool]]] = [
        ("grouped_matmul", [rows, weight, offsets], product, {"transpose": True}),
        ("grouped_outer", [dy, rows, offsets], outer, {}),
    ]
    for name, ins, expected, attributes in given:
        kernel, out = table[name], torch.empty(expected.shape, dtype=torch.bfloat16)
        node = [spec_of(x) for x in ins], [spec_of(out)], attributes
        assert kernel.way is not None and kernel.way(*node) == "grouped"
        work = [torch.empty(x.shape, dtype=TORCH_DTYPES[x.dtype]) for x in kernel.workspace(*node)]
        kernel.bind(ins, [out], attributes, work)()
        assert (out.float() - expected).abs().max() < 0.02 * expected.abs().max()
