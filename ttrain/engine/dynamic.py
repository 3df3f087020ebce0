"""The reference engine: records the step anew every time, then launches its nodes one by one, in that order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ttrain.core.spec import TensorSpec
from ttrain.device.base import Arena, Buffer, Kernel, Launch, of_side
from ttrain.engine.base import Engine, HostValue, Look, Step, Trace, host_outputs, traced_graph
from ttrain.graph.graph import Graph, Node, Value
from ttrain.graph.kinds import Kind
from ttrain.graph.passes import decompose, fuse, live_nodes
from ttrain.graph.verify import verify

Placed = tuple[Arena, int, Buffer]


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
        self._joined, self._order = graph, list[tuple[Node, list[Value]]]()  # what was made of it

    def __call__(self, inputs: Mapping[str, HostValue]) -> dict[str, Any]:
        with self.engine.device.launching(self._what), self._counted:
            return self._run(inputs, look=None)[0]

    def inspect(self, inputs: Mapping[str, HostValue], look: Look, ready: Launch | None = None) -> bool:
        with self.engine.device.launching(self._what):
            return self._run(inputs, look, ready)[1]

    def _run(
        self, inputs: Mapping[str, HostValue], look: Look | None, ready: Launch | None = None
    ) -> tuple[dict[str, Any], bool]:
        """Outputs, and whether `look` ended the step at a node; then there are none."""
        device, tape = self.engine.device, _Tape(self.engine)
        arrays = self._arrays(inputs)
        for key in arrays:
            tape.inputs[key] = tape.allocate(self.inputs[key], f"input {key}")
        device.upload_inputs({key: buffer for key, (_, _, buffer) in tape.inputs.items()}, arrays)
        self._record()
        if ready is not None:
            ready()
        try:
            for node, done in self._order:
                tape.launch(node)
                if look is not None and look(node, tape.download):
                    return {}, True
                for value in done:
                    tape.buffers.pop(value, None)
            outputs = {key: (value, tape.placed(value)[2]) for key, value in self._joined.outputs.items()}
            return host_outputs(device, outputs), False
        finally:
            tape.close()

    def _record(self) -> None:
        """Record anew, and where that gave another graph than last time, make of it what the device launches."""
        device = self.engine.device
        graph = traced_graph(self._trace, device)
        facts = _facts(graph)
        if facts != self._recorded:
            self._joined = decompose(fuse(graph, device.kernels), device.kernels, device.name)
            self._order, self._recorded = _with_last_reads(self._joined), facts


def _facts(graph: Graph) -> Any:
    """What passes and launches depend on: equal for graphs that are recorded alike."""
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


def _with_last_reads(graph: Graph) -> list[tuple[Node, list[Value]]]:
    """The nodes that count, each with the values that nothing reads after it."""
    seen, found = set(graph.outputs.values()), []
    for node in reversed(live_nodes(graph)):
        done = [value for value in dict.fromkeys((*node.values, *node.outputs)) if value not in seen]
        seen.update(done)
        found.append((node, done))
    return found[::-1]


class _Tape:
    """Buffers of one running step, by value."""

    def __init__(self, engine: Engine) -> None:
        self.device, self.state = engine.device, engine.state
        self.inputs: dict[str, Placed] = {}
        self.buffers: dict[Value, Placed] = {}

    def allocate(self, spec: TensorSpec, purpose: str, on_host: bool = False) -> Placed:
        side = self.device.side(on_host)
        arena = side.allocate_arena(spec.nbytes, purpose)
        return arena, 0, side.place(arena, 0, spec)

    def placed(self, value: Value) -> Placed:
        if value.kind is Kind.INPUT:
            return self.inputs[value.name]
        return self.state.placed(value.name) if value.kind.is_state else self.buffers[value]

    def download(self, value: Value) -> Any:
        return self.device.side(value.on_host).download(self.placed(value)[2])

    def close(self) -> None:
        """Drop every buffer now; the graph and its values refer to each other and live until they are collected."""
        self.inputs.clear()
        self.buffers.clear()

    def launch(self, node: Node) -> None:
        aliases, on_host = node.op.aliases(node), node.on_host
        side = self.device.side(on_host)
        if node.op.view and side.shares(node.values[0].spec, node.outputs[0].spec):
            arena, offset, _ = self.placed(node.values[0])
            spec = node.outputs[0].spec
            self.buffers[node.outputs[0]] = (arena, offset, side.place(arena, offset, spec))
            return
        for index, output in enumerate(node.outputs):
            shared = node.inputs[aliases[index]] if index in aliases and not node.op.view else None
            if shared is None:
                self.buffers[output] = self.allocate(output.spec, node.op.name, on_host)
            else:
                self.buffers[output] = self.placed(shared)
        rows = of_side(self.device.kernels, on_host)
        self._run(node, rows["copy_reshape" if node.op.view else node.op.name])

    def _run(self, node: Node, kernel: Kernel) -> None:
        ins = [None if value is None else self.placed(value)[2] for value in node.inputs]
        outs = [self.buffers[output][2] for output in node.outputs]
        specs = kernel.workspace_specs(*node.specs, node.attributes)
        purpose, on_host = f"workspace of {node.op.name}", node.on_host
        workspace = [self.allocate(spec, purpose, on_host)[2] for spec in specs]
        self.device.side(on_host).bind(kernel, ins, outs, node.attributes, workspace)()
