"""Attention over keys and values that earlier steps have left in caches: what sampling runs on.

A cache is state [B, H, C, D], a row for each of C places. Where a query stands and how many keys it sees are tensors,
so one built step serves every place of a text and every mask whose visible keys come first.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ttrain.core.attention_mask import EVERY_KEY, FULL, HIDDEN, AttentionMask
from ttrain.core.spec import DType, TensorSpec
from ttrain.graph import Case, Value, cases, composite, primitive, require
from ttrain.ops.attention import softmax
from ttrain.ops.elementwise import free
from ttrain.ops.layout import reshape
from ttrain.ops.matmul import matmul


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


def _bias_in_torch(positions: Any, visible: Any, context: int, dtype: DType, heads: int, mask: AttentionMask) -> Any:
    query, key = positions.numpy()[:, None], np.arange(context)
    hidden = (key >= visible.numpy()[:, None]) | (key <= query - (mask.window or context))
    return positions.double().new_tensor(np.where(hidden, HIDDEN, mask.preference(heads, query, key)))[None]


@primitive("positions int64 [N], visible int64 [N]", outputs=("bias",), reference=_bias_in_torch)
def cache_bias(
    positions: Value, visible: Value, context: int, dtype: DType, heads: int, mask: AttentionMask
) -> TensorSpec:
    """The bias that is added to the scores of N queries for C keys, [1, 1 or H, N, C] in `dtype`.

    Key j is hidden from query i where j >= visible[i], or with a window of the mask where j <= positions[i] - window.
    The others get, with a position bias, -slope * distance in each of `heads` heads (ALiBi, Press et al., 2022):
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
) -> Value:
    """y = softmax(scale * q keys^T + bias) values per head, over the keys that each query sees; bias as in cache_bias.

    q [B, H, N, K], keys [B, G, C, K], values [B, G, C, D], positions and visible int64 [N] -> y [B, H, N, D]. Head h
    reads keys and values of head h * G // H. Query i stands at positions[i] and sees the keys below visible[i], with a
    window only those nearer than that; of which there has to be one.
    """
    _check_cache("cached_attention", keys.spec, q.spec)
    batch, groups, context, _ = keys.shape
    together = q.shape[1] // groups * q.shape[2]  # the queries that share keys, one after another
    scores = scale * matmul(reshape(q, (batch, groups, together, q.shape[3])), keys, transpose_b=True)
    bias = cache_bias(positions, visible, context, q.spec.dtype, q.shape[1], mask)
    probabilities = softmax(reshape(scores, (*q.shape[:3], context)) + bias)
    return reshape(matmul(reshape(probabilities, scores.shape), values), (*q.shape[:3], values.shape[3]))


# batch and heads, rows, context, widths of keys and values, further attributes, heads of keys
_ATTENTION_CASES: tuple[tuple[tuple[int, int], int, int, int, int, dict[str, Any], int], ...] = (
    ((1, 2), 1, 9, 4, 4, {}, 2),
    ((1, 3), 4, 33, 6, 5, {"mask": AttentionMask(FULL, "future")}, 3),
    ((2, 2), 3, 8, 4, 4, {"mask": AttentionMask(FULL, "distance")}, 2),
    ((1, 1), 5, 5, 8, 8, {}, 1),
    ((2, 4), 3, 8, 4, 6, {"mask": AttentionMask(FULL, window=3)}, 2),
)
for _lead, _rows, _context, _key_width, _width, _extra, _groups in _ATTENTION_CASES:
    _caches = ((_lead[0], _groups, _context, _key_width), (_lead[0], _groups, _context, _width))
    _shapes = ((*_lead, _rows, _key_width), *_caches, (_rows,), (_rows,))
    cases(cached_attention, Case(_shapes, {"scale": 0.4, **_extra}, values=_places(_rows, _context)))
