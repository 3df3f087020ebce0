"""Reductions: sums over axes, and the global norm over all gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ttrain.core.spec import DType, TensorSpec
from ttrain.graph.graph import Node, RecordSide, Value
from ttrain.graph.op import Case, Op, declare, op
from ttrain.ops.layout import expand, reshape


@declare
class ReduceSum(Op):
    """y = the sum of x over `axes`, accumulated in fp32 at least. The axes disappear."""

    name = "reduce_sum"
    family = "reduce"
    inputs = ("x",)

    def infer(self, x: TensorSpec, axes: tuple[int, ...]) -> TensorSpec:
        self.require(
            all(0 <= axis < x.rank for axis in axes) and len(set(axes)) == len(axes),
            f"axes {axes} of {x}",
            f"different axes from 0 to {x.rank - 1}",
        )
        return x.with_shape(*(size for axis, size in enumerate(x.shape) if axis not in axes))

    def flops(self, node: Node) -> int:
        return node.input("x").spec.size

    def vjp(self, node: Node, *gradients: Value | None) -> Sequence[Value | None]:
        (dy,) = gradients
        assert dy is not None
        x, axes = node.input("x"), node.attributes["axes"]
        kept = tuple(1 if axis in axes else size for axis, size in enumerate(x.shape))
        return [expand(reshape(dy, kept), x.shape)]

    def reference(self, x: Any, axes: tuple[int, ...]) -> Any:
        return x.sum(axes) if axes else x

    def cases(self) -> Sequence[Case]:
        return [
            Case(((4, 8),), {"axes": (0,)}),
            Case(((4, 8),), {"axes": (1,)}),
            Case(((2, 3, 33),), {"axes": (0, 1)}),
            Case(((2, 3, 33),), {"axes": (0, 1, 2)}),
            Case(((257, 3),), {"axes": (0,)}),
        ]


@declare
class GlobalNorm(Op):
    """y = the L2 norm over all elements of all inputs, in fp32: what gradient clipping compares with its limit."""

    name = "global_norm"
    family = "reduce"
    inputs = ("tensors*",)
    differentiable = False

    def infer(self, *tensors: TensorSpec) -> TensorSpec:
        self.require(len(tensors) > 0, "no tensors", "at least one")
        return TensorSpec((), DType.FP64 if any(spec.dtype is DType.FP64 for spec in tensors) else DType.FP32)

    def flops(self, node: Node) -> int:
        return 2 * sum(value.spec.size for value in node.values)

    def by_side(
        self, inputs: Sequence[Value | None], attributes: Mapping[str, Any], record: RecordSide
    ) -> Sequence[Value]:
        """The norm of the norms of both sides, on the host."""
        sides = [[value for value in inputs if value is not None and value.on_host is side] for side in (True, False)]
        parts = [record(tensors, attributes, side)[0] for tensors, side in zip(sides, (True, False), strict=True)]
        return record(parts, attributes, True)

    def reference(self, *tensors: Any) -> Any:
        return sum((tensor.double() ** 2).sum() for tensor in tensors).sqrt()

    def cases(self) -> Sequence[Case]:
        return [Case(((4, 8), (257,), (2, 3, 33))), Case(((5,),)), Case(((), (3, 1)))]


def reduce_sum(x: Value, axes: Sequence[int]) -> Value:
    """The sum of x over `axes`, which disappear."""
    return op("reduce_sum").record(x, axes=tuple(sorted(axes))) if len(axes) else x


def mean(x: Value, axis: int | None = None) -> Value:
    """The mean over an axis, which stays with size one; of all elements, a scalar, where none is named."""
    if axis is None:
        return reduce_sum(x, range(x.spec.rank)) * (1 / max(x.spec.size, 1))
    axis %= x.spec.rank
    kept = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
    return reshape(reduce_sum(x, [axis]), kept) * (1 / max(x.shape[axis], 1))


def global_norm(tensors: Sequence[Value]) -> Value:
    """The L2 norm over all elements of all tensors, a fp32 scalar."""
    return op("global_norm").record(*tensors)
