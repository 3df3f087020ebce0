"""Attention over keys and values that earlier steps have left in caches: what sampling runs on.

A cache is state [B, H, C, D], a row for each of C places. Where a query stands and how many keys it sees are tensors,
so one built step serves every place of a text and every mask whose visible keys come first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ttrain.core.attention_mask import HIDDEN, POSITION_BIASES, alibi_slopes
from ttrain.core.spec import DType, TensorSpec
from ttrain.graph.case import Case
from ttrain.graph.composite import cases, composite
from ttrain.graph.graph import Node, Op, Value
from ttrain.graph.op import declare, op
from ttrain.ops.matmul import matmul
from ttrain.ops.softmax import softmax


def _check_places(owner: Op, positions: TensorSpec, count: int) -> None:
    wanted = TensorSpec((count,), DType.INT64)
    owner.require(positions == wanted, str(positions), f"{wanted}, one for each new row")


def _check_bias(owner: Op, position_bias: str) -> None:
    owner.require(position_bias in POSITION_BIASES, position_bias, f"one of {', '.join(POSITION_BIASES)}")


def _check_cache(owner: Op, cache: TensorSpec, rows: TensorSpec) -> None:
    owner.require(cache.rank == 4, str(cache), "a cache [batch, heads, context, width]")
    fits = rows.rank == 4 and rows.shape[:2] == cache.shape[:2] and rows.shape[2] <= cache.shape[2]
    owner.require(fits, f"{rows} and {cache}", "rows of the cache's batch and heads, at most as many as it has places")
    owner.require(rows.dtype is cache.dtype, f"{rows} and {cache}", "equal dtypes")


@declare
class CacheWrite(Op):
    """cache[b, h, positions[i], :] <- rows[b, h, i, :]: rows [B, H, N, D], cache [B, H, C, D], positions int64 [N].

    No position may occur twice.
    """

    name = "cache_write"
    family = "cache"
    inputs = ("cache", "rows", "positions")
    outputs = ("new_cache",)
    mutates = {"new_cache": "cache"}
    differentiable = False

    def infer(self, cache: TensorSpec, rows: TensorSpec, positions: TensorSpec) -> TensorSpec:
        _check_cache(self, cache, rows)
        self.require(rows.shape[3] == cache.shape[3], f"{rows} and {cache}", "equally wide rows")
        _check_places(self, positions, rows.shape[2])
        return cache

    def flops(self, node: Node) -> int:
        return 0

    def nbytes(self, node: Node) -> int:
        return 2 * node.input("rows").spec.nbytes

    def reference(self, cache: Any, rows: Any, positions: Any) -> Any:
        return cache.index_copy(2, positions, rows)

    def cases(self) -> Sequence[Case]:
        shapes = (((1, 2, 7, 4), 3), ((2, 3, 33, 5), 1), ((1, 1, 4, 8), 4))
        return [
            Case((cache, (*cache[:2], rows, cache[3]), (rows,)), integers={"positions": cache[2]})
            for cache, rows in shapes
        ]

    def derived(self, given: Mapping[str, Any], attributes: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"positions": _example_positions(given["rows"].shape[2], given["cache"].shape[2])}


@declare
class CacheBias(Op):
    """What is added to the scores of N queries for C keys, [1, 1 or H, N, C] in `dtype`.

    Key j is hidden from query i where j >= visible[i]. With a position bias, the others get -slope * distance in each
    of `heads` heads (ALiBi, Press et al., 2022): |j - positions[i]|, or for `future` max(0, j - positions[i]).
    """

    name = "cache_bias"
    family = "cache"
    inputs = ("positions", "visible")
    outputs = ("bias",)
    differentiable = False

    def infer(
        self,
        positions: TensorSpec,
        visible: TensorSpec,
        context: int,
        dtype: DType,
        position_bias: str = "none",
        heads: int = 1,
    ) -> TensorSpec:
        self.require(positions.rank == 1, str(positions), "one place for each query")
        for given in (positions, visible):
            _check_places(self, given, positions.shape[0])
        _check_bias(self, position_bias)
        return TensorSpec((1, 1 if position_bias == "none" else heads, positions.shape[0], context), dtype)

    def reference(
        self,
        positions: Any,
        visible: Any,
        context: int,
        dtype: DType,
        position_bias: str = "none",
        heads: int = 1,
    ) -> Any:
        import torch

        keys = torch.arange(context)
        ahead = (keys - positions[:, None]).double()
        distance = ahead.clamp(min=0) if position_bias == "future" else ahead.abs()
        slopes = torch.zeros(1) if position_bias == "none" else torch.from_numpy(alibi_slopes(heads))
        bias = -slopes.double()[:, None, None] * distance
        return torch.where(keys >= visible[:, None], HIDDEN, bias)[None]

    def cases(self) -> Sequence[Case]:
        settings: list[dict[str, Any]] = [
            {"context": 7},
            {"context": 33, "position_bias": "future", "heads": 3},
            {"context": 5, "position_bias": "distance", "heads": 1},
        ]
        cases = []
        for rows, attributes in zip((3, 1, 5), settings, strict=True):
            bounds = {"positions": attributes["context"], "visible": attributes["context"] + 1}
            cases.append(Case(((rows,), (rows,)), {"dtype": DType.FP32, **attributes}, bounds))
        return cases

    def derived(self, given: Mapping[str, Any], attributes: Mapping[str, Any]) -> Mapping[str, Any]:
        return _example_places(given["positions"].shape[0], attributes["context"])


def _middle_places(given: Mapping[str, Any], attributes: Mapping[str, Any]) -> Mapping[str, Any]:
    return _example_places(given["q"].shape[2], given["keys"].shape[2])


@composite(differentiable=False, derived=_middle_places)
def cached_attention(
    q: Value, keys: Value, values: Value, positions: Value, visible: Value, scale: float, position_bias: str = "none"
) -> Value:
    """y = softmax(scale * q keys^T + bias) values per head, over the keys that each query sees; bias as in cache_bias.

    q [B, H, N, K], keys [B, H, C, K], values [B, H, C, D], positions and visible int64 [N] -> y [B, H, N, D]. Query i
    stands at positions[i] and sees the keys below visible[i], of which there has to be one.
    """
    owner = op("cached_attention")
    _check_cache(owner, keys.spec, q.spec)
    owner.require(q.shape[3] == keys.shape[3], f"{q.spec} and {keys.spec}", "equally wide queries and keys")
    owner.require(values.shape[:3] == keys.shape[:3], f"{values.spec} and {keys.spec}", "a value for each key")
    _check_bias(owner, position_bias)
    for given in (positions, visible):
        _check_places(owner, given.spec, q.shape[2])
    scores = scale * matmul(q, keys, transpose_b=True)
    rule: dict[str, Any] = {"position_bias": position_bias, "heads": q.shape[1], "context": keys.shape[2]}
    bias = op("cache_bias").record(positions, visible, dtype=q.spec.dtype, **rule)
    return matmul(softmax(scores + bias), values)


_ATTENTION_CASES: tuple[tuple[tuple[int, int], int, int, int, int, dict[str, Any]], ...] = (
    ((1, 2), 1, 9, 4, 4, {}),
    ((1, 3), 4, 33, 6, 5, {"position_bias": "future"}),
    ((2, 2), 3, 8, 4, 4, {"position_bias": "distance"}),
    ((1, 1), 5, 5, 8, 8, {}),
)
for _lead, _rows, _context, _key_width, _width, _extra in _ATTENTION_CASES:
    _tensors = ((*_lead, _rows, _key_width), (*_lead, _context, _key_width), (*_lead, _context, _width))
    _bounds = {"positions": _context, "visible": _context + 1}
    cases(cached_attention, Case((*_tensors, (_rows,), (_rows,)), {"scale": 0.4, **_extra}, _bounds))


def _example_positions(rows: int, context: int) -> Any:
    import torch

    return torch.arange(rows) + (context - rows) // 2


def _example_places(rows: int, context: int) -> dict[str, Any]:
    """Places in the middle; a query sees the pair of places that its own belongs to, and what is before."""
    positions = _example_positions(rows, context)
    return {"positions": positions, "visible": (positions // 2 * 2 + 2).clamp(max=context)}


def cache_write(cache: Value, rows: Value, positions: Value) -> Value:
    """The cache [B, H, C, D] after rows [B, H, N, D] were written at positions int64 [N]."""
    return op("cache_write").record(cache, rows, positions)
