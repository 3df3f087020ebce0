"""Rotary positions (Su et al., 2021): queries and keys are turned by angles that grow with the place of their token."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

from ttrain.graph import Case, Node, Value, cases, composite, require
from ttrain.ops.elementwise import cast
from ttrain.ops.layout import index_put, index_select, merge_heads, reshape, split_heads


@composite(
    "x [B, T, F], cos accumulation [T, R] or [B, T, R], sin accumulation [T, R] or [B, T, R]", constants=("cos", "sin")
)
def rotary(x: Value, cos: Value, sin: Value, heads: int, inverse: bool = False) -> Value:
    """x [B, T, heads*D] with the first 2R features of each head turned, or turned back where `inverse`.

    cos and sin [T, R] or [B, T, R], fp32 at least, are those of the angles at each of the places. Feature i < R and
    feature R + i are a pair: (a, b) becomes (a cos - b sin, b cos + a sin). Features from 2R on stay as they are.
    """
    given = f"x {x.spec}, cos {cos.spec} and sin {sin.spec}"
    require(x.shape[2] % heads == 0 and cos.spec == sin.spec, "rotary", given, f"{heads} heads, and equal tables")
    require(2 * cos.shape[-1] <= x.shape[2] // heads, "rotary", given, "at most one pair for two features of a head")
    width, turned = x.shape[2] // heads, 2 * cos.shape[-1]
    if turned == width:
        return _turned(x, cos, sin, inverse)
    part = gcd(width, turned)
    parts, count = reshape(x, (x.spec.size // width, width // part, part)), turned // part
    front, rest = range(count), range(count, width // part)
    own = reshape(index_select(parts, front), (*x.shape[:2], heads * turned))
    own = reshape(_turned(own, cos, sin, inverse), (parts.shape[0], count, part))
    whole = index_put(own, front, width // part) + index_put(index_select(parts, rest), rest, width // part)
    return reshape(whole, x.shape)


@rotary.gradient
def _(node: Node, dy: Value) -> Sequence[Value | None]:
    _, cos, sin = node.values
    return [rotary(dy, cos, sin, node.attributes["heads"], not node.attributes["inverse"]), None, None]


def _turned(x: Value, cos: Value, sin: Value, inverse: bool) -> Value:
    """All features of x [B, T, n*2R]."""
    (*places, pairs), time, wide = cos.shape, x.shape[1], cos.spec.dtype
    rows = x.spec.size // (2 * pairs)
    by_place = (x.shape[0], time, rows // (x.shape[0] * time), pairs)
    halves = split_heads(reshape(x, (1, rows, 2 * pairs)), 2, 1)  # [1, 1, rows, R]
    a, b = (cast(reshape(half, by_place), wide) for half in halves)
    c, s = (reshape(table, (*places, 1, pairs)) for table in (cos, sin))
    turned = (a * c + b * s, b * c - a * s) if inverse else (a * c - b * s, b * c + a * s)
    narrow = [reshape(cast(half, x.spec.dtype), halves[0].shape) for half in turned]
    return reshape(merge_heads(narrow), x.shape)


for _x, _table, _heads in (
    ((2, 5, 24), (5, 4), 3),
    ((1, 33, 32), (33, 16), 1),
    ((2, 3, 40), (3, 4), 2),
    ((1, 4, 14), (4, 3), 1),
    ((2, 5, 16), (2, 5, 4), 2),
):
    for _inverse in (False, True):
        cases(rotary, Case((_x, _table, _table), {"heads": _heads, "inverse": _inverse}))
