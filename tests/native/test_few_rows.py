"""Products of few rows, which read the right matrix where it lies: against fp64, and against the packed product."""

from __future__ import annotations

from itertools import product as combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.native.conftest import SMALL, NativeDevice, open_device, require_compiler
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.torch.kernels.common import TORCH_DTYPES
from ttrain.device.torch.native.codegen import Request

ROWS = (1, 3, 4)
MANY = 9  # rows of the packed product
SIZES = ((48, 70), (1100, 33), (6, 3))  # inner axis and columns: several blocks of it, and ends of vectors
BOTH = (DType.FP32, DType.BF16)


def request(rows: int, inner: int, columns: int, dtype: DType, turned: bool) -> Request:
    """A product with a right matrix [columns, inner], bias and GELU where `turned`, else with one [inner, columns]."""
    a, c = TensorSpec((rows, inner), dtype), TensorSpec((rows, columns), dtype)
    if turned:
        b, bias = TensorSpec((columns, inner), dtype), TensorSpec((columns,), dtype)
        return Request.make("linear", [a, b, bias], [c], {"activation": "gelu"})
    return Request.make(
        "matmul", [a, TensorSpec((inner, columns), dtype)], [c], {"transpose_a": False, "transpose_b": False}
    )


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> NativeDevice:
    require_compiler()
    device: NativeDevice = open_device(SMALL, Path(tmp_path_factory.mktemp("native")))
    kinds = combinations((*ROWS, MANY), SIZES, BOTH, (True, False))
    device.native.prepare([node(request(rows, *size, *kind)) for rows, size, *kind in kinds])
    return device


def node(wanted: Request) -> Any:
    """Return a stand-in for a node with this request, for the device's table."""
    name, specs = SimpleNamespace(name=wanted.op), (wanted.inputs, wanted.outputs)
    return SimpleNamespace(op=name, specs=specs, attributes=wanted.settings)


def run(device: NativeDevice, wanted: Request, inputs: list[torch.Tensor]) -> torch.Tensor:
    form, (spec,) = device.native.native(wanted), wanted.outputs
    assert form is not None
    out = torch.full(spec.shape, torch.nan, dtype=TORCH_DTYPES[spec.dtype])
    work = [torch.empty(each.shape) for each in form.workspace]
    device.kernels[wanted.op].bind(inputs, [out], wanted.settings, work)()
    return out


@pytest.mark.parametrize("turned", [True, False], ids=["nk", "kn"])
@pytest.mark.parametrize("dtype", BOTH, ids=str)
@pytest.mark.parametrize(("inner", "columns"), SIZES)
def test_few_rows_equal_those_of_a_larger_product(
    device: NativeDevice, inner: int, columns: int, dtype: DType, turned: bool
) -> None:
    made = torch.Generator().manual_seed(inner)
    many = request(MANY, inner, columns, dtype, turned)
    inputs = [torch.randn(x.shape, generator=made).to(TORCH_DTYPES[dtype]) for x in many.inputs if x is not None]
    whole = run(device, many, inputs)
    a, b, *bias = [x.double() for x in inputs]
    exact = torch.nn.functional.gelu(a @ b.T + bias[0]) if turned else a @ b
    tolerance = {"rtol": 8e-3, "atol": 8e-3} if dtype is DType.BF16 else {"rtol": 1e-5, "atol": 1e-4}
    for rows in ROWS:
        few = run(device, request(rows, inner, columns, dtype, turned), [inputs[0][:rows].clone(), *inputs[1:]])
        torch.testing.assert_close(few.double(), exact[:rows], **tolerance)
        assert torch.equal(few, whole[:rows])
