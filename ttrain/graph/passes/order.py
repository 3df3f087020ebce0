"""The order of nodes: values that end up in state go there as soon as they are made."""

from __future__ import annotations

from ttrain.graph.alias import roots_of
from ttrain.graph.graph import Graph, Node, Value
from ttrain.graph.rewrite import Rewriter

_STORES = ("assign", "accumulate")


def store_early(graph: Graph) -> Graph:
    """Move each assignment and accumulation to right behind the node that makes its value, which is then free again.

    Otherwise the gradients of all parameters would be live at once. Only where nothing in between reads or overwrites
    the state; the results are bit-equal.
    """
    roots, times = roots_of(graph), {node: time for time, node in enumerate(graph.nodes)}
    touched: dict[Value, list[int]] = {}
    for node, time in times.items():
        for root in {roots[value] for value in node.values}:
            touched.setdefault(root, []).append(time)
    behind: dict[Node, list[Node]] = {}
    moved: set[Node] = set()
    for node in graph.nodes:
        maker = node.input("value").producer if node.op.name in _STORES else None
        if maker is None or maker in moved:
            continue
        if not any(times[maker] < time < times[node] for time in touched[roots[node.input("state")]]):
            behind.setdefault(maker, []).append(node)
            moved.add(node)
    rewriter = Rewriter(graph)
    for node in graph.nodes:
        for placed in [] if node in moved else [node, *behind.get(node, [])]:
            rewriter.copy(placed)
    return rewriter.finish()
