"""The order of nodes: values that end up in state go there as soon as they are made."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from ttrain.graph.alias import overwritten, roots_of
from ttrain.graph.graph import Graph, Node, Value
from ttrain.graph.kinds import Stage
from ttrain.graph.rewrite import copied

_STORES = ("assign", "accumulate")


def store_early(graph: Graph) -> Graph:
    """Move each assignment and accumulation to right behind the node that makes its value, which is then free again.

    Otherwise the gradients of all parameters would be live at once. Only where nothing in between reads or overwrites
    the state; the results are bit-equal.
    """
    roots, times = roots_of(graph), {node: time for time, node in enumerate(graph.nodes)}
    touched: dict[Value, list[int]] = {}
    for node, time in times.items():
        for root in {roots[value] for value in node.values}:
            touched.setdefault(root, []).append(time)
    behind: dict[Node, list[Node]] = {}
    moved: set[Node] = set()
    for node in graph.nodes:
        maker = node.input("value").producer if node.op.name in _STORES else None
        if maker is None or maker in moved:
            continue
        if not any(times[maker] < time < times[node] for time in touched[roots[node.input("state")]]):
            behind.setdefault(maker, []).append(node)
            moved.add(node)
    return copied(graph, (each for node in graph.nodes if node not in moved for each in (node, *behind.get(node, []))))


def gather_sides(graph: Graph) -> Graph:
    """Let the device and the host take as few turns as possible; each keeps the order of its nodes.

    Nothing moves between forward and the rest, so what backward computes again is not computed before its time.
    """
    first = next((time for time, node in enumerate(graph.nodes) if node.stage is Stage.BACKWARD), len(graph.nodes))
    roots = roots_of(graph)
    return copied(graph, _gathered(graph.nodes[:first], roots) + _gathered(graph.nodes[first:], roots))


def _gathered(nodes: Sequence[Node], roots: dict[Value, Value]) -> list[Node]:
    """The nodes in an order that changes sides only where nothing more can run on one."""
    waiting = _after(nodes, roots)
    readers: dict[int, list[int]] = {}
    for time, earlier in enumerate(waiting):
        for other in earlier:
            readers.setdefault(other, []).append(time)
    left = [len(earlier) for earlier in waiting]
    ready: dict[bool, list[int]] = {False: [], True: []}
    for time, count in enumerate(left):
        if not count:
            heapq.heappush(ready[nodes[time].by_host], time)
    found: list[Node] = []
    side = bool(nodes) and nodes[0].by_host
    while ready[False] or ready[True]:
        side = side if ready[side] else not side
        time = heapq.heappop(ready[side])
        found.append(nodes[time])
        for reader in readers.get(time, ()):
            left[reader] -= 1
            if not left[reader]:
                heapq.heappush(ready[nodes[reader].by_host], reader)
    return found


def _after(nodes: Sequence[Node], roots: dict[Value, Value]) -> list[set[int]]:
    """For each node the earlier ones that must have run: those that make what it reads, and where it overwrites a
    buffer or reads one that is overwritten, those that touched it before."""
    made: dict[Value, int] = {}
    written: dict[Value, int] = {}  # by root: the last node that overwrote it, and who has read it since
    read: dict[Value, list[int]] = {}
    found: list[set[int]] = []
    for time, node in enumerate(nodes):
        needed = {made[value] for value in node.values if value in made}
        changed = {roots[value] for value in overwritten(node)}
        for root in {roots[value] for value in node.values} | changed:
            needed.update([written[root]] if root in written else [])
        for root in changed:
            needed.update(read.pop(root, []))
            written[root] = time
        for root in {roots[value] for value in node.values} - changed:
            read.setdefault(root, []).append(time)
        made.update((output, time) for output in node.outputs)
        found.append(needed)
    return found
