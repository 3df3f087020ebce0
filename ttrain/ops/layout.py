"""Ops that move elements without computing: reshape, expand, transpose, heads, rows by number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ttrain.core.spec import TensorSpec
from ttrain.graph import Case, Node, Value, cases, composite, primitive, require
from ttrain.ops.elementwise import free, sum_to


def reshape(x: Value, shape: Sequence[int]) -> Value:
    """x under another shape of as many elements; x itself where the shape is the same."""
    return x if tuple(shape) == x.shape else _reshape(x, shape)


@primitive(
    view=True,
    cheap=True,
    flops=free,
    reference=lambda x, shape: x.reshape(shape),
    vjp=lambda node, dy: [reshape(dy, node.input("x").shape)],
)
def _reshape(x: Value, shape: Sequence[int]) -> TensorSpec:
    """View the elements, in row-major order, under another shape. It costs nothing."""
    size = x.spec.size
    require(math.prod(shape) == size, "reshape", f"{x.spec} to {list(shape)}", f"a shape of {size} elements")
    return x.spec.with_shape(*shape)


@composite(flops=free, differentiable=False)
def copy_reshape(x: Value, shape: Sequence[int]) -> Value:
    """Reshape with a copy: on a device that pads tensors to tiles, where the new shape pads otherwise."""
    return _reshape(x, shape)


for _shape, _new in (((2, 3, 4), (6, 4)), ((6,), (2, 3, 1)), ((), (1,))):
    cases(_reshape, Case((_shape,), {"shape": _new}))
cases(copy_reshape, Case(((2, 3, 4),), {"shape": (6, 4)}), Case(((33, 5),), {"shape": (5, 33)}))


def expand(x: Value, shape: Sequence[int]) -> Value:
    """x with axes of size one repeated."""
    return x if tuple(shape) == x.shape else _expand(x, shape)


@primitive(
    cheap=True,
    flops=free,
    reference=lambda x, shape: x.expand(shape),
    vjp=lambda node, dy: [sum_to(dy, node.input("x"))],
)
def _expand(x: Value, shape: Sequence[int]) -> TensorSpec:
    """Axes of size one repeated to `shape`."""
    fits = len(shape) == x.spec.rank and all(old in (1, new) for old, new in zip(x.shape, shape, strict=False))
    require(fits, "expand", f"{x.spec} to {list(shape)}", "the same rank, growing only axes of size one")
    return x.spec.with_shape(*shape)


@primitive("x [..., M, N]", flops=free, reference=lambda x: x.mT, vjp=lambda node, dy: [node.op.record(dy)])
def transpose(x: Value) -> TensorSpec:
    """The last two axes swapped."""
    return x.spec.with_shape(*x.shape[:-2], x.shape[-1], x.shape[-2])


cases(transpose, Case(((4, 8),)), Case(((2, 3, 33),)))


def _split_in_torch(x: Any, parts: int, heads: int) -> Any:
    return x.unflatten(2, (parts, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


@primitive("x [B, T, F]", outputs=("parts*",), flops=free, reference=_split_in_torch)
def split_heads(x: Value, parts: int, heads: int) -> list[TensorSpec]:
    """[B, T, parts*H*D] -> `parts` tensors [B, H, T, D]: queries, keys and values from one projection."""
    batch, time, width = x.shape
    whole = width % (parts * heads) == 0
    require(whole, "split_heads", x.spec, f"features that are a multiple of {parts} parts x {heads} heads")
    return [x.spec.with_shape(batch, heads, time, width // (parts * heads))] * parts


@split_heads.gradient
def _(node: Node, *dparts: Value | None) -> Sequence[Value]:
    pairs = zip(dparts, node.outputs, strict=True)
    return [merge_heads([y.graph.apply("full", spec=y.spec, value=0.0) if dy is None else dy for dy, y in pairs])]


for _shape, _parts, _heads in (((2, 5, 24), 3, 2), ((1, 4, 6), 1, 3), ((2, 3, 9), 3, 1)):
    cases(split_heads, Case((_shape,), {"parts": _parts, "heads": _heads}))


def _merge_in_torch(*parts: Any) -> Any:
    import torch

    return torch.stack([part.transpose(1, 2) for part in parts], dim=2).flatten(2)


@primitive(
    "parts [B, H, T, D]",
    flops=free,
    reference=_merge_in_torch,
    vjp=lambda node, dy: split_heads(dy, len(node.inputs), node.values[0].shape[1]),
)
def merge_heads(parts: Sequence[Value]) -> TensorSpec:
    """Several [B, H, T, D] -> [B, T, parts*H*D]: the inverse of split_heads."""
    batch, heads, time, width = parts[0].shape
    return parts[0].spec.with_shape(batch, time, len(parts) * heads * width)


def index_select(x: Value, indices: Sequence[int]) -> Value:
    """Some rows of every sequence: x [B, T, C] -> [B, len(indices), C]; x itself where these are all rows in order."""
    return x if list(indices) == list(range(x.shape[1])) else _index_select(x, indices)


@primitive("x [B, T, C]", flops=free, reference=lambda x, indices: x[:, list(indices)])
def _index_select(x: Value, indices: Sequence[int]) -> TensorSpec:
    """y[b, i] = x[b, indices[i]]: x [B, T, C] -> y [B, len(indices), C]; no index occurs twice."""
    inside = len(indices) == len(set(indices)) > 0 and min(indices) >= 0 and max(indices) < x.shape[1]
    require(inside, "index_select", f"indices {indices}", f"different ones from 0 to {x.shape[1] - 1}")
    return x.spec.with_shape(x.shape[0], len(indices), x.shape[2])


@_index_select.gradient
def _(node: Node, dy: Value) -> Sequence[Value]:
    return [index_put(dy, node.attributes["indices"], node.input("x").shape[1])]


def _put_in_torch(x: Any, indices: tuple[int, ...], size: int) -> Any:
    y = x.new_zeros(x.shape[0], size, x.shape[2])
    y[:, list(indices)] = x
    return y


@primitive(
    "x [B, N, C]",
    flops=free,
    reference=_put_in_torch,
    vjp=lambda node, dy: [_index_select(dy, node.attributes["indices"])],
)
def index_put(x: Value, indices: Sequence[int], size: int) -> TensorSpec:
    """y[b, indices[i]] = x[b, i], and zero elsewhere: x [B, len(indices), C] -> y [B, size, C]."""
    require(x.shape[1] == len(indices), "index_put", x.spec, f"{len(indices)} rows, as there are indices")
    return x.spec.with_shape(x.shape[0], size, x.shape[2])


cases(_index_select, Case(((2, 7, 4),), {"indices": (0, 3, 4)}), Case(((1, 33, 3),), {"indices": (32,)}))
