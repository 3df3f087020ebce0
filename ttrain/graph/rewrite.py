"""Copy a graph while changing it. Every pass is built on this."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from ttrain.core.errors import GraphError
from ttrain.graph.graph import Graph, Node, Value

# Records the replacement of one node on the new graph and returns its outputs, of which trailing ones may be left out
# where nothing reads them.
Replace = Callable[[Node, tuple[Value | None, ...]], Sequence[Value]]


_INHERITED = ("scope", "stage", "segment", "copy", "on_host")


class Rewriter:
    """A new graph that grows from an old one, with the map from old values to new."""

    def __init__(self, old: Graph) -> None:
        self.old, self.new = old, Graph()
        self.map: dict[Value | None, Value] = {}
        for name, value in old.inputs.items():
            self.map[value] = self.new.input(name, value.spec, value.example)
        for name, value in old.state.items():
            self.map[value] = self.new.state_value(name, value.spec, value.kind)
            self.map[value].on_host = value.on_host

    def inputs(self, node: Node) -> tuple[Value | None, ...]:
        """A node's inputs on the new graph."""
        return tuple(map(self.map.get, node.inputs))

    def at(self, node: Node) -> AbstractContextManager[None]:
        """Context in which recorded nodes inherit this node's scope, stage, segment, copy number and side."""
        return self.new.within(**{mark: getattr(node, mark) for mark in _INHERITED})

    def record(self, place: Node, node: Node, **marks: Any) -> tuple[Value, ...]:
        """Record a node of old values where `place` was, with these marks; returns the outputs.

        Raises GraphError where an input was left out by a replacement.
        """
        inputs = self.inputs(node)
        for old, new in zip(node.inputs, inputs, strict=True):
            if old is not None and new is None:
                raise GraphError(f"{node!r} reads {old!r}, which the replacement of {old.producer!r} left out.")
        with self.at(place), self.new.within(**marks):
            return self.new.append(node.op, inputs, node.attributes).outputs

    def copy(self, node: Node) -> None:
        """Record the same node on the new graph."""
        self.map.update(zip(node.outputs, self.record(node, node), strict=True))

    def replace(self, values: Sequence[Value], replacements: Sequence[Value]) -> None:
        """Let values of the new graph stand for old ones. Raises GraphError where a spec differs."""
        for old, new in zip(values, replacements, strict=False):
            if old.spec != new.spec:
                raise GraphError(f"{old.producer!r} was replaced by {new!r}; the specs must be equal.")
            self.map[old] = new

    def finish(self) -> Graph:
        for name, value in self.old.outputs.items():
            self.new.output(name, self.map[value])
        return self.new


def rewrite(graph: Graph, chosen: Callable[[Node], bool], replace: Replace) -> Graph:
    """Copy a graph node by node, letting `replace` record something else in the place of those that are chosen."""
    rewriter = Rewriter(graph)
    for node in graph.nodes:
        if chosen(node):
            with rewriter.at(node):
                rewriter.replace(node.outputs, replace(node, rewriter.inputs(node)))
        else:
            rewriter.copy(node)
    return rewriter.finish()


def copied(graph: Graph, nodes: Iterable[Node]) -> Graph:
    """The graph with these of its nodes, in this order."""
    rewriter = Rewriter(graph)
    for node in nodes:
        rewriter.copy(node)
    return rewriter.finish()


def uses(graph: Graph) -> dict[Value, list[Node]]:
    """Nodes that read each value, in order."""
    readers: dict[Value, list[Node]] = {}
    for node in graph.nodes:
        for value in node.values:
            readers.setdefault(value, []).append(node)
    return readers
