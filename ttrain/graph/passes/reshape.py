"""Reshapes that a device can't do for free become copies, so that the plan gives them a buffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ttrain.core.spec import TensorSpec
from ttrain.graph.graph import Graph, Node, Value, op
from ttrain.graph.rewrite import rewrite


def copy_reshapes(graph: Graph, shares: Callable[[TensorSpec, TensorSpec], bool]) -> Graph:
    """Replace every reshape on the device for which `shares(old spec, new spec)` is false."""

    def copies(node: Node) -> bool:
        return node.op.name == "reshape" and not node.on_host and not shares(node.values[0].spec, node.outputs[0].spec)

    def replace(node: Node, inputs: tuple[Value | None, ...]) -> Sequence[Value] | None:
        return [op("copy_reshape").record(*inputs, **node.attributes)] if copies(node) else None

    return rewrite(graph, replace) if any(map(copies, graph.nodes)) else graph
