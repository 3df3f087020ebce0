"""Products that go to oneDNN, whole or block by block, against numpy in fp64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.ops.harness import launch_row
from ttrain.core.spec import TensorSpec
from ttrain.device.torch.kernels import kernel_table
from ttrain.device.torch.kernels import matmul as module
from ttrain.device.torch.kernels.common import Context

CPU = Context.of(torch.device("cpu"))
Shape = tuple[int, ...]


@pytest.mark.parametrize("rows", [16, 256, 257, 1000])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_tall_product_in_blocks(rows: int, transposed: bool, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("no oneDNN in this torch")
    monkeypatch.setattr(module, "uses_onednn", lambda *_: True)
    monkeypatch.setattr(module, "_BLOCK_BYTES", 1)  # the least height: 256 rows
    generator = torch.Generator().manual_seed(rows)
    a = torch.randn(48, rows, generator=generator).t() if transposed else torch.randn(rows, 48, generator=generator)
    b, shift = torch.randn(48, 40, generator=generator), torch.randn(40, generator=generator) if bias else None
    out = torch.full((rows, 40), float("nan"))
    launch_row(lambda call: module.product(call, a, b, out, shift), CPU, [], {})
    expected = a.double().numpy() @ b.double().numpy() + (0 if shift is None else shift.double().numpy())
    np.testing.assert_allclose(out.numpy(), expected, rtol=1e-4, atol=1e-4)


def outside(name: str, shapes: list[Shape], result: Shape, **attributes: Any) -> int:
    """Bytes that a row tells of."""
    specs = [*map(TensorSpec, shapes), *([None] if name == "linear" else [])]
    return kernel_table(CPU)[name].outside(specs, [TensorSpec(result)], attributes)


def test_what_a_product_allocates_is_told_to_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = {"transpose_a": False, "transpose_b": False}
    monkeypatch.setattr(module, "_decided", lambda *_: True)
    # A block of 4 MiB holds all of it.
    assert outside("matmul", [(1024, 512), (512, 512)], (1024, 512), **plain) == 4 * 1024 * 512
    assert outside("matmul", [(2048, 384), (384, 1536)], (2048, 1536), **plain) == 4 * 512 * 1536
    turned = outside("matmul", [(1024, 512), (1024, 512)], (512, 512), transpose_a=True, transpose_b=False)
    assert turned == 4 * (512 * 512 + 512 * 1024)  # and a's copy
    assert outside("matmul", [(32, 64), (64, 64)], (32, 64), **plain) == 0  # small products go through aten
    monkeypatch.setattr(module, "_decided", lambda *_: False)
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

    monkeypatch.setattr(module, "_decided", lambda *_: True)
    monkeypatch.setattr(module, "_onednn_into", counted)
    monkeypatch.setattr(module, "_BLOCK_BYTES", 1)
    given: list[Any] = [torch.zeros(shape) for shape in shapes] + [None] * (name == "linear")
    kernel_table(CPU)[name].bind(given, [torch.zeros(result)], attributes, [])()
    assert outside(name, shapes, result, **attributes) == max(made) > 0
