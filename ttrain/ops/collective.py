"""Sums over the chips that share a batch. On one chip they change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ttrain.core.spec import TensorSpec
from ttrain.graph.graph import Node, Value
from ttrain.graph.op import Case, Op, declare, op


@declare
class AllReduce(Op):
    """y = the sum of x over all chips."""

    name = "all_reduce"
    family = "collective"
    inputs = ("x",)
    differentiable = False

    def infer(self, x: TensorSpec) -> TensorSpec:
        self.require(x.dtype.is_floating, str(x), "a floating-point tensor")
        return x

    def reference(self, x: Any) -> Any:
        return x

    def cases(self) -> Sequence[Case]:
        return [Case((shape,)) for shape in ((4, 8), ())]


@declare
class AllReduceState(Op):
    """tensors <- their sums over all chips, as a group: a device may send them in one piece."""

    name = "all_reduce_state"
    family = "collective"
    inputs = ("tensors*",)
    outputs = ("sums*",)
    wide = ("tensors",)
    differentiable = False

    def infer(self, *tensors: TensorSpec) -> Sequence[TensorSpec]:
        return tensors

    def aliases(self, node: Node) -> dict[int, int]:
        return {index: index for index in range(len(node.inputs))}

    def reference(self, *tensors: Any) -> Any:
        return list(tensors)

    def cases(self) -> Sequence[Case]:
        return [Case(((4, 8), (257,))), Case(((3,),))]


def all_reduce(x: Value) -> Value:
    """The sum of x over all chips."""
    return op("all_reduce").record(x)


def all_reduce_state(tensors: Sequence[Value]) -> list[Value]:
    """Overwrite state with its sums over all chips; returns the new values."""
    sums = op("all_reduce_state").record(*tensors)
    return list(sums) if isinstance(sums, tuple) else [sums]
