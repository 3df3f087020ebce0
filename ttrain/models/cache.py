"""Read texts that grow: the keys and values of the part that a model has read stay in caches."""

from __future__ import annotations

from ttrain import ops
from ttrain.core.attention_mask import CAUSAL, EVERY_KEY, PAIRS, AttentionMask
from ttrain.core.spec import DType, TensorSpec
from ttrain.graph import Graph, Kind, Value
from ttrain.ops.matmul import attention_scale

TOKENS, POSITIONS, VISIBLE, PLACES = "tokens", "positions", "visible", "places"


def cache_places(context: int, mask: str) -> int:
    """Rows of a cache: whole pairs where pairs see each other."""
    return context + context % 2 if mask == PAIRS else context


class Caches:
    """The caches of so many `texts`, one after another, as a step sees them that reads `count` tokens of any of them.

    Declares the step inputs tokens int64 [1, count], positions int64 [count] in their texts, and visible int64 [count]:
    a token attends to the places of its text below. With several texts also places int64 [count], where a token's keys
    and values go: text * places of a text + position; `visible` is then counted in the same way. The caches of a `mask`
    are its own: what a layer sees differs.
    """

    def __init__(self, graph: Graph, count: int, context: int, mask: str = CAUSAL, texts: int = 1) -> None:
        self._graph, self._places, self._mask, self._texts = graph, cache_places(context, mask), mask, texts
        place, each, own = TensorSpec((count,), DType.INT64), -(-count // texts), self._places
        at = [own - each + number % each for number in range(count)]  # for example the last tokens of every text
        last = [number // each * own + position for number, position in enumerate(at)]
        self.tokens = graph.input(TOKENS, TensorSpec((1, count), DType.INT64))
        self.positions = graph.input(POSITIONS, place, at)
        self.places = self.positions if texts == 1 else graph.input(PLACES, place, last)
        self.visible = graph.input(VISIBLE, place, [each + 1 for each in last])

    def attend(
        self, path: str, q: Value, k: Value, v: Value, heads: tuple[int, int] | None, scale: float | None,
        mask: AttentionMask = EVERY_KEY,
    ) -> Value:  # fmt: skip
        """Attention of the layer at `path`: q [1, count, H * K] -> [1, count, H * D] with `heads` (H, G).

        k [1, count, G * K] and v [1, count, G * D] go into the layer's caches first. Without `heads` all three lie by
        heads, [1, H, count, K]. `scale` is 1/sqrt(K) where it is None; of the `mask` position bias and window count,
        see op cache_bias.
        """
        if heads is not None:
            q, k, v = (ops.split_heads(x, 1, count)[0] for x, count in ((q, heads[0]), (k, heads[1]), (v, heads[1])))
        keys = ops.cache_write(self._cache(path, "keys", k), k, self.places)
        values = ops.cache_write(self._cache(path, "values", v), v, self.places)
        factor = attention_scale(q.shape[-1]) if scale is None else scale
        mixed = ops.cached_attention(q, keys, values, self.places, self.visible, factor, mask, self._texts)
        return ops.merge_heads([mixed])

    def _cache(self, path: str, part: str, rows: Value) -> Value:
        batch, heads, _, width = rows.shape
        spec = rows.spec.with_shape(batch, heads, self._texts * self._places, width)
        return self._graph.state_value(f"{path}/{self._mask}_{part}", spec, Kind.CACHE)
