"""Products that go to oneDNN, whole or block by block, against numpy in fp64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ttrain.core.spec import TensorSpec
from ttrain.device.torch.kernels import kernel_table
from ttrain.device.torch.kernels import matmul as module
from ttrain.device.torch.kernels.common import Context


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
    module.product(a, b, out, shift)()
    expected = a.double().numpy() @ b.double().numpy() + (0 if shift is None else shift.double().numpy())
    np.testing.assert_allclose(out.numpy(), expected, rtol=1e-4, atol=1e-4)


def test_what_a_product_allocates_is_told_to_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_decided", lambda *_: True)
    assert module.fresh_bytes(1024, 512, 512, True, False) == 4 * 1024 * 512  # a block of 4 MiB holds all of it
    assert module.fresh_bytes(2048, 384, 1536, True, False) == 4 * 512 * 1536
    assert module.fresh_bytes(512, 1024, 512, False, True) == 4 * (512 * 512 + 512 * 1024)  # and a's copy
    assert module.fresh_bytes(32, 64, 64, True, False) == 0  # small products go through aten
    monkeypatch.setattr(module, "_decided", lambda *_: False)
    assert module.fresh_bytes(1024, 512, 512, True, False) == 0


ROWS: list[tuple[str, list[tuple[int, ...]], tuple[int, ...], dict[str, Any]]] = [
    ("matmul", [(600, 80), (80, 64)], (600, 64), {"transpose_a": False, "transpose_b": False}),
    ("matmul", [(600, 80), (600, 64)], (80, 64), {"transpose_a": True, "transpose_b": False}),
    ("linear", [(2, 300, 80), (64, 80)], (2, 300, 64), {}),
]


@pytest.mark.parametrize(("name", "shapes", "result", "attributes"), ROWS)
def test_rows_tell_what_their_product_allocates(
    name: str, shapes: list[tuple[int, ...]], result: tuple[int, ...], attributes: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    made: list[int] = []

    def counted(out: torch.Tensor, a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        made.append(4 * (out.numel() + (0 if a.is_contiguous() else a.numel())))

    monkeypatch.setattr(module, "_decided", lambda *_: True)
    monkeypatch.setattr(module, "_onednn_into", counted)
    monkeypatch.setattr(module, "_BLOCK_BYTES", 1)
    kernel = kernel_table(Context.of(torch.device("cpu"), 1))[name]
    given: list[Any] = [torch.zeros(shape) for shape in shapes] + [None] * (name == "linear")
    kernel.bind(given, [torch.zeros(result)], attributes, [])()
    specs = [None if x is None else TensorSpec(tuple(x.shape)) for x in given]
    assert kernel.outside is not None
    assert kernel.outside(specs, [TensorSpec(result)], attributes) == max(made) > 0
