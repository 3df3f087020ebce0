"""Matrix products: plain ones, of every head with one matrix, and with 0 and 1 to pick rows out of sequences.

Heads never lie in the last two axes: a head of 16 features would be padded to a tile of its own. Instead the small
matrix is laid out along the diagonal of a large one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ttrain.core.spec import DType
from ttrain.device.base import Launch
from ttrain.device.ttnn.kernels.common import Attributes, Context, flattens, row, rows_shape
from ttrain.device.ttnn.tensors.device_tensor import DeviceTensor, Tensors
from ttrain.device.ttnn.tensors.store import TileLayout, dtype_name


def _stacked_identity(c: Context, heads: int, width: int, dtype: DType) -> DeviceTensor:
    """[heads * width, width]: one identity matrix under the other."""
    layout = TileLayout((heads * width, width), dtype_name(dtype))
    return c.constant("stacked identity", layout, lambda: np.tile(np.eye(width, dtype=np.float32), (heads, 1)))


def _blocks(c: Context, heads: int, height: int, width: int, dtype: DType) -> DeviceTensor:
    """[heads * height, heads * width]: 1 within each head's own block, else 0."""
    layout = TileLayout((heads * height, heads * width), dtype_name(dtype))
    block = np.ones((height, width), np.float32)
    return c.constant(("blocks", heads), layout, lambda: np.kron(np.eye(heads, dtype=np.float32), block))


@row("head_matmul")
def _head_matmul(c: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    """x times the matrix repeated along a diagonal: [B, T, H*D] [H*D, H*E]."""
    (x, matrix), (y,) = ins, outs
    heads, turned, tt = attributes["heads"], attributes["transpose"], c.tt
    inner, outer = matrix.spec.shape[::-1] if turned else matrix.spec.shape
    dtype = x.spec.dtype
    down, across = _stacked_identity(c, heads, inner, dtype), _stacked_identity(c, heads, outer, dtype)
    own = _blocks(c, heads, inner, outer, dtype)

    def run() -> None:
        column = tt.matmul(down.t, matrix.t, transpose_b=turned, **c.product)
        whole = tt.multiply(tt.matmul(column, across.t, transpose_b=True, **c.product), own.t)
        tt.matmul(x.t, whole, optional_output_tensor=y.t, **c.product)

    return run


@row("head_product")
def _head_product(c: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    """The blocks on the diagonal of a^T b, added up."""
    (a, b), (y,) = ins, outs
    heads, tt, wide = attributes["heads"], c.tt, DType.FP32
    height, width = y.spec.shape
    down, across = _stacked_identity(c, heads, height, wide), _stacked_identity(c, heads, width, wide)
    own = _blocks(c, heads, height, width, wide)

    def rows(x: DeviceTensor) -> Any:
        flat = x.t if flattens(x.spec.shape) else tt.to_layout(x.t, tt.TILE_LAYOUT)
        return tt.reshape(flat, rows_shape(x.spec.shape))

    def run() -> None:
        product = tt.matmul(rows(a), rows(b), transpose_a=True, dtype=tt.float32, **c.product)
        column = tt.matmul(down.t, tt.multiply(product, own.t), transpose_a=True, **c.product)
        if y.spec.dtype is wide:
            tt.matmul(column, across.t, optional_output_tensor=y.t, **c.product)
        else:
            tt.typecast(tt.matmul(column, across.t, **c.product), tt.bfloat16, output_tensor=y.t)

    return run


@row("rotary")
def _rotary(c: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    """y = x cos + p sin: p has the other feature of each pair, signed, and the tables one number a feature of x.

    ttnn's own rotation takes heads of whole tiles apart: with the moves that this needs, it is as many launches.
    """
    (x, cos, sin), (y,), heads, tt = ins, outs, attributes["heads"], c.tt
    pairs, features = cos.spec.shape[-1], x.spec.shape[-1]
    key, width = (heads, pairs), features // heads
    first = np.eye(pairs, width, dtype=np.float32)
    second = np.roll(first, pairs, axis=1)
    table = c.constant(("table", key), TileLayout((pairs, features), "float32"), lambda: np.tile(first + second, heads))
    partner = c.constant(
        ("partner", key), TileLayout((features, features), "bfloat16"),
        lambda: np.kron(np.eye(heads, dtype=np.float32), first.T @ second - second.T @ first),
    )  # fmt: skip
    kept = c.constant(
        ("kept", key), TileLayout((1, features), "float32"),
        lambda: np.tile(np.arange(width) >= 2 * pairs, heads)[None].astype(np.float32),
    )  # fmt: skip
    sign = -1.0 if attributes["inverse"] else 1.0

    def run() -> None:
        of_x, of_partner = (tt.matmul(each.t, table.t, **c.product) for each in (cos, sin))
        if width > 2 * pairs:
            of_x = tt.add(of_x, kept.t)
        swapped = tt.matmul(x.t, partner.t, dtype=tt.float32, **c.product)
        scaled = tt.multiply(x.t, of_x, dtype=tt.float32)
        tt.addcmul(scaled, swapped, of_partner, value=sign, output_tensor=y.t)

    return run


def _picking(c: Context, batch: int, rows: tuple[int, ...], time: int, dtype: DType) -> DeviceTensor:
    """[batch, len(rows), time]: a product with it picks rows, one with its transpose puts them back."""

    def values() -> np.ndarray:
        return np.broadcast_to(np.eye(time, dtype=np.float32)[list(rows)], (batch, len(rows), time))

    return c.constant(("picking", rows), TileLayout((batch, len(rows), time), dtype_name(dtype)), values)


@row("index_select")
def _pick_rows(
    c: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors, back: bool = False
) -> Launch:
    (x,), (y,) = ins, outs
    time = (y if back else x).spec.shape[1]
    one_hot = _picking(c, x.spec.shape[0], attributes["indices"], time, x.spec.dtype)
    return lambda: c.tt.matmul(one_hot.t, x.t, transpose_a=back, optional_output_tensor=y.t, **c.product)


row("index_put")(partial(_pick_rows, back=True))


@row("matmul")
def _matmul(c: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    (a, b), (y,) = ins, outs
    options = {"transpose_a": attributes["transpose_a"], "transpose_b": attributes["transpose_b"], **c.product}
    return lambda: c.tt.matmul(a.t, b.t, optional_output_tensor=y.t, **options)


@row("linear")
def _linear(c: Context, ins: Sequence[Any], outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    """relu fuses into the product; other activations follow in place."""
    (x, weight, bias), (y,), activation = ins, outs, attributes.get("activation")
    options: dict[str, Any] = {"transpose_b": True, **c.product}
    if activation == "relu":
        options |= {"activation": "relu", "core_grid": c.grid or c.whole_grid}

    def product() -> Any:
        row = None if bias is None else bias.t
        return c.tt.linear(x.t, weight.t, bias=row, optional_output_tensor=y.t, **options)

    return product if activation in (None, "relu") else _then(c, product, activation)


def _then(c: Context, product: Launch, activation: str) -> Launch:
    variants = {"gelu": c.tt.GeluVariant.Accurate, "gelu_tanh": c.tt.GeluVariant.Tanh}

    def run() -> None:
        y = product()
        if activation in variants:
            c.tt.gelu(y, variant=variants[activation], output_tensor=y)
        else:
            getattr(c.tt, activation)(y, output_tensor=y)

    return run
