"""The planned engine: a flat list of kernels bound to persistent buffers, launched in order."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from ttrain.autodiff.rematerialize import rematerialize
from ttrain.core.spec import TensorSpec
from ttrain.device.base import Arena, Buffer, Delivery, Device, Kernel, Launch
from ttrain.engine.base import Engine, HostValue, Look, Step, Trace, host_arrays, host_outputs, traced_graph
from ttrain.engine.state import State
from ttrain.graph.graph import Graph, Node, RecordCounter, Value
from ttrain.graph.passes import (
    copy_reshapes,
    decompose,
    fuse,
    merge_common_subexpressions,
    remove_dead_code,
    store_early,
)
from ttrain.graph.verify import verify
from ttrain.plan.plan import Plan, build_plan


def prepare(trace: Trace, kernels: Container[str], device: Device, rematerializing: bool) -> Graph:
    """Trace a step and run every pass, verifying the graph at each border."""
    graph = verify(traced_graph(trace), "recording")
    graph = verify(remove_dead_code(graph), "dead code")
    graph = verify(merge_common_subexpressions(graph), "common subexpressions")
    graph = verify(fuse(graph), "fusion")
    graph = verify(decompose(graph, kernels, device.name), "decomposition")
    graph = verify(merge_common_subexpressions(graph), "common subexpressions of the parts")
    graph = verify(copy_reshapes(graph, device.shares), "reshapes that copy")
    if rematerializing and device.rematerializes:
        graph = verify(rematerialize(graph), "rematerialization")
    return verify(store_early(remove_dead_code(graph)), "ordering")


class StaticEngine(Engine):
    """Plans each step once. All steps share one arena, since only one of them runs at a time.

    Without arenas on the device, offsets of one plan mean nothing in another, so every step has tensors of its own.
    """

    name = "static"

    def __init__(self, device: Device, state: State, rematerialize: bool = True) -> None:
        super().__init__(device, state)
        self.rematerialize = rematerialize
        self.kernels: Mapping[str, Kernel] = device.kernels
        self._steps: list[StaticStep] = []
        self._arena: Arena = None
        self._arena_bytes = -1

    def build(self, name: str, trace: Trace) -> Step:
        graph = self.derive(trace)
        self.state.check(graph)
        step = self.make_step(name, build_plan(graph, self.kernels, self.device))
        self._steps.append(step)
        return step

    def derive(self, trace: Trace) -> Graph:
        """The final graph of a step."""
        return prepare(trace, self.kernels, self.device, self.rematerialize)

    def make_step(self, name: str, plan: Plan) -> StaticStep:
        return StaticStep(self, name, plan)

    def bind(self, plan: Plan) -> BoundPlan:
        """Give a plan its addresses."""
        arena = (
            self.shared_arena() if self.device.arenas else self.device.allocate_arena(plan.arena_bytes, "activations")
        )
        return BoundPlan(plan, self.device, self.kernels, self.state, arena)

    def bind_all(self) -> None:
        """Give every step built so far its addresses."""
        for step in self._steps:
            step.take_addresses()

    def shared_arena(self) -> Arena:
        """The arena of all steps built so far. Steps built later that need more get one of their own."""
        needed = max(step.plan.arena_bytes for step in self._steps)
        if needed > self._arena_bytes:
            names = ", ".join(step.name for step in self._steps)
            self._arena, self._arena_bytes = self.device.allocate_arena(needed, f"activations of {names}"), needed
        return self._arena


class StaticStep(Step):
    """Bound at its first call, so that every step of a run is built before memory is taken."""

    def __init__(self, engine: StaticEngine, name: str, plan: Plan) -> None:
        self.engine, self.name = engine, name
        self.plan: Plan = plan
        self.inputs: dict[str, TensorSpec] = {key: value.spec for key, value in plan.graph.inputs.items()}
        self._bound: BoundPlan | None = None
        self._calls = 0

    def __call__(self, inputs: Mapping[str, HostValue]) -> dict[str, Any]:
        device, counters = self.engine.device, self.engine.counters
        arrays = host_arrays(self.name, self.inputs, inputs, device.chips)
        allocations, nodes = device.counters.allocations, RecordCounter.nodes
        self.take_addresses()
        assert self._bound is not None
        device.upload_inputs(self._bound.inputs, arrays)
        self.run(self._bound)
        if self._calls:
            counters.allocations_after_first += device.counters.allocations - allocations
            counters.nodes_after_first += RecordCounter.nodes - nodes
        self._calls += 1
        counters.steps += 1
        return host_outputs(device, self._bound.outputs)

    def run(self, bound: BoundPlan) -> None:
        """Run the bound plan once."""
        bound.run()

    def inspect(self, inputs: Mapping[str, HostValue], look: Look) -> bool:
        device = self.engine.device
        arrays = host_arrays(self.name, self.inputs, inputs, device.chips)
        self.take_addresses()
        assert self._bound is not None
        device.upload_inputs(self._bound.inputs, arrays)
        return self._bound.inspect(look)

    def launches(self) -> list[Launch]:
        self.take_addresses()
        assert self._bound is not None
        return self._bound.launches

    def take_addresses(self) -> None:
        """Bind now instead of at the first call."""
        if self._bound is None:
            self._bound = self.engine.bind(self.plan)


def flat_launches(launches: Iterable[Launch]) -> Iterator[Launch]:
    """The launches with every chain of several spliced in: one Python call less for each."""
    for launch in launches:
        yield from getattr(launch, "launches", (launch,))


class BoundPlan:
    """A plan with addresses: launches without arguments, and the buffers of inputs and outputs."""

    def __init__(self, plan: Plan, device: Device, kernels: Mapping[str, Kernel], state: State, arena: Arena) -> None:
        self._plan, self._device, self._kernels, self._state, self._arena = plan, device, kernels, state, arena
        self.inputs = {name: self._buffer(value) for name, value in plan.graph.inputs.items()}
        self.outputs = {name: self._buffer(value) for name, value in plan.graph.outputs.items()}
        self.nodes = plan.launched
        self.node_launches: list[Launch] = [self._bind(node) for node in self.nodes]
        self.launches: list[Launch] = list(flat_launches(self.node_launches))

    def run(self) -> None:
        """Launch everything once, in order."""
        for launch in self.launches:
            launch()

    def inspect(self, look: Look) -> bool:
        """Launch node by node until `look` says True; whether it did."""
        for node, launch in zip(self.nodes, self.node_launches, strict=True):
            launch()
            if look(node, lambda value: self._device.download(self._buffer(value))):
                return True
        return False

    def _buffer(self, value: Value) -> Buffer:
        owner = self._plan.placement.owner_of(value)
        if owner.kind.is_state:
            arena, offset, buffer = self._state.buffer(owner)
            return buffer if owner is value else self._device.place(arena, offset, value.spec)
        return self._device.place(self._arena, self._plan.offsets[owner], value.spec)

    def _bind(self, node: Node) -> Launch:
        device = self._device
        kernel = self._kernels[node.op.name]
        ins = [None if value is None else self._buffer(value) for value in node.inputs]
        outs = [self._buffer(output) for output in node.outputs]
        specs = kernel.workspace_specs(
            [None if value is None else value.spec for value in node.inputs],
            [output.spec for output in node.outputs],
            node.attributes,
        )
        offsets = self._plan.workspace.get(node, [])
        workspace = [device.place(self._arena, at, spec) for at, spec in zip(offsets, specs, strict=True)]
        launch = kernel.bind(ins, outs, node.attributes, workspace)
        return launch if kernel.delivery is not Delivery.FRESH else partial(device.deliver, launch, outs)
