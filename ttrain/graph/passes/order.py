"""Order the nodes: a value that ends in state is stored as soon as it is made, and read soon after."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from graphlib import TopologicalSorter

from ttrain.graph.graph import Graph, Node, Stage, Value
from ttrain.graph.rewrite import copied

_STORES = ("assign", "accumulate", "all_reduce_start", "reduce_scatter_start")
_JOINT = ("all_reduce", "all_reduce_state", "all_gather_state", "collectives_done")  # in one order on all ranks


def store_early(graph: Graph) -> Graph:
    """Move each assignment and accumulation to right behind the node that makes its value.

    That value is then free again. Starts of exchanges, and what makes up an update, move behind the last of what they
    read.

    Otherwise the gradients of all parameters would be live at once. What a node overwrites is first read and
    overwritten by those before it; the results are bit-equal. Nodes that move to the same place keep their order.
    """
    roots, places, touched = graph.roots(), dict[Node, tuple[int, ...]](), dict[Value, tuple[int, ...]]()
    for time, node in enumerate(graph.nodes):
        places[node] = (time,)
        makers = [places[value.producer] for value in node.values if value.producer is not None]
        moves = node.op.name in _STORES or (node.stage is Stage.UPDATE and node.op.name not in _JOINT)
        if makers and moves:
            places[node] = (*max(*makers, *(touched.get(roots[value], ()) for value in node.overwritten), ()), time)
        for root in {roots[value] for value in node.values}:
            touched[root] = max(touched.get(root, ()), places[node])
    return copied(graph, sorted(graph.nodes, key=places.__getitem__))


def gather_sides(graph: Graph) -> Graph:
    """Let the device and the host take as few turns as possible; each keeps the order of its nodes.

    Nothing moves between forward and the rest, so what backward computes again is not computed before its time.
    """
    first = next((time for time, node in enumerate(graph.nodes) if node.stage is Stage.BACKWARD), len(graph.nodes))
    roots = graph.roots()
    return copied(graph, _gathered(graph.nodes[:first], roots) + _gathered(graph.nodes[first:], roots))


def _gathered(nodes: Sequence[Node], roots: Mapping[Value, Value]) -> list[Node]:
    """The nodes in an order that changes sides only where nothing more can run on one."""
    waiting, times = TopologicalSorter(dependencies(nodes, roots)), {node: time for time, node in enumerate(nodes)}
    waiting.prepare()
    ready: dict[bool, list[int]] = {False: [], True: []}
    found: list[Node] = []
    side = bool(nodes) and nodes[0].by_host
    while waiting.is_active():
        for node in waiting.get_ready():
            heapq.heappush(ready[node.by_host], times[node])
        side = side if ready[side] else not side
        found.append(nodes[heapq.heappop(ready[side])])
        waiting.done(found[-1])
    return found


def dependencies(nodes: Sequence[Node], roots: Mapping[Value, Value]) -> dict[Node, set[Node]]:
    """For each node, return the earlier nodes that must have run.

    They make what it reads. If it overwrites a buffer, or reads one that is overwritten, they are also those that
    touched the buffer before.
    """
    found: dict[Node, set[Node]] = {}
    touched: dict[Value, list[Node]] = {}  # by root: the node that overwrote it last, and who has read it since
    written: set[Value] = set()
    for node in nodes:
        needed = {value.producer for value in node.values if value.producer in found}
        changed = {roots[value] for value in node.overwritten}
        for root in {roots[value] for value in node.values}:
            since = touched.setdefault(root, [])
            needed.update(since if root in changed else since[: root in written])
            touched[root] = [node] if root in changed else [*since, node]
        written |= changed
        found[node] = needed
    return found
