"""Check a graph after each pass, so that a broken pass is found at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable

from ttrain.core.errors import GraphError
from ttrain.graph.graph import Graph, Kind, Node, Value


def verify(graph: Graph, stage: str) -> Graph:
    """Raise GraphError naming a node that breaks a rule; return the graph.

    Rules: every input was made before it is read; every output has the spec that the op infers; a value whose buffer
    was overwritten is not read afterwards, be it through a view or as an output of the graph; only state is
    overwritten, or what ranks exchange, no constant, and by one node not twice; only a transfer reads what lies on the
    other side.
    """

    def broken(message: str) -> GraphError:
        return GraphError(f"after {stage}: {message}")

    roots = graph.roots()
    follow(graph, roots.__getitem__, (*graph.inputs.values(), *graph.state.values()), broken)
    for node in graph.nodes:
        for value in node.values:
            if value.on_host is not node.on_host and not node.op.transfer:
                raise broken(f"{node!r} reads {value!r}, which lies on the other side.")
        given, made = node.specs
        if (specs := node.op.infer_outputs(given, node.attributes)) != made:
            raise broken(f"{node!r} has outputs that its op does not infer: {specs}.")
        for root, times in Counter(roots[value] for value in node.overwritten).items():
            if not root.kind.is_state and not node.op.joint:
                raise broken(f"{node!r} overwrites {root!r}, which is not state.")
            if root.kind is Kind.CONSTANT:
                raise broken(f"{node!r} overwrites {root!r}, a derived buffer. Declare it with saved=True.")
            if times > 1:
                raise broken(f"{node!r} overwrites {root!r} twice.")
    return graph


def follow(
    graph: Graph,
    owner_of: Callable[[Value], Value],
    entering: Iterable[Value],
    fault: Callable[[str], Exception],
    reads: Callable[[Node], Iterable[Value]] = lambda node: node.values,
    elided: Container[Node] = frozenset(),
) -> None:
    """Follow what every buffer holds, node by node; raise a `fault` where a reader finds another value than it means.

    A buffer is known by the value that owns it; those of the `entering` hold them when the step starts. What the next
    step finds in state must be the newest version. An assignment that is `elided` expects its value in the state.
    """
    meant = {value: value for value in (*graph.inputs.values(), *graph.state.values())}  # of a view what it shows
    held = {value: value for value in entering}  # by owner
    newest = {value: value for value in graph.state.values()}

    def expect(value: Value, reader: Node | str, where: Value | None = None) -> None:
        if value not in meant:
            raise fault(f"{reader} reads {value!r}, which no earlier node makes.")
        found = held.get(owner_of(where or value))
        if found is not meant[value]:
            raise fault(f"{reader} reads {value!r}, but its buffer holds {found!r} by then.")

    for node in graph.nodes:
        if node.op.view or node in elided:
            source = node.values[0] if node.op.view else node.input("value")
            expect(source, node, source if node.op.view else node.input("state"))
            meant[node.outputs[0]] = meant[source]
        else:
            for value in reads(node):
                expect(value, node)
            for output in node.outputs:
                meant[output] = held[owner_of(output)] = output
        changed = [] if node.op.view else [node.outputs[index] for index in node.op.aliases(node)]
        newest.update((owner_of(output), output) for output in changed if owner_of(output).kind.is_state)
    for state, value in newest.items():
        expect(value, f"the next step's {state.name}", state)
    for name, value in graph.outputs.items():
        expect(value, f"output {name}")
