"""Matrix products. On the CPU bf16 goes to oneDNN, which uses AMX or AVX-512 BF16 where the machine has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from ttrain.core.spec import DType, TensorSpec
from ttrain.device.base import Kernel, Launch
from ttrain.device.torch.kernels.common import ROWS, Attributes, Context, Specs, Tensors, chain, into, rows_of
from ttrain.device.torch.kernels.product import fresh_bytes, product


def _matmul(ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    (a, b), c = ins, outs[0]
    a, b = a.mT if attributes["transpose_a"] else a, b.mT if attributes["transpose_b"] else b
    if a.ndim == 2:
        return product(a, b, c)
    return partial(torch.bmm, a.flatten(0, -3), b.flatten(0, -3), out=c.flatten(0, -3))


def _matmul_outside(ins: Sequence[TensorSpec | None], outs: Specs, attributes: Attributes) -> int:
    a, (rows, columns) = ins[0], outs[0].shape[-2:]
    if a is None or a.rank != 2 or a.dtype is not DType.FP32:
        return 0
    turned_a, turned_b = attributes["transpose_a"], attributes["transpose_b"]
    return fresh_bytes(rows, a.size // rows, columns, not turned_a, not turned_b)


def _linear_outside(ins: Sequence[TensorSpec | None], outs: Specs, attributes: Attributes) -> int:
    weight, y = ins[1], outs[0]
    if weight is None or y.dtype is not DType.FP32:
        return 0
    columns, inner = weight.shape
    return fresh_bytes(y.size // columns, inner, columns, True, False)


def _linear(context: Context) -> Kernel:
    """A product, then the activation's own row in place: fused or not, the bits are the same."""

    def bind(ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
        x, weight, bias = ins
        rows, y = rows_of(x), rows_of(outs[0])
        linear = product(rows, weight.t(), y, bias)
        if attributes.get("activation") is None:
            return linear
        name, settings = _activation(attributes["activation"])
        return chain(linear, ROWS[name](context).bind([y], [y], settings, work))

    def workspace(ins: Specs, outs: Specs, attributes: Attributes) -> list[TensorSpec]:
        if attributes.get("activation") is None:
            return []
        name, settings = _activation(attributes["activation"])
        return ROWS[name](context).workspace_specs(outs, outs, settings)

    row = into(bind, workspace)
    return replace(row, outside=_linear_outside) if context.on_cpu else row


def _activation(name: str) -> tuple[str, Attributes]:
    """The op of an activation by its config name, and the op's attributes."""
    forms = {"gelu": "none", "gelu_tanh": "tanh"}
    return ("gelu", {"approximate": forms[name]}) if name in forms else (name, {})


def _product_row(context: Context) -> Kernel:
    return replace(into(_matmul), outside=_matmul_outside if context.on_cpu else None)


ROWS.update(matmul=_product_row, linear=_linear)
