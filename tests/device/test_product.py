"""Products that go to oneDNN, whole or block by block, or to compiled code, against numpy in fp64."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from tests.native.conftest import require_compiler
from tests.ops.harness import all_cases, assert_equals_reference, every_op, launch_row
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.torch.device import TorchDevice
from ttrain.device.torch.kernels import common, kernel_table
from ttrain.device.torch.kernels import matmul as module
from ttrain.device.torch.kernels.common import Context
from ttrain.device.torch.native import own
from ttrain.graph import Case, Op

CPU = Context.of(torch.device("cpu"))
Shape = tuple[int, ...]


@pytest.mark.parametrize("rows", [16, 256, 257, 1000])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_tall_product_in_blocks(rows: int, transposed: bool, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("no oneDNN in this torch")
    monkeypatch.setattr(module, "way_of", lambda *_: "onednn")
    monkeypatch.setattr(module, "_BLOCK_BYTES", 1)  # the least height: 256 rows
    generator = torch.Generator().manual_seed(rows)
    a = torch.randn(48, rows, generator=generator).t() if transposed else torch.randn(rows, 48, generator=generator)
    b, shift = torch.randn(48, 40, generator=generator), torch.randn(40, generator=generator) if bias else None
    out = torch.full((rows, 40), float("nan"))
    launch_row(lambda call: module.product(call, a, b, out, shift), CPU, [], {})
    expected = a.double().numpy() @ b.double().numpy() + (0 if shift is None else shift.double().numpy())
    np.testing.assert_allclose(out.numpy(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize(
    ("rows", "turn_a", "turn_b", "bias"),
    [
        (131, False, False, False),
        (131, False, True, False),
        (131, False, True, True),
        (131, True, False, False),
        (1, False, True, False),
        (1, False, True, True),
    ],
)
def test_a_product_by_compiled_code(
    rows: int,
    turn_a: bool,
    turn_b: bool,
    bias: bool,
    dtype: torch.dtype,
    tolerance: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    require_compiler()
    monkeypatch.setattr(module, "way_of", lambda *_: module.OWN)
    generator = torch.Generator().manual_seed(7)
    drawn = partial(torch.randn, generator=generator)
    a, b = drawn(rows, 530).to(dtype), drawn(530, 77).to(dtype)
    shift, out = drawn(77).to(dtype) if bias else None, torch.full((rows, 77), float("nan"), dtype=dtype)
    stored_a, stored_b = (x.t().contiguous().t() if turn else x for x, turn in ((a, turn_a), (b, turn_b)))
    launch_row(lambda call: module.product(call, stored_a, stored_b, out, shift), CPU, [], {})
    expected = a.double().numpy() @ b.double().numpy() + (0 if shift is None else shift.double().numpy())
    np.testing.assert_allclose(out.float().numpy(), expected, rtol=tolerance, atol=10 * tolerance)


def test_compiled_code_is_a_way_only_where_there_is_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[list[str]] = []

    def fastest(key: str, names: list[str], ways: Any) -> str:
        compared.append(names)
        assert list(ways()) == names
        return names[-1]

    monkeypatch.setattr(module, "fastest", fastest)
    module._decided.cache_clear()
    own._functions.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert module.way_of(400, 300, 200, True, True, "auto") != module.OWN
    module._decided.cache_clear()
    own._functions.cache_clear()
    monkeypatch.delenv("CXX")
    require_compiler()
    assert module.way_of(400, 300, 200, True, True, "auto") == module.OWN
    assert module.way_of(400, 300, 200, False, False, "auto") != module.OWN  # both turned: there is no such code
    module._decided.cache_clear()
    assert compared[1] == [*compared[0], module.OWN] and compared[2] == compared[0]
    for inner in (301, 50257):  # rows of bf16 that end with half a pair: no code for such, however long
        assert module.way_of(400, inner, 200, True, False, "auto", torch.bfloat16) == "aten"
    module._decided.cache_clear()


def outside(name: str, shapes: list[Shape], result: Shape, **attributes: Any) -> int:
    """Bytes that a row tells of."""
    specs = [*map(TensorSpec, shapes), *([None] if name == "linear" else [])]
    return kernel_table(CPU)[name].outside(specs, [TensorSpec(result)], attributes)


def test_what_a_product_allocates_is_told_to_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = {"transpose_a": False, "transpose_b": False}
    monkeypatch.setattr(module, "_decided", lambda *_: "onednn")
    # A block of 4 MiB holds all of it.
    assert outside("matmul", [(1024, 512), (512, 512)], (1024, 512), **plain) == 4 * 1024 * 512
    assert outside("matmul", [(2048, 384), (384, 1536)], (2048, 1536), **plain) == 4 * 512 * 1536
    turned = outside("matmul", [(1024, 512), (1024, 512)], (512, 512), transpose_a=True, transpose_b=False)
    assert turned == 4 * (512 * 512 + 512 * 1024)  # and a's copy
    assert outside("matmul", [(32, 64), (64, 64)], (32, 64), **plain) == 0  # small products go through aten
    monkeypatch.setattr(module, "_decided", lambda *_: "aten")
    assert outside("matmul", [(1024, 512), (512, 512)], (1024, 512), **plain) == 0


@pytest.mark.parametrize(
    ("name", "shapes", "result", "attributes"),
    [
        ("matmul", [(600, 80), (80, 64)], (600, 64), {"transpose_a": False, "transpose_b": False}),
        ("matmul", [(600, 80), (600, 64)], (80, 64), {"transpose_a": True, "transpose_b": False}),
        ("linear", [(2, 300, 80), (64, 80)], (2, 300, 64), {}),
    ],
)
def test_rows_tell_what_their_product_allocates(
    name: str, shapes: list[Shape], result: Shape, attributes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def counted(out: torch.Tensor, a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        made.append(4 * (out.numel() + (0 if a.is_contiguous() else a.numel())))

    monkeypatch.setattr(module, "_decided", lambda *_: "onednn")
    monkeypatch.setattr(module, "_onednn_into", counted)
    monkeypatch.setattr(module, "_BLOCK_BYTES", 1)
    given: list[Any] = [torch.zeros(shape) for shape in shapes] + [None] * (name == "linear")
    kernel_table(CPU)[name].bind(given, [torch.zeros(result)], attributes, [])()
    assert outside(name, shapes, result, **attributes) == max(made) > 0


MULTIPLY = ("matmul", "linear", "head_cross_entropy", "attention", "attention_grad", "cached_attention")


@every_op(all_cases(DType.BF16, where=lambda op: op.name in MULTIPLY))
def test_bf16_by_way_of_fp32_copies(monkeypatch: pytest.MonkeyPatch, op: Op, case: Case, dtype: DType) -> None:
    """A processor without instructions for bf16 computes so. A launch takes the scratch memory that was planned."""
    monkeypatch.setattr(common, "multiplies_faster_in_fp32", lambda: True)
    assert_equals_reference(TorchDevice("cpu", threads=1), op, case, dtype)


def test_fp32_copies_of_bf16_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    def planned(rows: int, faster: bool) -> list[TensorSpec]:
        monkeypatch.setattr(common, "multiplies_faster_in_fp32", lambda: faster)
        specs = [TensorSpec(shape, DType.BF16) for shape in ((rows, 8), (6, 8), (rows, 6))]
        return kernel_table(CPU)["linear"].workspace([*specs[:2], None], specs[2:], {"activation": None})

    assert planned(5, True) == [TensorSpec((5, 8)), TensorSpec((6, 8)), TensorSpec((5, 6))]
    assert planned(5, False) == planned(1, True) == []  # one row is bound by reading its matrix
