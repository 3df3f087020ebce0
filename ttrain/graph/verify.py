"""Checks a graph at the border between two stages, so that a broken pass is caught where it happened."""

from __future__ import annotations

from ttrain.core.errors import GraphError
from ttrain.graph.alias import overwritten, roots_of
from ttrain.graph.graph import Graph, Node, Value
from ttrain.graph.kinds import Kind


def verify(graph: Graph, stage: str) -> Graph:
    """Raise GraphError naming the first node that breaks a rule; return the graph.

    Rules: every input was made before it is read; every output has the spec that the op infers; a value whose buffer
    was overwritten is not read afterwards, be it through a view or as an output of the graph; only state is
    overwritten, no constant, and by one node not twice; only a transfer reads what lies on the other side.
    """
    checker = _Checker(graph, stage)
    for node in graph.nodes:
        checker.check(node)
    for name, value in graph.outputs.items():
        checker.check_read(value, f"output {name}")
    return graph


class _Checker:
    def __init__(self, graph: Graph, stage: str) -> None:
        self.stage, self.roots = stage, roots_of(graph)
        self.writer: dict[Value, Node] = {}  # root -> the node that overwrote its buffer last
        # Per value, that node at the time the value was made.
        self.version: dict[Value, Node | None] = dict.fromkeys((*graph.inputs.values(), *graph.state.values()))

    def check(self, node: Node) -> None:
        for value in node.values:
            self.check_read(value, node)
            if value.on_host is not node.on_host and not node.op.transfer:
                raise self.broken(f"{node!r} reads {value!r}, which lies on the other side.")
        given, made = node.specs
        if (specs := node.op.infer_outputs(given, node.attributes)) != made:
            raise self.broken(f"{node!r} has outputs that its op does not infer: {specs}.")
        for value in overwritten(node):
            root = self.roots[value]
            if not root.kind.is_state:
                raise self.broken(f"{node!r} overwrites {value!r}, which is not state.")
            if root.kind is Kind.CONSTANT:
                raise self.broken(f"{node!r} overwrites {root!r}, a derived buffer. Declare it with saved=True.")
            if self.writer.get(root) is node:
                raise self.broken(f"{node!r} overwrites {value!r} twice.")
            self.writer[root] = node
        for output in node.outputs:
            self.version[output] = self.writer.get(self.roots[output])

    def check_read(self, value: Value, reader: Node | str) -> None:
        if value not in self.version:
            raise self.broken(f"{reader} reads {value!r}, which no earlier node makes.")
        writer = self.writer.get(self.roots[value])
        if writer is not self.version[value]:
            raise self.broken(f"{reader} reads {value!r}, overwritten by {writer!r}.")

    def broken(self, message: str) -> GraphError:
        return GraphError(f"after {self.stage}: {message}")
