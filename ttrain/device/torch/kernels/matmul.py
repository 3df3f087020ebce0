"""Matrix products. On the CPU bf16 goes to oneDNN, which uses AMX or AVX-512 BF16 where the machine has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ttrain.core.spec import DType, TensorSpec
from ttrain.device.base import Attributes, Kernel, Specs
from ttrain.device.torch.kernels.common import ROWS, Bind, Call, Context, Workspace, kernel, rows_of
from ttrain.device.torch.kernels.product import fresh_bytes, product, uses_onednn


def _matmul(call: Call) -> None:
    (a, b), c = call.ins, call.outs[0]
    a, b = a.mT if call.attributes["transpose_a"] else a, b.mT if call.attributes["transpose_b"] else b
    if a.ndim == 2:
        call.emit(product(a, b, c, pinned=call.context.matmul))
    else:
        call.emit(torch.bmm, a.flatten(0, -3), b.flatten(0, -3), out=c.flatten(0, -3))


_Sizes = tuple[int, int, int, bool, bool]  # rows, inner, columns, whether a [M, K] and b [K, N] lie as their shapes say


def _matmul_sizes(ins: Sequence[TensorSpec | None], outs: Specs, attributes: Attributes) -> _Sizes | None:
    """Return the sizes of a product in fp32; None for other products."""
    a, (rows, columns) = ins[0], outs[0].shape[-2:]
    if a is None or a.rank != 2 or a.dtype is not DType.FP32:
        return None
    return rows, a.size // rows, columns, not attributes["transpose_a"], not attributes["transpose_b"]


def _linear_sizes(ins: Sequence[TensorSpec | None], outs: Specs, attributes: Attributes) -> _Sizes | None:
    weight, y = ins[1], outs[0]
    if weight is None or y.dtype is not DType.FP32:
        return None
    columns, inner = weight.shape
    return y.size // columns, inner, columns, True, False


def _product_row(
    bind: Bind, sizes: Callable[..., _Sizes | None], workspace: Workspace | None, context: Context
) -> Kernel:
    """The row, on a CPU telling what its products allocate and who makes them."""
    made = kernel(context, bind, workspace)

    def outside(*given: Any) -> int:
        found = sizes(*given)
        return 0 if found is None else fresh_bytes(*found, context.matmul)

    def way(*given: Any) -> str:
        found = sizes(*given)
        return "onednn" if found is not None and uses_onednn(*found, context.matmul) else "aten"

    return replace(made, outside=outside, way=way) if context.on_cpu else made


def _activation(call: Call) -> tuple[Kernel, Attributes] | None:
    """The row of the activation and the attributes of its op; None where there is none."""
    name = call.attributes.get("activation")
    forms = {"gelu": "none", "gelu_tanh": "tanh"}
    op, settings = ("gelu", {"approximate": forms[name]}) if name in forms else (name, {})
    return None if op is None else (ROWS[op](call.context), settings)


def _linear(call: Call) -> None:
    """A product, then the activation's own row in place: fused or not, the bits are the same."""
    x, weight, bias = call.ins
    rows, y = rows_of(x), rows_of(call.outs[0])
    call.emit(product(rows, weight.t(), y, bias, call.context.matmul))
    if (found := _activation(call)) is not None:
        activation, settings = found
        call.emit(activation.bind([y], [y], settings, call.work))


def _linear_workspace(call: Call) -> list[TensorSpec]:
    if (found := _activation(call)) is None:
        return []
    activation, settings = found
    return activation.workspace_specs(call.outs, call.outs, settings)


ROWS.update(
    matmul=partial(_product_row, _matmul, _matmul_sizes, None),
    linear=partial(_product_row, _linear, _linear_sizes, _linear_workspace),
)
