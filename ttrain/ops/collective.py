"""Sums over the chips that share a batch. On one chip they change nothing."""

from __future__ import annotations

from collections.abc import Sequence

from ttrain.core.spec import TensorSpec
from ttrain.graph.case import Case
from ttrain.graph.composite import cases, primitive, require
from ttrain.graph.graph import Value, op


@primitive(reference=lambda x: x)
def all_reduce(x: Value) -> TensorSpec:
    """y = the sum of x over all chips."""
    require(x.spec.dtype.is_floating, "all_reduce", x.spec, "a floating-point tensor")
    return x.spec


@primitive(
    outputs=("sums*",),
    wide=("tensors",),
    aliases=lambda node: {index: index for index in range(len(node.inputs))},
    reference=lambda *tensors: list(tensors),
)
def _all_reduce_state(tensors: Sequence[Value]) -> list[TensorSpec]:
    """tensors <- their sums over all chips, as a group: a device may send them in one piece."""
    return [tensor.spec for tensor in tensors]


cases(all_reduce, Case(((4, 8),)), Case(((),)))
cases(_all_reduce_state, Case(((4, 8), (257,))), Case(((3,),)))


def all_reduce_state(tensors: Sequence[Value]) -> list[Value]:
    """Overwrite state with its sums over all chips; returns the new values."""
    return list(op("all_reduce_state").record(*tensors))
