"""Replacing composite ops by simpler ones where a device has no kernel for them."""

from __future__ import annotations

from collections.abc import Container, Sequence

from ttrain.core.errors import GraphError
from ttrain.graph.graph import Graph, Node, Value
from ttrain.graph.rewrite import rewrite


def decompose(graph: Graph, supported: Container[str], device: str) -> Graph:
    """Expand every op that is not in `supported`, repeatedly. Views need no kernel.

    Raises GraphError naming an op that can't be expanded.
    """

    def missing(node: Node) -> bool:
        return not node.op.view and node.op.name not in supported

    def replace(node: Node, inputs: tuple[Value | None, ...]) -> Sequence[Value] | None:
        if not missing(node):
            return None
        outputs = node.op.decompose(node, inputs)
        if outputs is None:
            raise GraphError(f"device {device} has no kernel for {node.op.name}, and the op has no decomposition.")
        return outputs

    while any(map(missing, graph.nodes)):
        graph = rewrite(graph, replace)
    return graph
