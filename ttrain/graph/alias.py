"""Aliases: values that share a buffer, as views do, and states with their later versions."""

from __future__ import annotations

from ttrain.graph.graph import Graph, Node, Value


def roots_of(graph: Graph) -> dict[Value, Value]:
    """For every value of a graph the one whose buffer it shares, through views and in-place updates; else itself."""
    roots = {value: value for value in (*graph.inputs.values(), *graph.state.values())}
    for node in graph.nodes:
        aliases = node.op.aliases(node)
        for index, output in enumerate(node.outputs):
            source = node.inputs[aliases[index]] if index in aliases else None
            roots[output] = output if source is None else roots.get(source, source)
    return roots


def overwritten(node: Node) -> list[Value]:
    """The inputs whose buffers a node overwrites."""
    if node.op.view:
        return []
    return [value for index in node.op.aliases(node).values() if (value := node.inputs[index]) is not None]
