"""Multi-head attention, and its softmax of scores under a mask.

One op serves packed and separate projections, grouped heads, masks, biases and dropout.

Sampling attends to keys and values that earlier steps have left in caches: state [B, H, C, D], a row for each of C
places. Where a query stands and how many keys it sees are tensors, so one built step serves every place of a text and
every mask whose visible keys come first. The caches of several texts lie one after another in the C places.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from ttrain.core.attention_mask import CAUSAL, EVERY_KEY, FULL, HIDDEN, PAIRS, AttentionMask
from ttrain.core.spec import DType, TensorSpec
from ttrain.graph import Case, Node, Value, cases, composite, op, primitive, require
from ttrain.ops.elementwise import cast, dropout, free, sum_to
from ttrain.ops.layout import merge_heads, reshape, split_heads
from ttrain.ops.matmul import attention_scale, matmul
from ttrain.ops.reduce import reduce_sum


def _check_scores(owner: str, x: TensorSpec, mask: AttentionMask) -> None:
    require(x.rank >= 1 and x.dtype.is_floating, owner, x, "a floating-point tensor of rank 1 or more")
    square = x.rank >= 2 + mask.biased and x.shape[-1] == x.shape[-2]
    require(mask.is_full or square, owner, x, f"[..., {'heads, ' * mask.biased}T, T] under mask {mask}")


def _scores_in_torch(x: Any, scale: float, mask: AttentionMask) -> Any:
    if mask.is_full:
        return scale * x
    heads = x.shape[-3] if mask.biased else 1
    bias = x.new_tensor(mask.score_bias(heads, x.shape[-1], -math.inf))
    return scale * x + (bias if mask.biased else bias[0])


@composite("dy [...], y [...]", outputs=("dx",), differentiable=False)
def softmax_grad(dy: Value, y: Value, scale: float) -> Value:
    """dx = scale * y (dy - sum(dy y)): the backward of y = softmax(scale * x) from its output; fp32 at least inside."""
    given, made = cast(dy, y.spec.dtype.accumulation), cast(y, y.spec.dtype.accumulation)
    total = reshape(reduce_sum(given * made, [y.spec.rank - 1]), (*y.shape[:-1], 1))
    return cast(made * (given - total) * scale, y.spec.dtype)


@primitive(
    flops=lambda node: 5 * node.input("x").spec.size,
    reference=lambda x, scale, mask: _scores_in_torch(x, scale, mask).softmax(-1),
    vjp=lambda node, dy: [softmax_grad(dy, node.outputs[0], node.attributes["scale"])],
)
def softmax(x: Value, scale: float = 1.0, mask: AttentionMask = EVERY_KEY) -> TensorSpec:
    """Softmax over the last axis: y = softmax(scale * x + bias); what the mask hides gets no probability.

    The bias is that of `mask` for x [..., T, T] (query, key), or [..., H, T, T] with a position bias; in fp32 at least.
    """
    _check_scores("softmax", x.spec, mask)
    return x.spec


@primitive(
    flops=free,  # counted with the softmax of the same scores
    reference=lambda x, scale, mask: _scores_in_torch(x, scale, mask).logsumexp(-1),
)
def log_sum_exp(x: Value, scale: float = 1.0, mask: AttentionMask = EVERY_KEY) -> TensorSpec:
    """y = log(sum(exp(scale * x + bias))) over the last axis, which disappears; bias as in softmax; fp32 at least."""
    _check_scores("log_sum_exp", x.spec, mask)
    return TensorSpec(x.shape[:-1], x.spec.dtype.accumulation)


for _shape, _scale, _mask in (
    ((4, 8), 1.0, EVERY_KEY),
    ((2, 3, 33), 0.3, EVERY_KEY),
    ((2, 2, 5, 5), 0.5, AttentionMask(CAUSAL)),
    ((33, 33), 1.0, AttentionMask(CAUSAL)),
    ((1, 1), 1.0, AttentionMask(CAUSAL)),
    ((2, 3, 5, 5), 0.5, AttentionMask(PAIRS, "future")),
    ((1, 4, 8, 8), 1.0, AttentionMask(CAUSAL, "distance")),
    ((1, 1, 33, 33), 0.3, AttentionMask(PAIRS)),
    ((1, 2, 32, 32), 0.5, AttentionMask(PAIRS, "distance")),
    ((1, 2, 32, 32), 0.5, AttentionMask(CAUSAL, window=5)),
    ((2, 7, 7), 0.5, AttentionMask(FULL, "distance", 3)),
):
    cases(softmax, Case((_shape,), {"scale": _scale, "mask": _mask}))


def attention(
    q: Value,
    k: Value | None = None,
    v: Value | None = None,
    *,
    heads: int,
    kv_heads: int | None = None,
    scale: float | None = None,
    mask: str = CAUSAL,
    position_bias: str = "none",
    window: int | None = None,
    bias: Value | None = None,
    seed: Value | None = None,
    positions: Value | None = None,
    p: float = 0.0,
    stream: int = 0,
) -> Value:
    """Multi-head attention (Vaswani et al., 2017): y = dropout(softmax(scale * q k^T + bias)) v per head.

    q [B, T, heads*E], k [B, T, kv_heads*E], v [B, T, kv_heads*D] -> y [B, T, heads*D]; or q alone, the packed
    projection [B, T, 3*heads*D] of all three. Head h reads keys and values of head h * kv_heads // heads; `kv_heads`
    is `heads` where not given (grouped queries, Ainslie et al., 2023). `scale` is 1/sqrt(E) where not given. `mask`,
    `position_bias` and `window` are those of core/attention_mask.py. `bias` [1 or B, 1 or heads, T, T] in q's dtype is
    added to the scaled scores and gets a gradient. Dropout of probability p wants a `seed`, int64 []. `positions` int64
    [B, T] count from 0 anew in every document of a row: a query sees keys of its own document alone.
    """
    if scale is None:
        scale = attention_scale(q.shape[-1] // ((3 if k is None else 1) * heads))
    rules = AttentionMask(mask, position_bias, window)
    grouped = None if kv_heads == heads else kv_heads
    return _attention(q, k, v, bias, seed if p else None, positions, heads, scale, rules, grouped, p, stream)[0]


def _bias_in_torch(positions: Any, dtype: DType) -> Any:
    starts = (0 * positions + 1).cumsum(1) - positions
    return (starts[:, None, :, None] != starts[:, None, None, :]).double() * HIDDEN


@primitive("positions int64 [B, T]", outputs=("bias",), reference=_bias_in_torch)
def document_bias(positions: Value, dtype: DType) -> TensorSpec:
    """[B, 1, T, T] to add to scaled scores: HIDDEN where a key lies in another document than its query, else 0.

    positions int64 [B, T] count from 0 anew in every document of a row.
    """
    return TensorSpec((positions.shape[0], 1, positions.shape[1], positions.shape[1]), dtype)


_QKV = "q [B, T, Q], k [B, T, K], v [B, T, V], bias [...], positions int64 [B, T]"


@composite(_QKV, name="attention", outputs=("y", "log_sum_exp"))
def _attention(
    q: Value,
    k: Value | None,
    v: Value | None,
    bias: Value | None,
    seed: Value | None,
    positions: Value | None,
    heads: int,
    scale: float,
    mask: AttentionMask,
    kv_heads: int | None = None,
    p: float = 0.0,
    stream: int = 0,
) -> tuple[Value, Value]:
    """Attention of queries on keys and values, with `log_sum_exp` [B, H, T] fp32 of the biased scores.

    A kernel's backward needs it to form the probabilities again; they are never kept.
    """
    parts = _parts(q, k, v, heads, kv_heads)
    scores, factor = _scores(parts, bias, positions, scale)
    probabilities = softmax(scores, factor, mask)
    if p:
        require(seed is not None, "attention", "no seed", f"a seed, since p={p}")
        assert seed is not None
        probabilities = dropout(probabilities, seed, p, stream)
    y = merge_heads([parts.ungrouped(matmul(parts.grouped(probabilities), parts.v))])
    return y, log_sum_exp(scores, factor, mask)


@_attention.gradient
def _(node: Node, dy: Value, log_sum_exp: None) -> Sequence[Value | None]:
    (q, k, v, bias, seed, positions), (y, statistic) = node.inputs, node.outputs
    found = op("attention_grad").record(dy, q, k, v, y, statistic, bias, seed, positions, **node.attributes)
    found = iter(found if isinstance(found, tuple) else [found])
    return [None if given is None else next(found) for given in (q, k, v, bias)] + [None, None]


@composite(_QKV + ", dy [B, T, Y], y [B, T, Y]", outputs=("dq", "dk?", "dv?", "dbias?"), differentiable=False)
def attention_grad(
    dy: Value,
    q: Value,
    k: Value | None,
    v: Value | None,
    y: Value,
    log_sum_exp: Value,
    bias: Value | None,
    seed: Value | None,
    positions: Value | None,
    heads: int,
    scale: float,
    mask: AttentionMask,
    kv_heads: int | None = None,
    p: float = 0.0,
    stream: int = 0,
) -> tuple[Value, ...]:
    """Gradients of what attention was given, forming the probabilities again. dq alone is that of a packed q."""
    parts = _parts(q, k, v, heads, kv_heads)
    (dy_heads,) = split_heads(dy, 1, heads)
    dy_heads = parts.grouped(dy_heads)
    scores, factor = _scores(parts, bias, positions, scale)
    before = softmax(scores, factor, mask)
    after = before if seed is None else dropout(before, seed, p, stream)
    dv = matmul(parts.grouped(after), dy_heads, transpose_a=True)
    dprobabilities = parts.ungrouped(matmul(dy_heads, parts.v, transpose_b=True))
    if seed is not None:
        dprobabilities = dropout(dprobabilities, seed, p, stream)
    dscores = softmax_grad(dprobabilities, before, factor)
    scaled = parts.grouped(dscores if factor == scale else dscores * scale)
    dq, dk = parts.ungrouped(matmul(scaled, parts.k)), matmul(scaled, parts.q, transpose_a=True)
    found = [merge_heads([dq, dk, dv])] if k is None else [merge_heads([part]) for part in (dq, dk, dv)]
    return (*found, *([] if bias is None else [sum_to(dscores, bias)]))


class _Parts(NamedTuple):
    """q [B, K, G*T, E], k [B, K, T, E], v [B, K, T, D]: the queries of the G heads that share keys, one after another.

    In row-major order [B, K*G, T, ...] is the same, so that no key is repeated and no element moves.
    """

    q: Value
    k: Value
    v: Value
    heads: int
    time: int

    def grouped(self, x: Value) -> Value:
        """[B, H, T, n] as [B, K, G*T, n]."""
        batch, heads = self.k.shape[:2]
        return reshape(x, (batch, heads, self.q.shape[2], x.shape[3]))

    def ungrouped(self, x: Value) -> Value:
        """[B, K, G*T, n] as [B, H, T, n]."""
        return reshape(x, (x.shape[0], self.heads, self.time, x.shape[3]))


def _parts(q: Value, k: Value | None, v: Value | None, heads: int, kv_heads: int | None) -> _Parts:
    """Queries, keys and values by heads. Raises ShapeError for shapes that do not fit."""
    name, time, pairs = "attention", q.shape[1], kv_heads or heads
    if k is None or v is None:
        require(k is v, name, "one of k and v", "both, or none for a packed q")
        fix = "Give q, k and v apart."
        require(pairs == heads, name, f"{kv_heads=} of a packed projection", f"{heads} as it has heads", fix)
        queries, keys, values = split_heads(q, 3, heads)
        return _Parts(queries, keys, values, heads, time)
    require(heads % pairs == 0, name, f"{heads} heads and {kv_heads=}", "a multiple of kv_heads")
    narrow = q.spec.with_shape(*q.shape[:2], q.shape[2] // heads * pairs)
    require(k.spec == narrow, name, f"q {q.spec} and k {k.spec}", f"k {narrow}, {pairs} heads as wide as q's")
    (by_heads,), (keys,), (values,) = split_heads(q, 1, heads), split_heads(k, 1, pairs), split_heads(v, 1, pairs)
    grouped = reshape(by_heads, (q.shape[0], pairs, heads // pairs * time, by_heads.shape[3]))
    return _Parts(grouped, keys, values, heads, time)


def _scores(parts: _Parts, bias: Value | None, positions: Value | None, scale: float) -> tuple[Value, float]:
    """q k^T [B, H, T, T], and by what it is still to be scaled: one where it is biased, hence scaled already."""
    scores = parts.ungrouped(matmul(parts.q, parts.k, transpose_b=True))
    batch, heads, time, _ = scores.shape
    if positions is not None:
        scores, scale = scores * scale + document_bias(positions, scores.spec.dtype), 1.0
    if bias is None:
        return scores, scale
    fits = bias.shape in [*product((1, batch), (1, heads), (time,), (time,))]
    require(fits, "attention", f"bias {bias.spec}", f"[1 or {batch}, 1 or {heads}, {time}, {time}]")
    return scores * scale + bias, 1.0


# shapes of q, k, v and bias, heads, and further attributes
_CASES: tuple[tuple[Any, ...], ...] = (
    ((2, 5, 24), None, None, None, 2, {}),
    ((1, 33, 12), None, None, None, 1, {}),
    ((2, 8, 30), None, None, None, 5, {}),
    ((2, 8, 24), None, None, None, 2, {"p": 0.25, "stream": 3}),
    ((2, 5, 8), (2, 5, 8), (2, 5, 8), None, 2, {}),
    ((2, 6, 12), (2, 6, 12), (2, 6, 12), None, 3, {"mask": AttentionMask(PAIRS, "future")}),
    ((1, 33, 16), (1, 33, 16), (1, 33, 16), None, 1, {"mask": AttentionMask(PAIRS, "future")}),
    ((1, 7, 20), (1, 7, 20), (1, 7, 12), None, 4, {"mask": AttentionMask(PAIRS, "distance")}),
    ((1, 40, 96), (1, 40, 96), (1, 40, 32), None, 2, {}),
    ((1, 8, 6), (1, 8, 6), (1, 8, 24), None, 2, {"mask": AttentionMask(CAUSAL, "distance")}),
    ((1, 3, 4), (1, 3, 4), (1, 3, 4), None, 1, {"mask": AttentionMask(PAIRS)}),
    ((2, 6, 16), (2, 6, 8), (2, 6, 4), None, 4, {"kv_heads": 2}),
    ((1, 9, 12), (1, 9, 4), (1, 9, 4), (1, 3, 9, 9), 3, {"kv_heads": 1, "mask": AttentionMask("full", window=3)}),
    ((2, 8, 24), None, None, (2, 1, 8, 8), 2, {"p": 0.25, "stream": 3}),
    ((2, 9, 12), (2, 9, 12), (2, 9, 12), None, 3, {"mask": AttentionMask(CAUSAL, window=4)}),
    ((1, 8, 8), (1, 8, 8), (1, 8, 8), None, 2, {"p": 0.25, "stream": 1, "mask": AttentionMask(PAIRS, "future")}),
    ((2, 40, 12), None, None, None, 1, {"p": 0.25, "stream": 3, "documents": True}),
    ((1, 7, 12), (1, 7, 12), (1, 7, 12), (1, 3, 7, 7), 3, {"mask": AttentionMask("full"), "documents": True}),
    ((2, 6, 16), (2, 6, 8), (2, 6, 4), None, 4, {"kv_heads": 2, "documents": True}),
    ((1, 67, 24), (1, 67, 8), (1, 67, 8), None, 6, {"kv_heads": 2, "mask": AttentionMask(CAUSAL, window=37)}),
    ((2, 8, 12), (2, 8, 4), (2, 8, 4), None, 3, {"kv_heads": 1, "p": 0.25, "stream": 3}),
    ((1, 33, 32), (1, 33, 16), (1, 33, 16), None, 4, {"kv_heads": 2}),
    ((1, 32, 48), None, None, None, 2, {}),
)


def _case(q: Any, k: Any, v: Any, bias: Any, heads: int, more: Mapping[str, Any]) -> Case:
    scale = attention_scale(q[2] // (3 if k is None else 1) // heads)
    attributes = {"heads": heads, "scale": scale, "mask": AttentionMask(), **more}
    documents = attributes.pop("documents", False)
    positions = [[t % (3 + row) for t in range(q[1])] for row in range(q[0])] if documents else None
    shapes = (q, k, v, bias, () if more.get("p") else None, q[:2] if positions else None)
    return Case(shapes, attributes, {"seed": 2**62}, values={"positions": positions})


cases(_attention, *(_case(*given) for given in _CASES))


def _check_cache(owner: str, cache: TensorSpec, rows: TensorSpec) -> None:
    fits = rows.shape[1] % cache.shape[1] == 0 and rows.shape[2] <= cache.shape[2]
    require(fits, owner, f"{rows} and {cache}", "a multiple of its heads, at most as many rows as it has places")


def _places(rows: int, context: int) -> dict[str, list[int]]:
    """For cases, places in the middle; a query sees the pair that its own belongs to, and what is before."""
    positions = range((context - rows) // 2, (context + rows) // 2)
    return {"positions": [*positions], "visible": [min(place // 2 * 2 + 2, context) for place in positions]}


@primitive(
    "cache [B, H, C, D], rows [B, H, N, D], positions int64 [N]",
    outputs=("new_cache",),
    mutates={"new_cache": "cache"},
    flops=free,
    nbytes=lambda node: 2 * node.input("rows").spec.nbytes,
    reference=lambda cache, rows, positions: cache.index_copy(2, positions, rows),
)
def cache_write(cache: Value, rows: Value, positions: Value) -> TensorSpec:
    """cache[b, h, positions[i], :] <- rows[b, h, i, :]: rows [B, H, N, D], cache [B, H, C, D], positions int64 [N].

    No position may occur twice.
    """
    _check_cache("cache_write", cache.spec, rows.spec)
    return cache.spec


for _cache, _rows in (((1, 2, 7, 4), 3), ((2, 3, 33, 5), 1), ((1, 1, 4, 8), 4)):
    _new = (*_cache[:2], _rows, _cache[3])
    cases(cache_write, Case((_cache, _new, (_rows,)), values=_places(_rows, _cache[2])))


def _cache_bias_in_torch(
    positions: Any, visible: Any, context: int, dtype: DType, heads: int, mask: AttentionMask, texts: int
) -> Any:
    query, key, own = positions.numpy()[:, None], np.arange(context), context // texts
    hidden = (key >= visible.numpy()[:, None]) | (key <= query - (mask.window or context)) | (key < query // own * own)
    return positions.double().new_tensor(np.where(hidden, HIDDEN, mask.preference(heads, query, key)))[None]


@primitive("positions int64 [N], visible int64 [N]", outputs=("bias",), reference=_cache_bias_in_torch)
def cache_bias(
    positions: Value, visible: Value, context: int, dtype: DType, heads: int, mask: AttentionMask, texts: int = 1
) -> TensorSpec:
    """The bias that is added to the scores of N queries for C keys, [1, 1 or H, N, C] in `dtype`.

    Key j is hidden from query i where j >= visible[i], or with a window of the mask where j <= positions[i] - window,
    or where it belongs to another of the `texts`, of which each has C / texts places. The others get, with a position
    bias, -slope * distance in each of `heads` heads (ALiBi, Press et al., 2022):
    |j - positions[i]|, or for `future` max(0, j - positions[i]).
    """
    return TensorSpec((1, heads if mask.biased else 1, positions.shape[0], context), dtype)


@composite(
    "q [B, H, N, K], keys [B, G, C, K], values [B, G, C, D], positions int64 [N], visible int64 [N]",
    differentiable=False,
)
def cached_attention(
    q: Value,
    keys: Value,
    values: Value,
    positions: Value,
    visible: Value,
    scale: float,
    mask: AttentionMask = EVERY_KEY,
    texts: int = 1,
) -> Value:
    """y = softmax(scale * q keys^T + bias) values per head, over the keys that each query sees; bias as in cache_bias.

    q [B, H, N, K], keys [B, G, C, K], values [B, G, C, D], positions and visible int64 [N] -> y [B, H, N, D]. Head h
    reads keys and values of head h * G // H. Query i stands at positions[i] and sees the keys below visible[i], with a
    window only those nearer than that; of which there has to be one. Of C places each of the `texts` has as many, and
    no query sees keys of another text than its own.
    """
    _check_cache("cached_attention", keys.spec, q.spec)
    batch, groups, context, _ = keys.shape
    together = q.shape[1] // groups * q.shape[2]  # the queries that share keys, one after another
    scores = scale * matmul(reshape(q, (batch, groups, together, q.shape[3])), keys, transpose_b=True)
    require(context % texts == 0, "cached_attention", f"{context} places", f"as many for each of {texts} texts")
    bias = cache_bias(positions, visible, context, q.spec.dtype, q.shape[1], mask, texts)
    probabilities = softmax(reshape(scores, (*q.shape[:3], context)) + bias)
    return reshape(matmul(reshape(probabilities, scores.shape), values), (*q.shape[:3], values.shape[3]))


# batch and heads, rows, context, widths of keys and values, further attributes, heads of keys
_ATTENTION_CASES: tuple[tuple[tuple[int, int], int, int, int, int, dict[str, Any], int], ...] = (
    ((1, 2), 1, 9, 4, 4, {}, 2),
    ((1, 3), 4, 33, 6, 5, {"mask": AttentionMask(FULL, "future")}, 3),
    ((2, 2), 3, 8, 4, 4, {"mask": AttentionMask(FULL, "distance")}, 2),
    ((1, 1), 5, 5, 8, 8, {}, 1),
    ((2, 4), 3, 8, 4, 6, {"mask": AttentionMask(FULL, window=3)}, 2),
    ((1, 4), 6, 24, 4, 6, {"texts": 4}, 2),
    ((1, 2), 9, 12, 4, 4, {"texts": 3, "mask": AttentionMask(FULL, "distance", 3)}, 1),
)
for _lead, _rows, _context, _key_width, _width, _extra, _groups in _ATTENTION_CASES:
    _caches = ((_lead[0], _groups, _context, _key_width), (_lead[0], _groups, _context, _width))
    _shapes = ((*_lead, _rows, _key_width), *_caches, (_rows,), (_rows,))
    cases(cached_attention, Case(_shapes, {"scale": 0.4, **_extra}, values=_places(_rows, _context)))
