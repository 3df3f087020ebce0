"""Gather weights shortly before they are read, and again for readers that are far apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ttrain.graph.graph import Graph, Node, Value, op
from ttrain.graph.rewrite import Rewriter

_APART = 2  # other gathers that are read between two readers of one, so that it is freed meanwhile


class _Use(NamedTuple):
    """Readers of a gather that are near one another."""

    first: Node
    gather: Node


def gather_ahead(graph: Graph) -> Graph:
    """Replace every `all_gather` that a node reads by a start and an `exchange_done` for each group of its readers.

    A group waits right before its first reader. Its start comes where an earlier group waits, `ahead` of them before.
    So liveness frees weights between forward and backward, and all ranks start in one order.
    """
    uses, rewriter = list(_uses(graph)), Rewriter(graph)
    started: dict[int, tuple[Value, ...]] = {}

    def start(number: int, place: Node) -> None:
        if number < len(uses) and number not in started:
            gather = uses[number].gather
            with rewriter.new.within(stage=place.stage, scope=gather.scope):
                attributes = {**gather.attributes, "key": f"weights {number}"}
                started[number] = rewriter.new.append(gather.op, rewriter.inputs(gather), attributes).outputs

    waiting, read = 0, {use.gather for use in uses}
    for node in graph.nodes:
        while waiting < len(uses) and uses[waiting].first is node:
            gather, ahead = uses[waiting].gather, uses[waiting].gather.attributes["ahead"]
            for number in range(max(waiting + 1, ahead)):
                start(number, node)
            with rewriter.new.within(stage=node.stage, scope=gather.scope):
                given, facts = started[waiting], {"count": len(gather.outputs), "key": f"weights {waiting}"}
                rewriter.replace(gather.outputs, rewriter.new.append(op("exchange_done"), given, facts).outputs)
            start(waiting + ahead, node)
            waiting += 1
        if node not in read:
            rewriter.copy(node)
    return rewriter.finish()


def _uses(graph: Graph) -> Iterator[_Use]:
    """Yield the groups of readers in order."""
    latest: list[Node] = []  # the gathers in the order in which they were read last
    for node in graph.nodes:
        makers = dict.fromkeys(value.producer for value in node.values)
        for gather in (maker for maker in makers if maker is not None and maker.op.name == "all_gather"):
            if gather not in latest[-_APART:]:
                yield _Use(node, gather)
            latest = [*(each for each in latest if each is not gather), gather]
