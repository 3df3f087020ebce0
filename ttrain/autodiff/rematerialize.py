"""Recompute cheap activations in backward, so that their memory is free in between."""

from __future__ import annotations

from ttrain.graph import Graph, Kind, Node, Stage, Value
from ttrain.graph.rewrite import Rewriter


def rematerialize(graph: Graph) -> Graph:
    """Drop forward values that backward reads, where one elementwise pass over kept values makes them again.

    Results are bit-equal: the same kernel runs on the same inputs, later.
    """
    plans, rewriter = _plans(graph), Rewriter(graph)
    for node in graph.nodes:
        if node.stage is Stage.BACKWARD:
            for value in (value for value in node.values if value in plans):
                rewriter.map[value] = rewriter.record(node, plans.pop(value), copy=1)[0]
        rewriter.copy(node)
    return rewriter.finish()


def _plans(graph: Graph) -> dict[Value, Node]:
    """Values worth making again, each with the node that does, as its first output."""
    kept, roots = set(graph.outputs.values()), graph.roots()
    later = {value for node in graph.nodes if node.stage is Stage.BACKWARD for value in node.values}
    # State that is overwritten before the update.
    changed = {roots[value] for node in graph.nodes if node.stage is not Stage.UPDATE for value in node.overwritten}
    found: dict[Value, Node] = {}

    def at_hand(value: Value) -> bool:
        """True if backward finds a value without keeping anything more."""
        root = roots[value]
        return value not in found and (root not in changed if root.kind is not Kind.NODE else value in later)

    for node in graph.nodes:
        again = node.op.rematerialized(node) if node.stage is Stage.FORWARD and not node.on_host else None
        if again is not None and all(map(at_hand, again.values)):
            output = again.outputs[0]
            if output not in kept and output in later and output.spec.rank >= 2:
                found[output] = again
    return found
