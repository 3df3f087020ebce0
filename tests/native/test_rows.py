"""Every generated kernel against its op's reference in fp64, on every case of the registry."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.native.conftest import SMALL, NativeDevice, every_case, has_kernel, open_device
from tests.ops.harness import (
    all_cases,
    assert_equals_reference,
    assert_same_over,
    every_op,
    only,
    panel_cases,
    record,
    recorded_by_models,
)
from ttrain.core.attention_mask import AttentionMask
from ttrain.core.errors import PlanError
from ttrain.core.processor import vector_extensions
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.torch.native import toolchain
from ttrain.device.torch.native.codegen import Request
from ttrain.device.torch.native.native import Sizing
from ttrain.device.torch.native.rows import RULES, NativeKernels
from ttrain.graph import REGISTRY, Case, Op, Value
from ttrain.graph.passes import decompose

pytestmark = pytest.mark.timeout(600)  # one library holds every case: minutes to compile on a busy machine
# They move numbers, torch's kernels run them, or the CPU, having kernels for what they stand for, doesn't record them.
WITHOUT_RULE = (
    "reshape copy_reshape index_select index_put token_windows cache_bias sin cos erf "
    "expm1 all_reduce all_reduce_state all_reduce_start reduce_scatter_start collectives_done all_gather_state "
    "block_norms one_hot reduce_max document_bias head_matmul head_product gated_activation "
    "log_sigmoid log_softmax valid all_gather reduce_scatter exchange_done"
)


@pytest.fixture(scope="module")
def device(device: NativeDevice) -> NativeDevice:
    """Every case of every op, compiled into one library."""
    return prepared(device, [parameter.values for parameter in every_case()])


def prepared(device: NativeDevice, cases: Iterable[tuple[Op, Case, DType]]) -> NativeDevice:
    graphs = [record(*each)[0] for each in cases]
    device.native.prepare([node for graph in graphs for node in decompose(graph, device.kernels, device.name).nodes])
    return device


def test_every_op_that_computes_has_a_rule() -> None:
    assert {op.name for op in REGISTRY.values() if op.family != "rule"} - RULES.keys() == {*WITHOUT_RULE.split()}
    assert not RULES.keys() - {op.name for op in REGISTRY.values()}


@every_op(every_case())
def test_kernel_equals_reference(device: NativeDevice, op: Op, case: Case, dtype: DType) -> None:
    """And a second launch repeats it to the bit."""
    assert_equals_reference(device, op, case, dtype, times=2)


def test_products_of_panels_of_any_height_equal_the_reference(device: NativeDevice) -> None:
    given = [(*each, dtype) for each in panel_cases() for dtype in (DType.FP32, DType.BF16)]
    device.native.prepare([record(*each)[0].nodes[0] for each in given])
    for each in given:
        assert_equals_reference(device, *each, times=2)


@pytest.mark.skipif("avx512f" not in vector_extensions(), reason="no AVX-512")
def test_attention_of_pairs_of_bf16_equals_the_reference(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on AMD, whose vectors multiply them faster than fp32."""
    monkeypatch.setattr(toolchain, "FLAGS", (*toolchain.FLAGS, "-DFAST_PAIRS"))
    given = [parameter.values for parameter in every_case(lambda op: op.name in ("attention", "attention_grad"))]
    given = [each for each in given if each[2] is DType.BF16][::3]
    device = prepared(open_device(SMALL, folder), given)
    for each in given:
        assert_equals_reference(device, *each)
    device.close()


def test_nearly_all_cases_run_on_generated_code(device: NativeDevice) -> None:
    nodes = [record(*parameter.values)[0].nodes[0] for parameter in every_case()]
    others = {n.op.name for n in nodes if n.op.name in RULES and device.native.native(Request.of_node(n)) is None}
    # Products in bf16 along an odd inner axis or with one that ends in half a pair; attention with keys of another
    # width than values or a bias; softmax and log-sum-exp under such masks.
    assert others <= {
        "matmul",
        "linear",
        "head_cross_entropy",
        "attention",
        "attention_grad",
        "softmax",
        "log_sum_exp",
        "grouped_matmul",
    }


def like_inputs(op: Op, case: Case, dtype: DType) -> list[Value]:
    node = record(op, case, dtype)[0].nodes[0]
    return [value for value in node.values if value.spec == node.outputs[0].spec]


@every_op(only(every_case(lambda op: op.elementwise and has_kernel(op)), lambda *case: bool(like_inputs(*case))))
def test_elementwise_kernel_may_write_over_an_input(device: NativeDevice, op: Op, case: Case, dtype: DType) -> None:
    assert_same_over(device, op, case, dtype, like_inputs(op, case, dtype))


def test_fp64_takes_the_way_of_the_base(device: NativeDevice) -> None:
    tried = 0
    for parameter in all_cases(DType.FP64, where=lambda op: recorded_by_models(op) and has_kernel(op)):
        node = record(*parameter.values)[0].nodes[0]
        request = Request.of_node(node)
        if DType.FP64 not in [spec.dtype for spec in (*request.inputs, *request.outputs) if spec is not None]:
            continue
        tried += 1
        assert device.native.native(request) is None, node
        arguments = (request.inputs, request.outputs, node.attributes)
        base = super(NativeDevice, device).kernels[node.op.name]
        assert device.kernels[node.op.name].workspace(*arguments) == base.workspace(*arguments)
    assert tried > 100


@pytest.mark.parametrize("products", ["auto", "own", "aten", "onednn"])
def test_products_can_be_left_to_libraries(device: NativeDevice, products: str) -> None:
    base = super(NativeDevice, device).kernels
    native, own = (NativeKernels(base, 1, context=replace(device.context, matmul=who)) for who in (products, "own"))
    for name in ("matmul", "linear", "head_cross_entropy", "grouped_matmul", "grouped_outer"):
        for parameter in every_case(lambda op: op.name == name):  # noqa: B023 - called at once
            node = record(*parameter.values)[0].nodes[0]
            request, dtype = Request.of_node(node), parameter.values[2]
            found = native.native(request)
            assert found == (None if products in ("aten", "onednn") else own.native(request))
            # Other products need whole pairs in a row of bf16.
            assert products != "own" or found or (dtype is not DType.FP32 and name != "grouped_outer")
            if name in ("matmul", "linear"):
                given = (request.inputs, request.outputs, node.attributes)
                ours, library = native.kernels[name].way, base[name].way
                assert ours is not None and library is not None
                assert ours(*given) == ("own" if found else library(*given))


def test_rows_too_wide_for_a_stack_take_the_way_of_the_base(device: NativeDevice) -> None:
    wide = TensorSpec((2, 2**16 + 1))
    request = Request.make("softmax", [wide], [wide], {"scale": 1.0, "mask": AttentionMask("full")})
    assert device.native.native(request) is None


def test_a_row_is_not_bound_before_its_kernel_is_compiled(device: NativeDevice) -> None:
    native = NativeKernels(super(NativeDevice, device).kernels, Sizing(threads=1))
    x = torch.zeros(5)
    with pytest.raises(PlanError, match="exp is bound before its kernel was compiled"):
        native.kernels["exp"].bind([x], [x], {}, [])
