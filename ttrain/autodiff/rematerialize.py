"""Computing cheap activations again in backward, so that their memory is free in between."""

from __future__ import annotations

from ttrain.graph.alias import overwritten, roots_of
from ttrain.graph.graph import Graph, Node, Value
from ttrain.graph.kinds import Kind, Stage
from ttrain.graph.rewrite import Rewriter


def rematerialize(graph: Graph) -> Graph:
    """Drop forward values that backward reads, where one elementwise pass over kept values makes them again.

    Results are bit-equal: the same kernel runs on the same inputs, later.
    """
    choice = _Choice(graph)
    plans: dict[Value, Node] = {}  # a value -> the node that makes it again as its first output
    for node in graph.nodes:
        again = node.op.rematerialized(node) if node.stage is Stage.FORWARD and not node.on_host else None
        if again is None or not choice.worth(again.outputs[0]):
            continue
        if all(choice.at_hand(value) and value not in plans for value in again.values):
            plans[again.outputs[0]] = again
    return _insert(graph, plans) if plans else graph


class _Choice:
    """Which values are worth computing again, and from what."""

    def __init__(self, graph: Graph) -> None:
        self.kept = set(graph.outputs.values())
        self.roots = roots_of(graph)
        self.read_later: set[Value] = set()
        self.changed: set[Value] = set()  # state that is overwritten before the update
        for node in graph.nodes:
            if node.stage is Stage.BACKWARD:
                self.read_later.update(node.values)
            if node.stage is not Stage.UPDATE:
                self.changed.update(self.roots[value] for value in overwritten(node))

    def worth(self, output: Value) -> bool:
        return output not in self.kept and output in self.read_later and output.spec.rank >= 2

    def at_hand(self, value: Value) -> bool:
        """Whether backward finds a value without keeping anything more."""
        root = self.roots[value]
        return root not in self.changed if root.kind is not Kind.NODE else value in self.read_later


def _insert(graph: Graph, plans: dict[Value, Node]) -> Graph:
    rewriter = Rewriter(graph)
    for node in graph.nodes:
        if node.stage is Stage.BACKWARD:
            for value in (value for value in node.values if value in plans):
                rewriter.map[value] = rewriter.record(node, plans.pop(value), copy=1)[0]
        rewriter.copy(node)
    return rewriter.finish()
