"""Passes that remove work: dead code, and the same computation done twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ttrain.graph.graph import Graph, Node, Value
from ttrain.graph.rewrite import Rewriter, copied


def live_nodes(graph: Graph) -> list[Node]:
    """Nodes that an output of the graph, a change of state or another rank depends on, in order."""
    live: set[Value] = set(graph.outputs.values())
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if node.op.joint or node.overwritten or any(output in live for output in node.outputs):
            live.update(node.values)
            kept.append(node)
    return kept[::-1]


def remove_dead_code(graph: Graph) -> Graph:
    """Drop nodes whose outputs reach neither an output of the graph nor a change of state."""
    return copied(graph, live_nodes(graph))


def merge_common_subexpressions(graph: Graph) -> Graph:
    """Let equal nodes on equal inputs share one computation.

    Copies that recomputation made on purpose stay apart from their originals.
    """
    seen: dict[Any, Sequence[Value]] = {}
    rewriter = Rewriter(graph)
    for node in graph.nodes:
        inputs = rewriter.inputs(node)
        attributes = tuple(sorted(node.attributes.items(), key=lambda item: item[0]))
        key = (node.op.name, inputs, attributes, node.copy, node.segment, node.on_host)
        if key in seen and not node.overwritten:
            rewriter.replace(node.outputs, seen[key])
        else:
            rewriter.copy(node)
            seen[key] = [rewriter.map[output] for output in node.outputs]
    return rewriter.finish()
