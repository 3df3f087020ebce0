"""The reference engine: records the step anew every time, then launches its nodes one by one, in that order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ttrain.core.spec import TensorSpec
from ttrain.device.base import Buffer, Launch
from ttrain.engine.base import Bound, Engine, HostValue, Look, Step, Trace, host_outputs, traced_graph
from ttrain.engine.state import Placed
from ttrain.graph import Graph, Kind, Node, Value
from ttrain.graph.passes import copy_reshapes, decompose, fuse, gather_ahead, live_nodes, remove_dead_code
from ttrain.graph.verify import verify


class DynamicEngine(Engine):
    """A tape: nothing is planned, every value has memory of its own from where it is made to where it is last read."""

    name = "dynamic"

    def build(self, name: str, trace: Trace) -> Step:
        return DynamicStep(self, name, trace)


class DynamicStep(Step):
    """Runs the trace function itself at every call."""

    def __init__(self, engine: DynamicEngine, name: str, trace: Trace) -> None:
        # Traced once beforehand without launching: mistakes show now, and the inputs are known.
        graph = verify(traced_graph(trace, engine.device), "recording")
        engine.state.check(graph)
        super().__init__(engine, name, graph, fixed=False)
        self._trace = trace
        self._recorded: Any = None  # what `_facts` tells of the last recorded graph
        # What was made of it: the graph that is launched, who owns which buffer, and its nodes with what dies there.
        self._joined, self._roots, self._order = graph, graph.roots(), list[tuple[Node, list[Value]]]()

    def start(self, inputs: Mapping[str, HostValue]) -> Callable[[], dict[str, Any]]:
        """Run to the end right here."""
        with self.engine.device.launching(self._what):
            outputs, _ = self._run(inputs, look=None)
        return lambda: outputs

    def inspect(self, inputs: Mapping[str, HostValue], look: Look, ready: Launch | None = None) -> bool:
        with self.engine.device.launching(self._what):
            return self._run(inputs, look, ready)[1]

    def _run(
        self, inputs: Mapping[str, HostValue], look: Look | None, ready: Launch | None = None
    ) -> tuple[dict[str, Any], bool]:
        """Outputs, and whether `look` ended the step at a node; then there are none."""
        device, arrays = self.engine.device, self._arrays(inputs)
        self._record()
        tape = _Tape(self.engine, self._roots)
        given = {key: tape.allocate(self._joined.inputs[key]) for key in arrays}
        device.upload_inputs(given, arrays)
        if ready is not None:
            ready()
        try:
            for node, done in self._order:
                tape.launch(node)
                if look is not None and look(node, tape.download):
                    return {}, True
                for value in done:
                    del tape.values[value]
            outputs = {key: tape.buffer(value) for key, value in self._joined.outputs.items()}
            return host_outputs(device, self._joined.outputs, outputs), False
        finally:
            tape.values.clear()  # now; the graph and its values refer to each other and live until they are collected

    def _record(self) -> None:
        """Record anew, and where that gave another graph than last time, make of it what the device launches."""
        device = self.engine.device
        graph = traced_graph(self._trace, device)
        facts = _facts(graph)
        if facts != self._recorded:
            graph = decompose(fuse(graph, device.kernels), device.kernels, device.name)
            self._joined = gather_ahead(remove_dead_code(copy_reshapes(graph, device.shares)))
            self._roots = self._joined.roots()
            self._order, self._recorded = _with_last_reads(self._joined, self._roots), facts


def _facts(graph: Graph) -> Any:
    """Return the facts that passes and launches depend on. They are equal for graphs that are recorded alike."""
    named = [
        [(name, value.number, value.kind, value.spec, value.on_host) for name, value in table.items()]
        for table in (graph.inputs, graph.state, graph.outputs)
    ]
    nodes = [
        (node.op, node.attributes, node.scope, node.stage, node.copy, node.on_host,
         [None if value is None else value.number for value in node.inputs])
        for node in graph.nodes
    ]  # fmt: skip
    return named, nodes


def _with_last_reads(graph: Graph, roots: Mapping[Value, Value]) -> list[tuple[Node, list[Value]]]:
    """The nodes that count, each with the values that own a buffer which nothing reads after it."""
    seen, found = {roots[value] for value in graph.outputs.values()}, []
    for node in reversed(live_nodes(graph)):
        touched = dict.fromkeys(roots[value] for value in (*node.values, *node.outputs))
        found.append((node, [root for root in touched if root.kind is Kind.NODE and root not in seen]))
        seen.update(touched)
    return found[::-1]


class _Tape(Bound):
    """Buffers of one running step: every value has memory of its own."""

    def __init__(self, engine: Engine, roots: Mapping[Value, Value]) -> None:
        super().__init__(engine, roots.__getitem__)
        self.values: dict[Value, Placed] = {}

    def allocate(self, value: Value) -> Buffer:
        """Gives a value its memory."""
        purpose = f"input {value.name}" if value.producer is None else value.producer.op.name
        side = self.device.side(value.on_host)
        arena = side.allocate_arena(value.spec.nbytes, purpose)
        self.values[value] = arena, 0, side.place(arena, 0, value.spec)
        return self.values[value][2]

    def placed(self, owner: Value) -> Placed:
        return self.values[owner]

    def workspace(self, node: Node, specs: Sequence[TensorSpec]) -> list[Buffer]:
        return [self.device.side(node.on_host).allocate(spec, f"workspace of {node.op.name}") for spec in specs]

    def launch(self, node: Node) -> None:
        if not node.op.view:
            for output in node.outputs:
                if self.owner_of(output) is output:
                    self.allocate(output)
            self.bind(node)()
