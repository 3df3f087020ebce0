"""Replace ops that a device has no kernel for by simpler ones, and reshapes that move data by copies."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from ttrain.core.errors import GraphError
from ttrain.core.spec import TensorSpec
from ttrain.device.base import of_side, serves
from ttrain.graph.graph import Graph, Node, Value, op
from ttrain.graph.rewrite import rewrite

DEEPEST = 16  # ops within ops


def decompose(graph: Graph, supported: Container[str], device: str) -> Graph:
    """Expand every op that `supported` has no kernel for (see `serves`), repeatedly. Views need none.

    Raises GraphError naming an op that can't be expanded, or ops that expand into each other.
    """

    def missing(node: Node) -> bool:
        rows = of_side(supported, node.on_host)
        return not node.op.view and not serves(rows, node.op.name, node.specs[0], node.attributes)

    def replace(node: Node, inputs: tuple[Value | None, ...]) -> Sequence[Value]:
        outputs = node.op.decompose(node, inputs)
        if outputs is None:
            raise GraphError(f"device {device} has no kernel for {node.op.name}, and the op has no decomposition.")
        return outputs

    for _ in range(DEEPEST):
        left = {node.op.name for node in graph.nodes if missing(node)}
        if not left:
            return graph
        graph = rewrite(graph, missing, replace)
    raise GraphError(f"device {device}: the decompositions of {', '.join(sorted(left))} lead back to themselves.")


def copy_reshapes(graph: Graph, shares: Callable[[TensorSpec, TensorSpec], bool]) -> Graph:
    """Replace every reshape on the device for which `shares(old spec, new spec)` is false."""

    def copies(node: Node) -> bool:
        return node.op.name == "reshape" and not node.on_host and not shares(node.values[0].spec, node.outputs[0].spec)

    return rewrite(graph, copies, lambda node, inputs: [op("copy_reshape").record(*inputs, **node.attributes)])
