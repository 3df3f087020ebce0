"""The reference engine: records the step anew every time and launches each node the moment it is recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ttrain.core.errors import GraphError
from ttrain.core.spec import TensorSpec
from ttrain.device.base import Arena, Buffer, Delivery, Kernel
from ttrain.engine.base import Engine, HostValue, Look, Step, Trace, host_arrays, host_outputs, traced_graph
from ttrain.graph.graph import Graph, Kind, Node, RecordCounter, Value
from ttrain.graph.verify import verify

Placed = tuple[Arena, int, Buffer]


class DynamicEngine(Engine):
    """A tape: nothing is planned, every value gets memory of its own until backward has passed it."""

    name = "dynamic"

    def build(self, name: str, trace: Trace) -> Step:
        return DynamicStep(self, name, trace)


class DynamicStep(Step):
    """Runs the trace function itself at every call."""

    def __init__(self, engine: DynamicEngine, name: str, trace: Trace) -> None:
        self.engine, self.name, self._trace = engine, name, trace
        # Traced once beforehand without launching: mistakes show now, and the inputs are known.
        graph = verify(traced_graph(trace, engine.device), "recording")
        engine.state.check(graph)
        self.inputs = {key: value.spec for key, value in graph.inputs.items()}
        self._calls = 0

    def __call__(self, inputs: Mapping[str, HostValue]) -> dict[str, Any]:
        device, counters = self.engine.device, self.engine.counters
        allocations, nodes = device.counters.allocations, RecordCounter.nodes
        with device.watched(f"step {self.name}"):
            outputs = self._run(_Tape(self.engine), inputs)
        if self._calls:
            counters.allocations_after_first += device.counters.allocations - allocations
            counters.nodes_after_first += RecordCounter.nodes - nodes
        self._calls += 1
        counters.steps += 1
        return outputs

    def inspect(self, inputs: Mapping[str, HostValue], look: Look) -> bool:
        try:
            with self.engine.device.watched(f"step {self.name}"):
                self._run(_WatchedTape(self.engine, look), inputs)
        except _Seen:
            return True
        return False

    def _run(self, tape: _Tape, inputs: Mapping[str, HostValue]) -> dict[str, Any]:
        device = self.engine.device
        arrays = host_arrays(self.name, self.inputs, inputs, device.chips)
        for key in arrays:
            tape.inputs[key] = tape.allocate(self.inputs[key], f"input {key}")
        device.upload_inputs({key: buffer for key, (_, _, buffer) in tape.inputs.items()}, arrays)
        graph = Graph(on_record=tape.launch, on_release=tape.release, hosted=device.hosted)
        try:
            self._trace(graph)
            return host_outputs(device, {key: (value, tape.placed(value)[2]) for key, value in graph.outputs.items()})
        finally:
            tape.close()


class _Tape:
    """Buffers of one running step, by value."""

    def __init__(self, engine: DynamicEngine) -> None:
        self.engine, self.device, self.state = engine, engine.device, engine.state
        self.inputs: dict[str, Placed] = {}
        self.buffers: dict[Value, Placed] = {}

    def allocate(self, spec: TensorSpec, purpose: str, on_host: bool = False) -> Placed:
        home = self.device.home(on_host)
        arena = home.allocate_arena(spec.nbytes, purpose)
        return arena, 0, home.place(arena, 0, spec)

    def placed(self, value: Value) -> Placed:
        if value.kind is Kind.INPUT:
            return self.inputs[value.name]
        if value.kind.is_state:
            return self.state.buffer(value)
        if value not in self.buffers:
            raise GraphError(f"{value!r} ({value.producer!r}) was released: mark it as an output before backward.")
        return self.buffers[value]

    def close(self) -> None:
        """Drop every buffer now; the graph and its values refer to each other and live until they are collected."""
        self.inputs.clear()
        self.buffers.clear()

    def release(self, values: Sequence[Value]) -> None:
        for value in values:
            self.buffers.pop(value, None)

    def launch(self, node: Node) -> None:
        aliases, on_host = node.op.aliases(node), node.op.on_host
        home = self.device.home(on_host)
        if node.op.view and home.shares(node.values[0].spec, node.outputs[0].spec):
            arena, offset, _ = self.placed(node.values[0])
            spec = node.outputs[0].spec
            self.buffers[node.outputs[0]] = (arena, offset, home.place(arena, offset, spec))
            return
        kernel = "copy_reshape" if node.op.view else node.op.name
        if kernel not in self.device.kernels:
            self._launch_parts(node)
            return
        for index, output in enumerate(node.outputs):
            shared = node.inputs[aliases[index]] if index in aliases and not node.op.view else None
            if shared is None:
                self.buffers[output] = self.allocate(output.spec, node.op.name, on_host)
            else:
                self.buffers[output] = self.placed(shared)
        self._run(node, self.device.kernels[kernel])

    def _run(self, node: Node, kernel: Kernel) -> None:
        ins = [None if value is None else self.placed(value)[2] for value in node.inputs]
        outs = [self.buffers[output][2] for output in node.outputs]
        specs = kernel.workspace_specs(
            [None if value is None else value.spec for value in node.inputs],
            [output.spec for output in node.outputs],
            node.attributes,
        )
        purpose, on_host = f"workspace of {node.op.name}", node.op.on_host
        workspace = [self.allocate(spec, purpose, on_host)[2] for spec in specs]
        launch = kernel.bind(ins, outs, node.attributes, workspace)
        if kernel.delivery is Delivery.FRESH:
            self.device.home(on_host).deliver(launch, outs)
        else:
            launch()

    def _launch_parts(self, node: Node) -> None:
        """Record the op's decomposition right here: its nodes launch as they are recorded."""
        graph = node.outputs[0].graph
        recorded = len(graph.nodes)
        with graph.no_segment():  # recomputing the node records its parts again by itself
            outputs = node.op.decompose(node, node.inputs)
        if outputs is None:
            raise GraphError(f"device {self.device.name} has no kernel for {node.op.name}, and no decomposition.")
        for mine, part in zip(node.outputs, outputs, strict=False):
            self.buffers[mine] = self.placed(part)
        graph.release([output for part in graph.nodes[recorded:] for output in part.outputs])


class _Seen(Exception):
    """Ends a step that is being looked at."""


class _WatchedTape(_Tape):
    """Shows every node to `look` as soon as it has run."""

    def __init__(self, engine: DynamicEngine, look: Look) -> None:
        super().__init__(engine)
        self._look = look

    def launch(self, node: Node) -> None:
        super().launch(node)
        if self._look(node, lambda value: self.device.home(value.on_host).download(self.placed(value)[2])):
            raise _Seen
