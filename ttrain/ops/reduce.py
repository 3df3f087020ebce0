"""Reductions: sums and maxima over axes, and the global norm over all gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce as fold
from typing import Any

from ttrain.core.spec import DType, TensorSpec
from ttrain.graph import Case, Node, RecordSide, Value, cases, composite, primitive, require
from ttrain.ops.elementwise import cast, greater, sqrt
from ttrain.ops.layout import expand, reshape


def _reduced(owner: str, x: TensorSpec, axes: Sequence[int]) -> TensorSpec:
    inside = all(0 <= axis < x.rank for axis in axes) and len(set(axes)) == len(axes)
    require(inside, owner, f"axes {axes} of {x}", f"different axes from 0 to {x.rank - 1}")
    return x.with_shape(*(size for axis, size in enumerate(x.shape) if axis not in axes))


def _kept(x: Value, axes: Sequence[int]) -> tuple[int, ...]:
    """The shape of x with the axes that disappear at size one."""
    return tuple(1 if axis in axes else size for axis, size in enumerate(x.shape))


def reduce_sum(x: Value, axes: Sequence[int]) -> Value:
    """The sum of x over `axes`, which disappear."""
    return _reduce_sum(x, sorted(axes)) if len(axes) else x


@primitive(
    flops=lambda node: node.input("x").spec.size,
    reference=lambda x, axes: x.sum(axes) if axes else x,
    vjp=lambda node, dy: [expand(reshape(dy, _kept(node.values[0], **node.attributes)), node.values[0].shape)],
)
def _reduce_sum(x: Value, axes: Sequence[int]) -> TensorSpec:
    """y = the sum of x over `axes`, accumulated in fp32 at least. The axes disappear."""
    return _reduced("reduce_sum", x.spec, axes)


def _max_gradient(node: Node, dy: Value) -> Sequence[Value]:
    x, axes = node.input("x"), node.attributes["axes"]
    kept = _kept(x, axes)
    largest = 1.0 - greater(reshape(node.outputs[0], kept), x)
    count = reshape(reduce_sum(largest, axes), kept)
    return [largest * (reshape(dy, kept) / count)]


@primitive(flops=lambda node: node.input("x").spec.size, reference=lambda x, axes: x.amax(axes), vjp=_max_gradient)
def _reduce_max(x: Value, axes: Sequence[int]) -> TensorSpec:
    """y = the largest element of x over `axes`, which disappear. Equal ones share the gradient."""
    return _reduced("reduce_max", x.spec, axes)


for _op in (_reduce_sum, _reduce_max):
    cases(_op, *(Case(((4, 8),), {"axes": axes}) for axes in ((0,), (1,))))
    cases(_op, *(Case(((2, 3, 33),), {"axes": axes}) for axes in ((0, 1), (0, 1, 2))))
    cases(_op, Case(((257, 3),), {"axes": (0,)}))


def _norm_by_side(inputs: Sequence[Value | None], attributes: Mapping[str, Any], record: RecordSide) -> Sequence[Value]:
    """The norm of the norms of both sides, on the host."""
    sides = [[value for value in inputs if value is not None and value.on_host is side] for side in (True, False)]
    parts = [record(tensors, attributes, side)[0] for tensors, side in zip(sides, (True, False), strict=True)]
    return record(parts, attributes, True)


@composite(by_side=_norm_by_side)
def global_norm(tensors: Sequence[Value]) -> Value:
    """y = the L2 norm over all elements of all inputs, in fp32: what gradient clipping compares with its limit."""
    require(len(tensors) > 0, "global_norm", "no tensors", "at least one")
    wide = DType.FP64 if any(tensor.spec.dtype is DType.FP64 for tensor in tensors) else DType.FP32
    widened = [cast(tensor, wide) for tensor in tensors]
    return sqrt(fold(lambda x, y: x + y, (reduce_sum(x * x, range(x.spec.rank)) for x in widened)))


cases(global_norm, Case(((4, 8), (257,), (2, 3, 33))), Case(((5,),)), Case(((), (3, 1))))


def amax(x: Value, axis: int) -> Value:
    """The largest element along an axis, which stays with size one."""
    axis %= x.spec.rank
    return reshape(_reduce_max(x, [axis]), _kept(x, [axis]))


def mean(x: Value, axis: int | None = None) -> Value:
    """The mean over an axis, which stays with size one; of all elements, a scalar, where none is named."""
    if axis is None:
        return reduce_sum(x, range(x.spec.rank)) * (1 / max(x.spec.size, 1))
    axis %= x.spec.rank
    return reshape(reduce_sum(x, [axis]), _kept(x, [axis])) * (1 / max(x.shape[axis], 1))
