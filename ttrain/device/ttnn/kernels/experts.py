"""Rows of mixtures of experts. Where the panels of experts begin is known on the card alone.

ttnn multiplies no panels of such heights. Every expert multiplies all rows, of which those of others are zero: E/K
times the work, which a plan names `dense`. Numbers are compared, sorted and counted in fp32, exactly up to 2^24.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import numpy as np

from ttrain.core.errors import GraphError
from ttrain.core.spec import DType
from ttrain.device.base import Delivery, Layout
from ttrain.device.ttnn.kernels.common import Context, Specs, Tensor, column_sum, row, wide
from ttrain.device.ttnn.kernels.layout import look_up
from ttrain.device.ttnn.kernels.reduce import joined
from ttrain.device.ttnn.tensors.device_tensor import IntegerInput
from ttrain.device.ttnn.tensors.store import TileLayout, default_layout, device_shape, dtype_name

MOST_COMPARED = 512  # scores of a row, each with all others
LARGEST_KEY = 2**24  # below which fp32 holds every integer
_HUGE = 3e38


def _apart(c: Context, ins: Specs, outs: Specs, _: Any) -> list[Layout | None]:
    """Name the layouts of integers: those made on the card take no turns with step inputs, which the host writes."""
    return [default_layout(spec) for spec in outs]


def _counting(c: Context, shape: tuple[int, ...]) -> Any:
    """Return a constant of the numbers from 0 on, fp32."""
    return c.constant("counting", TileLayout(shape), lambda: np.arange(prod(shape), dtype=np.float32).reshape(shape)).t


def _numbers(c: Context, ids: IntegerInput, shape: tuple[int, ...]) -> Any:
    """Return integers as fp32 numbers."""
    return c.tt.typecast(ids.in_layout(TileLayout(shape, "int32")), c.tt.float32)


@row("valid")
def _valid(c: Context, ids: IntegerInput, y: Tensor) -> None:
    c.tt.copy(ids.in_layout(TileLayout(device_shape(ids.spec.shape), "float32")), y.t)


@row("top_k", Delivery.RETURNS, layouts=_apart, supports=lambda ins, _: ins[0].shape[1] <= MOST_COMPARED)
def _top_k(c: Context, scores: Tensor, y: Tensor, count: int) -> list[Any]:
    """The rank of a score is the number of those before it. A maximum would round fp32, a comparison does not.

    Differences of infinite scores are NaN, so all are made finite.
    """
    tt, (rows, size) = c.tt, scores.spec.shape
    pairs = TileLayout((1, size, size))
    earlier = c.constant("earlier", pairs, lambda: np.triu(np.ones(pairs.shape, np.float32), 1))
    x = wide(c, scores)
    x = tt.clamp(tt.where(tt.isnan(x), _HUGE, x), -_HUGE, _HUGE)
    rival, own = tt.reshape(x, (rows, size, 1)), tt.reshape(x, (rows, 1, size))
    before = tt.addcmul(tt.gt(rival, own), tt.eq(rival, own), earlier.t)
    chosen = tt.eq(tt.sum(before, dim=1, keepdim=True, **c.exact), _counting(c, (1, count, 1)))  # [N, K, E]
    ids = tt.sum(tt.multiply(chosen, _counting(c, (1, 1, size))), dim=-1, keepdim=True, **c.exact)
    return [tt.typecast(tt.reshape(ids, (rows, count)), tt.int32)]


@row("gather", Delivery.RETURNS)
def _gather(c: Context, x: Tensor, ids: IntegerInput, y: Tensor) -> list[Any]:
    return [c.tt.gather(x.t, 1, ids.in_layout(TileLayout(ids.spec.shape, "uint32")))]


@row("sort_by_expert", Delivery.RETURNS, layouts=_apart)
def _sort_by_expert(c: Context, ids: IntegerInput, *outs: Tensor, count: int) -> list[Any]:
    """Sort keys id * M + number: no two are equal, so that any sort keeps the order of pairs of one expert."""
    tt, pairs = c.tt, ids.spec.size
    if count * pairs > LARGEST_KEY:
        told = f"{pairs} pairs of token and expert, times {count} experts, are more than {LARGEST_KEY}, as fp32 holds"
        raise GraphError(f"model.experts: {told}. Give a smaller train.batch_size.")
    experts = _numbers(c, ids, (1, pairs))
    _, order = tt.sort(tt.add(tt.multiply(experts, float(pairs)), _counting(c, (1, pairs))), dim=-1)
    _, places = tt.sort(tt.typecast(order, tt.float32), dim=-1)
    lower = tt.lt(tt.reshape(experts, (pairs, 1)), _counting(c, (1, count + 1)))
    offsets = column_sum(c, lower, (pairs, count + 1), DType.FP32)
    order, places, offsets = (tt.typecast(x, tt.int32) for x in (order, places, offsets))
    return [order, tt.reshape(places, ids.spec.shape), offsets]


def _look_up(c: Context, table: Tensor, numbers: Any) -> Any:
    """Return the rows of a table that a row of numbers names."""
    return look_up(c, table.t, c.tt.to_layout(c.tt.typecast(numbers, c.tt.uint32), c.tt.ROW_MAJOR_LAYOUT))


@row("dispatch", Delivery.RETURNS)
def _dispatch(
    c: Context, x: Tensor, order: IntegerInput, places: IntegerInput, weights: Tensor | None, y: Tensor
) -> list[Any]:
    tt, pairs, count = c.tt, order.spec.size, places.spec.shape[1]
    tokens = tt.floor(tt.multiply(tt.add(_numbers(c, order, (1, pairs)), 0.5), 1 / count))
    rows = tt.reshape(_look_up(c, x, tokens), y.spec.shape)
    if weights is None:
        return [rows]
    own = tt.gather(tt.reshape(weights.t, (1, pairs)), 1, order.in_layout(TileLayout((1, pairs), "uint32")))
    weighted = tt.multiply(tt.typecast(rows, tt.float32), tt.reshape(own, (pairs, 1)))
    return [tt.typecast(weighted, getattr(tt, dtype_name(y.spec.dtype)))]


def _of_choices(c: Context, rows: Tensor, places: IntegerInput) -> Any:
    """Return the row of every choice of every token: fp32 [K, N, C]."""
    tt, (tokens, count) = c.tt, places.spec.shape
    turned = tt.permute(places.in_layout(TileLayout((tokens, count), "int32")), (1, 0))
    found = _look_up(c, rows, tt.reshape(turned, (1, tokens * count)))
    return tt.reshape(tt.typecast(found, tt.float32), (count, tokens, rows.spec.shape[1]))


@row("combine", Delivery.RETURNS)
def _combine(
    c: Context, rows: Tensor, _: IntegerInput, places: IntegerInput, weights: Tensor | None, y: Tensor
) -> list[Any]:
    tt, found = c.tt, _of_choices(c, rows, places)
    if weights is not None:
        turned = tt.permute(weights.t, (1, 0))
        found = tt.multiply(found, tt.reshape(turned, (*turned.shape, 1)))
    total = tt.reshape(tt.sum(found, dim=0, keepdim=True, **c.exact), y.spec.shape)
    return [tt.typecast(total, getattr(tt, dtype_name(y.spec.dtype)))]


@row("row_products", Delivery.RETURNS)
def _row_products(c: Context, dy: Tensor, rows: Tensor, places: IntegerInput, dweights: Tensor) -> list[Any]:
    tt, (tokens, count) = c.tt, places.spec.shape
    products = tt.multiply(_of_choices(c, rows, places), tt.reshape(wide(c, dy), (1, *dy.spec.shape)))
    sums = tt.sum(products, dim=-1, keepdim=True, **c.exact)
    return [tt.permute(tt.reshape(sums, (count, tokens)), (1, 0))]


def _grouped(
    outer: bool, c: Context, a: Tensor, b: Tensor, offsets: IntegerInput, y: Tensor, transpose: bool = False
) -> list[Any]:
    """Multiply the rows of each expert by its matrix, or with `outer` by the same rows of b."""
    tt, ends, height = c.tt, offsets.spec.size, a.spec.shape[0]
    begun = tt.ge(_counting(c, (height, 1)), _numbers(c, offsets, (1, ends)))
    begun = tt.sum(begun, dim=-1, keepdim=True, **c.exact)  # how many panels begin up to each row
    found: list[Any] = []
    for e in range(ends - 1):
        own = tt.multiply(a.t, tt.eq(begun, e + 1.0, dtype=getattr(tt, dtype_name(a.spec.dtype))))
        if outer:
            product = tt.matmul(own, b.t, transpose_a=True, **c.product)
            found.append(tt.reshape(product, (1, *y.spec.shape[1:])))
        else:
            sides = b.spec.shape[1:]
            matrix = tt.reshape(tt.slice(b.t, [e, 0, 0], [e + 1, *sides]), sides)
            product = tt.matmul(own, matrix, transpose_b=transpose, **c.product)
            found = [tt.add(found[0], product) if found else product]
    return [joined(tt, found, 0)]


for _name in ("grouped_matmul", "grouped_outer"):
    row(_name, Delivery.RETURNS, way=lambda *_: "dense")(partial(_grouped, _name == "grouped_outer"))
