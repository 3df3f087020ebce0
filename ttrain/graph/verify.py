"""Checks a graph at the border between two stages, so that a broken pass is caught where it happened."""

from __future__ import annotations

from ttrain.core.errors import GraphError
from ttrain.graph.graph import Graph, Node, Value


def verify(graph: Graph, stage: str) -> Graph:
    """Raise GraphError naming the first node that breaks a rule; return the graph.

    Rules: every input was made before it is read; every output has the spec that the op infers; a value whose buffer
    was overwritten is not read afterwards; only state is overwritten.
    """
    made: set[Value] = {*graph.inputs.values(), *graph.state.values()}
    overwritten: dict[Value, Node] = {}
    for node in graph.nodes:
        for value in node.values:
            if value not in made:
                raise GraphError(f"after {stage}: {node!r} reads {value!r}, which no earlier node makes.")
            if value in overwritten:
                raise GraphError(f"after {stage}: {node!r} reads {value!r}, overwritten by {overwritten[value]!r}.")
        specs = node.op.infer_outputs([None if v is None else v.spec for v in node.inputs], node.attributes)
        if specs != [output.spec for output in node.outputs]:
            raise GraphError(f"after {stage}: {node!r} has outputs that its op does not infer: {specs}.")
        if not node.op.view:
            for index in node.op.aliases(node).values():
                value = node.inputs[index]
                assert value is not None
                if not root_of(value).kind.is_state:
                    raise GraphError(f"after {stage}: {node!r} overwrites {value!r}, which is not state.")
                overwritten[value] = node
        made.update(node.outputs)
    for name, value in graph.outputs.items():
        if value not in made:
            raise GraphError(f"after {stage}: output {name!r} is made by no node.")
    return graph


def root_of(value: Value) -> Value:
    """The value whose buffer this one shares, through views and in-place updates."""
    while value.producer is not None:
        index = value.producer.op.aliases(value.producer).get(value.index)
        if index is None:
            return value
        source = value.producer.inputs[index]
        assert source is not None
        value = source
    return value
