"""Matrix products: plain ones, of every head with one matrix, and with 0 and 1 to pick rows out of sequences.

Heads never lie in the last two axes: a head of 16 features would be padded to a tile of its own. Instead the small
matrix is laid out along the diagonal of a large one.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ttrain.core.spec import DType
from ttrain.device.base import Launch
from ttrain.device.ttnn.kernels.common import Context, Tensor, flattens, row, rows_shape
from ttrain.device.ttnn.tensors.store import TileLayout, dtype_name


def _stacked_identity(c: Context, heads: int, width: int, dtype: DType) -> Tensor:
    """[heads * width, width]: one identity matrix under the other."""
    layout = TileLayout((heads * width, width), dtype_name(dtype))
    return c.constant("stacked identity", layout, lambda: np.tile(np.eye(width, dtype=np.float32), (heads, 1)))


def _blocks(c: Context, heads: int, height: int, width: int, dtype: DType) -> Tensor:
    """[heads * height, heads * width]: 1 within each head's own block, else 0."""
    layout = TileLayout((heads * height, heads * width), dtype_name(dtype))
    return c.constant(
        ("blocks", heads), layout, lambda: np.kron(np.eye(heads), np.ones((height, width))).astype(np.float32)
    )


@row("head_matmul")
def _head_matmul(c: Context, x: Tensor, matrix: Tensor, y: Tensor, heads: int, transpose: bool) -> None:
    """x times the matrix repeated along a diagonal: [B, T, H*D] [H*D, H*E]."""
    tt, dtype, (inner, outer) = c.tt, x.spec.dtype, matrix.spec.shape[:: -1 if transpose else 1]
    down, across = _stacked_identity(c, heads, inner, dtype), _stacked_identity(c, heads, outer, dtype)
    column = tt.matmul(down.t, matrix.t, transpose_b=transpose, **c.product)
    repeated = tt.matmul(column, across.t, transpose_b=True, **c.product)
    whole = tt.multiply(repeated, _blocks(c, heads, inner, outer, dtype).t)
    tt.matmul(x.t, whole, optional_output_tensor=y.t, **c.product)


@row("head_product")
def _head_product(c: Context, a: Tensor, b: Tensor, y: Tensor, heads: int) -> None:
    """The blocks on the diagonal of a^T b, added up."""
    tt, wide, (height, width) = c.tt, DType.FP32, y.spec.shape
    down, across = _stacked_identity(c, heads, height, wide), _stacked_identity(c, heads, width, wide)

    def rows(x: Tensor) -> Any:
        flat = x.t if flattens(x.spec.shape) else tt.to_layout(x.t, tt.TILE_LAYOUT)
        return tt.reshape(flat, rows_shape(x.spec.shape))

    product = tt.matmul(rows(a), rows(b), transpose_a=True, dtype=tt.float32, **c.product)
    own = tt.multiply(product, _blocks(c, heads, height, width, wide).t)
    column = tt.matmul(down.t, own, transpose_a=True, **c.product)
    if y.spec.dtype is wide:
        tt.matmul(column, across.t, optional_output_tensor=y.t, **c.product)
    else:
        tt.typecast(tt.matmul(column, across.t, **c.product), tt.bfloat16, output_tensor=y.t)


@row("rotary", bound=True)
def _rotary(c: Context, x: Tensor, cos: Tensor, sin: Tensor, y: Tensor, heads: int, inverse: bool) -> Launch:
    """y = x cos + p sin: p has the other feature of each pair, signed, and the tables one number a feature of x.

    ttnn's own rotation takes heads of whole tiles apart: with the moves that this needs, it is as many launches.
    """
    tt, pairs, features = c.tt, cos.spec.shape[-1], x.spec.shape[-1]
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
    sign = -1.0 if inverse else 1.0

    def run() -> None:
        of_x, of_partner = (tt.matmul(each.t, table.t, **c.product) for each in (cos, sin))
        if width > 2 * pairs:
            of_x = tt.add(of_x, kept.t)
        swapped = tt.matmul(x.t, partner.t, dtype=tt.float32, **c.product)
        scaled = tt.multiply(x.t, of_x, dtype=tt.float32)
        tt.addcmul(scaled, swapped, of_partner, value=sign, output_tensor=y.t)

    return run


def _picking(c: Context, batch: int, rows: tuple[int, ...], time: int, dtype: DType) -> Tensor:
    """[batch, len(rows), time]: a product with it picks rows, one with its transpose puts them back."""

    def values() -> np.ndarray:
        return np.broadcast_to(np.eye(time, dtype=np.float32)[list(rows)], (batch, len(rows), time))

    return c.constant(("picking", rows), TileLayout((batch, len(rows), time), dtype_name(dtype)), values)


def _pick_rows(c: Context, x: Tensor, y: Tensor, indices: tuple[int, ...], back: bool, **_: Any) -> None:
    time = (y if back else x).spec.shape[1]
    one_hot = _picking(c, x.spec.shape[0], indices, time, x.spec.dtype)
    c.tt.matmul(one_hot.t, x.t, transpose_a=back, optional_output_tensor=y.t, **c.product)


row("index_select")(partial(_pick_rows, back=False))
row("index_put")(partial(_pick_rows, back=True))


@row("matmul")
def _matmul(c: Context, a: Tensor, b: Tensor, y: Tensor, **turned: bool) -> None:
    c.tt.matmul(a.t, b.t, optional_output_tensor=y.t, **turned, **c.product)


@row("linear")
def _linear(
    c: Context, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, activation: str | None = None
) -> None:
    """relu fuses into the product; other activations follow in place."""
    tt, options = c.tt, {"transpose_b": True, **c.product}
    if activation == "relu":
        options |= {"activation": "relu", "core_grid": c.grid or c.whole_grid}
    given = None if bias is None else bias.t
    y = tt.linear(x.t, weight.t, bias=given, optional_output_tensor=out.t, **options)
    if activation in ("gelu", "gelu_tanh"):
        variant = tt.GeluVariant.Tanh if activation == "gelu_tanh" else tt.GeluVariant.Accurate
        tt.gelu(y, variant=variant, output_tensor=y)
    elif activation not in (None, "relu"):
        getattr(tt, activation)(y, output_tensor=y)
