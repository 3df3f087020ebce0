"""Matrix products. On the CPU bf16 goes to oneDNN, which uses AMX or AVX-512 BF16 where the machine has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ttrain.core.spec import DType, TensorSpec
from ttrain.device.base import Kernel, Launch, chain
from ttrain.device.torch.kernels.common import ROWS, Attributes, Context, Given, Specs, Tensors, rows_of
from ttrain.device.torch.kernels.product import fresh_bytes, product, uses_onednn


def _matmul(pinned: str, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    (a, b), c = ins, outs[0]
    a, b = a.mT if attributes["transpose_a"] else a, b.mT if attributes["transpose_b"] else b
    if a.ndim == 2:
        return product(a, b, c, pinned=pinned)
    return partial(torch.bmm, a.flatten(0, -3), b.flatten(0, -3), out=c.flatten(0, -3))


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


def _on_cpu(row: Kernel, context: Context, sizes: Callable[..., _Sizes | None]) -> Kernel:
    """The row, telling what its products allocate and who makes them."""
    if not context.on_cpu:
        return row

    def outside(*given: Any) -> int:
        found = sizes(*given)
        return 0 if found is None else fresh_bytes(*found, context.matmul)

    def way(*given: Any) -> str:
        found = sizes(*given)
        return "onednn" if found is not None and uses_onednn(*found, context.matmul) else "aten"

    return replace(row, outside=outside, way=way)


def _linear(context: Context) -> Kernel:
    """A product, then the activation's own row in place: fused or not, the bits are the same."""

    def bind(ins: Given, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
        x, weight, bias = ins
        rows, y = rows_of(x), rows_of(outs[0])
        linear = product(rows, weight.t(), y, bias, context.matmul)
        if attributes.get("activation") is None:
            return linear
        name, settings = _activation(attributes["activation"])
        return chain(linear, ROWS[name](context).bind([y], [y], settings, work))

    def workspace(ins: Given, outs: Specs, attributes: Attributes) -> list[TensorSpec]:
        if attributes.get("activation") is None:
            return []
        name, settings = _activation(attributes["activation"])
        return ROWS[name](context).workspace_specs(outs, outs, settings)

    return _on_cpu(Kernel(bind, workspace=workspace), context, _linear_sizes)


def _activation(name: str) -> tuple[str, Attributes]:
    """The op of an activation by its config name, and the op's attributes."""
    forms = {"gelu": "none", "gelu_tanh": "tanh"}
    return ("gelu", {"approximate": forms[name]}) if name in forms else (name, {})


def _product_row(context: Context) -> Kernel:
    return _on_cpu(Kernel(partial(_matmul, context.matmul)), context, _matmul_sizes)


ROWS.update(matmul=_product_row, linear=_linear)
