"""Ops that move elements without computing: reshape, expand, transpose, heads, rows by number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ttrain.core.spec import TensorSpec
from ttrain.graph.graph import Node, Value
from ttrain.graph.op import Case, Op, declare, op
from ttrain.ops.common import sum_to


class _Move(Op):
    family = "layout"
    inputs = ("x",)

    def flops(self, node: Node) -> int:
        return 0


@declare
class Reshape(_Move):
    """The same elements in row-major order under another shape; costs nothing."""

    name = "reshape"
    view = True
    cheap = True

    def infer(self, x: TensorSpec, shape: tuple[int, ...]) -> TensorSpec:
        self.require(math.prod(shape) == x.size, f"{x} to {list(shape)}", f"a shape of {x.size} elements")
        return x.with_shape(*shape)

    def vjp(self, node: Node, *gradients: Value | None) -> Sequence[Value | None]:
        (dy,) = gradients
        assert dy is not None
        return [reshape(dy, node.input("x").shape)]

    def reference(self, x: Any, shape: tuple[int, ...]) -> Any:
        return x.reshape(shape)

    def cases(self) -> Sequence[Case]:
        return [
            Case(((2, 3, 4),), {"shape": (6, 4)}),
            Case(((6,),), {"shape": (2, 3, 1)}),
            Case(((),), {"shape": (1,)}),
        ]


@declare
class CopyReshape(_Move):
    """Reshape with a copy: on a device that pads tensors to tiles, where the new shape pads otherwise."""

    name = "copy_reshape"
    differentiable = False

    def infer(self, x: TensorSpec, shape: tuple[int, ...]) -> TensorSpec:
        self.require(math.prod(shape) == x.size, f"{x} to {list(shape)}", f"a shape of {x.size} elements")
        return x.with_shape(*shape)

    def reference(self, x: Any, shape: tuple[int, ...]) -> Any:
        return x.reshape(shape)

    def decompose(self, node: Node, inputs: tuple[Value | None, ...]) -> Sequence[Value]:
        x = inputs[0]
        assert x is not None
        return [op("reshape").record(x, shape=node.attributes["shape"])]

    def cases(self) -> Sequence[Case]:
        return [Case(((2, 3, 4),), {"shape": (6, 4)}), Case(((33, 5),), {"shape": (5, 33)})]


@declare
class Expand(_Move):
    """Axes of size one repeated to `shape`."""

    name = "expand"
    cheap = True

    def infer(self, x: TensorSpec, shape: tuple[int, ...]) -> TensorSpec:
        fits = len(shape) == x.rank and all(old in (1, new) for old, new in zip(x.shape, shape, strict=False))
        self.require(fits, f"{x} to {list(shape)}", "the same rank, growing only axes of size one")
        return x.with_shape(*shape)

    def vjp(self, node: Node, *gradients: Value | None) -> Sequence[Value | None]:
        (dy,) = gradients
        assert dy is not None
        return [sum_to(dy, node.input("x"))]

    def reference(self, x: Any, shape: tuple[int, ...]) -> Any:
        return x.expand(shape)

    def cases(self) -> Sequence[Case]:
        return [Case(((1, 4),), {"shape": (3, 4)}), Case(((2, 1, 1),), {"shape": (2, 3, 5)})]


@declare
class Transpose(_Move):
    """The last two axes swapped."""

    name = "transpose"

    def infer(self, x: TensorSpec) -> TensorSpec:
        self.require(x.rank >= 2, str(x), "rank 2 or more")
        return x.with_shape(*x.shape[:-2], x.shape[-1], x.shape[-2])

    def vjp(self, node: Node, *gradients: Value | None) -> Sequence[Value | None]:
        (dy,) = gradients
        assert dy is not None
        return [transpose(dy)]

    def reference(self, x: Any) -> Any:
        return x.transpose(-1, -2)

    def cases(self) -> Sequence[Case]:
        return [Case(((4, 8),)), Case(((2, 3, 33),))]


@declare
class SplitHeads(_Move):
    """[B, T, parts*H*D] -> `parts` tensors [B, H, T, D]: queries, keys and values from one projection."""

    name = "split_heads"
    outputs = ("parts*",)

    def infer(self, x: TensorSpec, parts: int, heads: int) -> list[TensorSpec]:
        self.require(x.rank == 3, str(x), "[batch, time, features]")
        width = x.shape[-1]
        self.require(width % (parts * heads) == 0, f"{width} features", f"a multiple of {parts} parts x {heads} heads")
        return [x.with_shape(x.shape[0], heads, x.shape[1], width // (parts * heads))] * parts

    def vjp(self, node: Node, *gradients: Value | None) -> Sequence[Value | None]:
        filled = [
            output.graph.apply("full", spec=output.spec, value=0.0) if gradient is None else gradient
            for gradient, output in zip(gradients, node.outputs, strict=True)
        ]
        return [merge_heads(filled)]

    def reference(self, x: Any, parts: int, heads: int) -> Any:
        batch, time, width = x.shape
        split = x.reshape(batch, time, parts, heads, width // (parts * heads))
        return tuple(split[:, :, part].transpose(1, 2) for part in range(parts))

    def cases(self) -> Sequence[Case]:
        return [
            Case(((2, 5, 24),), {"parts": 3, "heads": 2}),
            Case(((1, 4, 6),), {"parts": 1, "heads": 3}),
            Case(((2, 3, 9),), {"parts": 3, "heads": 1}),
        ]


@declare
class MergeHeads(_Move):
    """Several [B, H, T, D] -> [B, T, parts*H*D]: the inverse of split_heads."""

    name = "merge_heads"
    inputs = ("parts*",)

    def infer(self, *parts: TensorSpec) -> TensorSpec:
        first = parts[0]
        self.require(first.rank == 4, str(first), "[batch, heads, time, head width]")
        self.require(all(part == first for part in parts), ", ".join(map(str, parts)), "equal specs")
        batch, heads, time, width = first.shape
        return first.with_shape(batch, time, len(parts) * heads * width)

    def vjp(self, node: Node, *gradients: Value | None) -> Sequence[Value | None]:
        (dy,) = gradients
        assert dy is not None
        split = split_heads(dy, len(node.inputs), node.values[0].shape[1])
        return split

    def reference(self, *parts: Any) -> Any:
        import torch

        merged = torch.stack([part.transpose(1, 2) for part in parts], dim=2)
        return merged.reshape(*merged.shape[:2], -1)

    def cases(self) -> Sequence[Case]:
        return [Case(((2, 3, 5, 4),) * 3), Case(((1, 1, 4, 6),))]


@declare
class IndexSelect(_Move):
    """y[b, i] = x[b, indices[i]]: x [B, T, C] -> y [B, len(indices), C]; no index occurs twice."""

    name = "index_select"

    def infer(self, x: TensorSpec, indices: tuple[int, ...]) -> TensorSpec:
        self.require(x.rank == 3, str(x), "[batch, time, features]")
        inside = len(indices) == len(set(indices)) > 0 and min(indices) >= 0 and max(indices) < x.shape[1]
        self.require(inside, f"indices {indices}", f"different ones from 0 to {x.shape[1] - 1}")
        return x.with_shape(x.shape[0], len(indices), x.shape[2])

    def vjp(self, node: Node, *gradients: Value | None) -> Sequence[Value | None]:
        (dy,) = gradients
        assert dy is not None
        return [op("index_put").record(dy, indices=node.attributes["indices"], size=node.input("x").shape[1])]

    def reference(self, x: Any, indices: tuple[int, ...]) -> Any:
        return x[:, list(indices)]

    def cases(self) -> Sequence[Case]:
        return [Case(((2, 7, 4),), {"indices": (0, 3, 4)}), Case(((1, 33, 3),), {"indices": (32,)})]


@declare
class IndexPut(_Move):
    """y[b, indices[i]] = x[b, i], and zero elsewhere: x [B, len(indices), C] -> y [B, size, C]."""

    name = "index_put"

    def infer(self, x: TensorSpec, indices: tuple[int, ...], size: int) -> TensorSpec:
        self.require(x.rank == 3 and x.shape[1] == len(indices), str(x), f"[batch, {len(indices)}, features]")
        return x.with_shape(x.shape[0], size, x.shape[2])

    def vjp(self, node: Node, *gradients: Value | None) -> Sequence[Value | None]:
        (dy,) = gradients
        assert dy is not None
        return [op("index_select").record(dy, indices=node.attributes["indices"])]

    def reference(self, x: Any, indices: tuple[int, ...], size: int) -> Any:
        y = x.new_zeros(x.shape[0], size, x.shape[2])
        y[:, list(indices)] = x
        return y

    def cases(self) -> Sequence[Case]:
        return [
            Case(((2, 3, 4),), {"indices": (0, 3, 4), "size": 7}),
            Case(((1, 1, 3),), {"indices": (32,), "size": 33}),
        ]


def reshape(x: Value, shape: Sequence[int]) -> Value:
    """x under another shape of as many elements; x itself where the shape is the same."""
    return x if tuple(shape) == x.shape else op("reshape").record(x, shape=tuple(shape))


def expand(x: Value, shape: Sequence[int]) -> Value:
    """x with axes of size one repeated."""
    return x if tuple(shape) == x.shape else op("expand").record(x, shape=tuple(shape))


def transpose(x: Value) -> Value:
    """x with its last two axes swapped."""
    return op("transpose").record(x)


def split_heads(x: Value, parts: int, heads: int) -> tuple[Value, ...]:
    """[B, T, parts*H*D] -> parts x [B, H, T, D]."""
    split = op("split_heads").record(x, parts=parts, heads=heads)
    return split if isinstance(split, tuple) else (split,)


def merge_heads(parts: Sequence[Value]) -> Value:
    """Several [B, H, T, D] -> [B, T, parts*H*D]."""
    return op("merge_heads").record(*parts)


def index_select(x: Value, indices: Sequence[int]) -> Value:
    """Some rows of every sequence: x [B, T, C] -> [B, len(indices), C]; x itself where these are all rows in order."""
    indices = tuple(indices)
    return x if indices == tuple(range(x.shape[1])) else op("index_select").record(x, indices=indices)


def index_put(x: Value, indices: Sequence[int], size: int) -> Value:
    """Rows x [B, len(indices), C] at their places of zeros [B, size, C]."""
    return op("index_put").record(x, indices=tuple(indices), size=size)
