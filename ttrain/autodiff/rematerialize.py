"""Computing cheap activations again in backward, so that their memory is free in between."""

from __future__ import annotations

from ttrain.graph.graph import Graph, Kind, Node, Stage, Value
from ttrain.graph.rewrite import Rewriter


def rematerialize(graph: Graph) -> Graph:
    """Drop forward values that backward reads, where one elementwise pass over kept values makes them again.

    Results are bit-equal: the same kernel runs on the same inputs, later.
    """
    read_later = {value for node in graph.nodes if node.stage is Stage.BACKWARD for value in node.values}
    plans: dict[Value, Node] = {}
    for node in graph.nodes:
        if node.stage is Stage.FORWARD and any(_worth(node, output, read_later) for output in node.outputs):
            source = node.op.rematerialized(node)
            if source is not None and all(_at_hand(value, read_later, plans) for value in source.values):
                plans.update((output, node) for output in node.outputs if _worth(node, output, read_later))
    return _insert(graph, plans) if plans else graph


def _worth(node: Node, output: Value, read_later: set[Value]) -> bool:
    return output in read_later and output in node.op.rematerialized_outputs(node) and output.spec.rank >= 2


def _at_hand(value: Value, read_later: set[Value], plans: dict[Value, Node]) -> bool:
    """Whether backward finds a value without keeping anything more."""
    if value.kind is not Kind.NODE:
        return True
    return value in read_later and value not in plans


def _insert(graph: Graph, plans: dict[Value, Node]) -> Graph:
    rewriter = Rewriter(graph)
    again: dict[Value, Value] = {}
    for node in graph.nodes:
        inputs = list(rewriter.inputs(node))
        if node.stage is Stage.BACKWARD:
            for position, value in enumerate(node.inputs):
                if value in plans and value is not None:
                    if value not in again:
                        again.update(_record_again(rewriter, plans[value], node))
                    inputs[position] = again[value]
        rewriter.copy(node, tuple(inputs))
    return rewriter.finish()


def _record_again(rewriter: Rewriter, original: Node, reader: Node) -> dict[Value, Value]:
    source = original.op.rematerialized(original)
    assert source is not None
    inputs = tuple(None if value is None else rewriter.map[value] for value in source.inputs)
    with rewriter.at(reader), rewriter.new.copying(1):
        copied = rewriter.new.append(source.op, inputs, source.attributes)
    return dict(zip(source.outputs, copied.outputs, strict=False))
