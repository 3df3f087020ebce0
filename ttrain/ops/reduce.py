"""Reductions: sums and maxima over axes, and the global norm over all gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce as fold
from typing import Any

from ttrain.core.spec import DType, TensorSpec
from ttrain.graph.case import Case
from ttrain.graph.composite import cases, composite, require
from ttrain.graph.graph import Node, Op, RecordSide, Value
from ttrain.graph.op import declare, op
from ttrain.ops.elementwise import cast, greater, sqrt
from ttrain.ops.layout import expand, reshape


class _Reduce(Op):
    """Over `axes`, which disappear."""

    family = "reduce"
    inputs = ("x",)

    def infer(self, x: TensorSpec, axes: tuple[int, ...]) -> TensorSpec:
        inside = all(0 <= axis < x.rank for axis in axes) and len(set(axes)) == len(axes)
        self.require(inside, f"axes {axes} of {x}", f"different axes from 0 to {x.rank - 1}")
        return x.with_shape(*(size for axis, size in enumerate(x.shape) if axis not in axes))

    def flops(self, node: Node) -> int:
        return node.input("x").spec.size

    def cases(self) -> Sequence[Case]:
        return [
            Case(((4, 8),), {"axes": (0,)}),
            Case(((4, 8),), {"axes": (1,)}),
            Case(((2, 3, 33),), {"axes": (0, 1)}),
            Case(((2, 3, 33),), {"axes": (0, 1, 2)}),
            Case(((257, 3),), {"axes": (0,)}),
        ]


def _kept(node: Node) -> tuple[int, ...]:
    """The shape of x with the axes that disappear at size one."""
    axes = node.attributes["axes"]
    return tuple(1 if axis in axes else size for axis, size in enumerate(node.input("x").shape))


@declare
class ReduceSum(_Reduce):
    """y = the sum of x over `axes`, accumulated in fp32 at least. The axes disappear."""

    name = "reduce_sum"

    def vjp(self, node: Node, *gradients: Value | None) -> Sequence[Value | None]:
        (dy,) = gradients
        assert dy is not None
        return [expand(reshape(dy, _kept(node)), node.input("x").shape)]

    def reference(self, x: Any, axes: tuple[int, ...]) -> Any:
        return x.sum(axes) if axes else x


@declare
class ReduceMax(_Reduce):
    """y = the largest element of x over `axes`, which disappear. Equal ones share the gradient."""

    name = "reduce_max"

    def vjp(self, node: Node, *gradients: Value | None) -> Sequence[Value | None]:
        (dy,) = gradients
        assert dy is not None
        x, kept = node.input("x"), _kept(node)
        largest = 1.0 - greater(reshape(node.outputs[0], kept), x)
        count = reshape(reduce_sum(largest, node.attributes["axes"]), kept)
        return [largest * (reshape(dy, kept) / count)]

    def reference(self, x: Any, axes: tuple[int, ...]) -> Any:
        return x.amax(axes)


def _norm_by_side(inputs: Sequence[Value | None], attributes: Mapping[str, Any], record: RecordSide) -> Sequence[Value]:
    """The norm of the norms of both sides, on the host."""
    sides = [[value for value in inputs if value is not None and value.on_host is side] for side in (True, False)]
    parts = [record(tensors, attributes, side)[0] for tensors, side in zip(sides, (True, False), strict=True)]
    return record(parts, attributes, True)


@composite(name="global_norm", by_side=_norm_by_side)
def _global_norm(tensors: Sequence[Value]) -> Value:
    """y = the L2 norm over all elements of all inputs, in fp32: what gradient clipping compares with its limit."""
    require(len(tensors) > 0, "global_norm", "no tensors", "at least one")
    wide = DType.FP64 if any(tensor.spec.dtype is DType.FP64 for tensor in tensors) else DType.FP32
    widened = [cast(tensor, wide) for tensor in tensors]
    return sqrt(fold(lambda x, y: x + y, (reduce_sum(x * x, range(x.spec.rank)) for x in widened)))


cases(_global_norm, Case(((4, 8), (257,), (2, 3, 33))), Case(((5,),)), Case(((), (3, 1))))


def reduce_sum(x: Value, axes: Sequence[int]) -> Value:
    """The sum of x over `axes`, which disappear."""
    return op("reduce_sum").record(x, axes=tuple(sorted(axes))) if len(axes) else x


def amax(x: Value, axis: int) -> Value:
    """The largest element along an axis, which stays with size one."""
    axis %= x.spec.rank
    return reshape(op("reduce_max").record(x, axes=(axis,)), (*x.shape[:axis], 1, *x.shape[axis + 1 :]))


def mean(x: Value, axis: int | None = None) -> Value:
    """The mean over an axis, which stays with size one; of all elements, a scalar, where none is named."""
    if axis is None:
        return reduce_sum(x, range(x.spec.rank)) * (1 / max(x.spec.size, 1))
    axis %= x.spec.rank
    kept = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
    return reshape(reduce_sum(x, [axis]), kept) * (1 / max(x.shape[axis], 1))


def global_norm(tensors: Sequence[Value]) -> Value:
    """The L2 norm over all elements of all tensors, a fp32 scalar."""
    return _global_norm(tensors)
