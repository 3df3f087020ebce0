"""A graph as text: one line a node, in order, with stage, place in the model, shapes and attributes."""

from __future__ import annotations

from collections.abc import Iterable

from ttrain.graph.graph import Graph, Node
from ttrain.graph.kinds import Stage


def show(graph: Graph, stages: Iterable[Stage] = tuple(Stage)) -> str:
    """Every node of the given stages."""
    wanted = set(stages)
    nodes = [node for node in graph.nodes if node.stage in wanted]
    width = scope_width(nodes)
    lines = [f"input  {value!r}" for value in graph.inputs.values()]
    lines += [f"{value.kind.value:9} {value!r}" for value in graph.state.values()]
    lines += [show_node(node, width) for node in nodes]
    lines += [f"output {name} = {value.label}" for name, value in graph.outputs.items()]
    return "\n".join(lines)


def scope_width(nodes: Iterable[Node]) -> int:
    """Characters of the longest scope."""
    return max((len(node.scope) for node in nodes), default=0)


def show_node(node: Node, width: int = 0) -> str:
    """One node on one line, its scope padded to `width`."""
    again = f"  (copy {node.copy})" if node.copy else ""
    return f"{node.stage.value:8} {node.scope:{width}}  {node.text(lambda value: value.label)}{again}"
