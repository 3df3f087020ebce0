"""Mixtures of experts: the choice of experts, rows sorted by expert and back, and products of each expert's own rows.

N tokens have K experts each of E. The M = N*K pairs of token n and choice k, number n*K + k, are sorted by expert, and
pairs of one expert keep their order. So each expert has a panel of neighbouring rows, of any height. Where the panels
begin is data of the device: no step waits to learn it, and no token is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ttrain.core.spec import DType, TensorSpec
from ttrain.graph import Case, Node, Value, cases, composite, primitive, require
from ttrain.ops.elementwise import free
from ttrain.ops.embedding import one_hot
from ttrain.ops.layout import reshape
from ttrain.ops.reduce import reduce_sum


@primitive("ids int64 [...]", flops=free, reference=lambda ids: (ids >= 0).double())
def valid(ids: Value) -> TensorSpec:
    """Return 1 where ids >= 0, else 0: ids int64 [...] -> fp32 [...]."""
    return TensorSpec(ids.shape, DType.FP32)


def _top_k_in_torch(scores: Any, count: int) -> Any:
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


@primitive("scores [N, E]", flops=lambda node: node.input("scores").spec.size, reference=_top_k_in_torch)
def top_k(scores: Value, count: int) -> TensorSpec:
    """Return the ids of the K = `count` largest scores of each row, in falling order: [N, E] -> int64 [N, K].

    Of equal scores the first comes first. NaN is larger than any number.
    """
    fits = 0 < count <= scores.shape[1]
    require(fits, "top_k", f"count={count} of {scores.spec}", f"1 to {scores.shape[1]}")
    return TensorSpec((scores.shape[0], count), DType.INT64)


@composite("dy [N, K], ids int64 [N, K]", outputs=("dx",), flops=free, differentiable=False)
def scatter(dy: Value, ids: Value, count: int) -> Value:
    """dx[n, ids[n, k]] = dy[n, k], and 0 elsewhere: dy [N, K] -> dx [N, E], E = `count`; no id is twice in a row."""
    return reduce_sum(one_hot(ids, count, dy.spec.dtype) * reshape(dy, (*dy.shape, 1)), (1,))


@composite(
    "x [N, E], ids int64 [N, K]",
    flops=free,
    vjp=lambda node, dy: [scatter(dy, node.input("ids"), node.input("x").shape[1]), None],
)
def gather(x: Value, ids: Value) -> Value:
    """y[n, k] = x[n, ids[n, k]]: x [N, E], ids int64 [N, K] -> y [N, K]."""
    rows, count = x.shape
    return reduce_sum(one_hot(ids, count, x.spec.dtype) * reshape(x, (rows, 1, count)), (2,))


def _sorted_in_torch(ids: Any, count: int) -> tuple[Any, Any, Any]:
    order = ids.flatten().sort(stable=True).indices
    heights = ids.flatten().bincount(minlength=count)
    return order, order.argsort().view(ids.shape), heights.new_tensor([0, *heights.cumsum(0).tolist()])


@primitive("ids int64 [N, K]", outputs=("order", "places", "offsets"), flops=free, reference=_sorted_in_torch)
def sort_by_expert(ids: Value, count: int) -> list[TensorSpec]:
    """Sort pairs by their experts: ids int64 [N, K], each from 0 to `count` - 1.

    `order` int64 [M] has the number of the pair in each row, `places` int64 [N, K] the row of each pair. The rows of
    expert e go from `offsets`[e] up to `offsets`[e + 1], int64 [count + 1].
    """
    return [TensorSpec(shape, DType.INT64) for shape in ((ids.spec.size,), ids.shape, (count + 1,))]


def _dispatched_in_torch(x: Any, order: Any, places: Any, weights: Any) -> Any:
    rows = x[order // places.shape[1]]
    return rows if weights is None else rows * weights.flatten()[order, None]


_PAIRS = "order int64 [M], places int64 [N, K], weights accumulation [N, K]"


@primitive("x [N, C], " + _PAIRS, flops=free, reference=_dispatched_in_torch, constants=("weights",))
def dispatch(x: Value, order: Value, places: Value, weights: Value | None = None) -> TensorSpec:
    """A row for each pair, sorted by expert: y[j] = x[order[j] // K], times its weight: x [N, C] -> y [M, C]."""
    return x.spec.with_shape(order.shape[0], x.shape[1])


@dispatch.gradient
def _(node: Node, dy: Value) -> Sequence[Value | None]:
    return [combine(dy, *node.inputs[1:]), None, None, None]  # type: ignore[arg-type]


def _combined_in_torch(rows: Any, order: Any, places: Any, weights: Any) -> Any:
    pairs = rows[places]  # [N, K, C]
    return (pairs if weights is None else pairs * weights[..., None]).sum(1)


@primitive("rows [M, C], " + _PAIRS, reference=_combined_in_torch)
def combine(rows: Value, order: Value, places: Value, weights: Value | None = None) -> TensorSpec:
    """Add up each token's rows: y[n] = sum over k of weights[n, k] rows[places[n, k]]: rows [M, C] -> y [N, C].

    Sums go in order of k, in fp32 at least.
    """
    return rows.spec.with_shape(places.shape[0], rows.shape[1])


@combine.gradient
def _(node: Node, dy: Value) -> Sequence[Value | None]:
    rows, order, places, weights = node.inputs
    assert rows is not None and order is not None and places is not None
    dweights = None if weights is None else row_products(dy, rows, places)
    return [dispatch(dy, order, places, weights), None, None, dweights]


@primitive(
    "dy [N, C], rows [M, C], places int64 [N, K]",
    flops=lambda node: 2 * node.input("rows").spec.size,
    reference=lambda dy, rows, places: (dy[:, None] * rows[places]).sum(-1),
    differentiable=False,
)
def row_products(dy: Value, rows: Value, places: Value) -> TensorSpec:
    """dweights[n, k] = dy[n] . rows[places[n, k]]: dy [N, C], rows [M, C] -> [N, K], fp32 at least."""
    return TensorSpec(places.shape, dy.spec.dtype.accumulation)


def _grouped_in_torch(rows: Any, weight: Any, offsets: Any, transpose: bool) -> Any:
    import torch

    panels, matrices = rows.split(offsets.diff().tolist()), weight.mT if transpose else weight
    return torch.cat([panel @ matrix for panel, matrix in zip(panels, matrices, strict=True)])


def _grouped_flops(node: Node) -> int:
    return 2 * node.values[0].spec.size * node.outputs[0].shape[-1]


@primitive("rows [M, I], weight [E, P, Q], offsets int64 [L]", flops=_grouped_flops, reference=_grouped_in_torch)
def grouped_matmul(rows: Value, weight: Value, offsets: Value, transpose: bool = False) -> TensorSpec:
    """y[j] = rows[j] W_e, or W_e^T with `transpose`, for the expert e of each row: rows [M, I], weight [E, P, Q].

    The rows of expert e go from offsets[e] up to offsets[e + 1], int64 [E + 1]. Gives [M, Q], or [M, P] with
    `transpose`. Accumulates in fp32 at least.
    """
    experts, *sides = weight.shape
    inner, outer = sides[::-1] if transpose else sides
    fits, given = (inner, experts + 1) == (rows.shape[1], *offsets.shape), f"{rows.spec}, {offsets.spec}"
    require(fits, "grouped_matmul", given, f"rows of {inner} and {experts + 1} offsets for {weight.spec}")
    return rows.spec.with_shape(rows.shape[0], outer)


@grouped_matmul.gradient
def _(node: Node, dy: Value) -> Sequence[Value | None]:
    rows, weight, offsets = node.values
    transpose = node.attributes["transpose"]
    # The weights' gradient comes first: rows are free before their gradient needs memory.
    dweight = grouped_outer(dy, rows, offsets) if transpose else grouped_outer(rows, dy, offsets)
    return [grouped_matmul(dy, weight, offsets, not transpose), dweight, None]


def _outer_in_torch(a: Any, b: Any, offsets: Any) -> Any:
    import torch

    panels = (x.split(offsets.diff().tolist()) for x in (a, b))
    return torch.stack([left.mT @ right for left, right in zip(*panels, strict=True)])


@primitive(
    "a [M, P], b [M, Q], offsets int64 [L]", flops=_grouped_flops, reference=_outer_in_torch, differentiable=False
)
def grouped_outer(a: Value, b: Value, offsets: Value) -> TensorSpec:
    """y[e] = A_e^T B_e over the rows of each expert; 0 where it has none: a [M, P], b [M, Q] -> [E, P, Q]."""
    return a.spec.with_shape(offsets.shape[0] - 1, a.shape[1], b.shape[1])


cases(valid, *(Case(((size,),), integers={"ids": 5}, holes=("ids",)) for size in (7, 33)))
for _n, _e, _k in ((5, 4, 1), (6, 4, 2), (33, 9, 8), (7, 3, 3)):
    cases(top_k, Case(((_n, _e),), {"count": _k}))
    cases(sort_by_expert, Case(((_n, _k),), {"count": _e}, {"ids": _e}))
for _n, _e, _ids in ((3, 4, [[0, 3], [2, 1], [1, 0]]), (2, 33, [[32], [7]])):
    cases(gather, Case(((_n, _e), (_n, len(_ids[0]))), values={"ids": _ids}))
# Pairs of 3 tokens with 2 of 4 experts, of which one has none; and of 5 with the same one of 2.
for _order, _places, _offsets, _width in (
    ([0, 5, 2, 4, 1, 3], [[0, 4], [2, 5], [3, 1]], [0, 2, 2, 4, 6], 8),
    ([0, 1, 2, 3, 4], [[0], [1], [2], [3], [4]], [0, 0, 5], 33),
):
    _pairs = {"order": _order, "places": _places}
    _given, _all = ((len(_order),), (len(_places), len(_places[0]))), len(_order)
    for _weights in (None, _given[1]):
        cases(dispatch, Case(((len(_places), _width), *_given, _weights), values=_pairs))
        cases(combine, Case(((_all, _width), *_given, _weights), values=_pairs))
    for _p, _q, _transpose in ((6, _width, True), (_width, 5, False)):
        _shapes = ((_all, _width), (len(_offsets) - 1, _p, _q), (len(_offsets),))
        cases(grouped_matmul, Case(_shapes, {"transpose": _transpose}, values={"offsets": _offsets}))
