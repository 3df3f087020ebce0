"""The planned engine: a flat list of kernels bound to persistent buffers, launched in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np

from ttrain.autodiff.rematerialize import rematerialize
from ttrain.core.spec import TensorSpec
from ttrain.device.base import Arena, Buffer, Buffers, Device, Launch, flat_launches
from ttrain.engine.base import Bound, Engine, HostValue, Look, Step, Trace, host_outputs, traced_graph
from ttrain.engine.state import Placed, State
from ttrain.graph import Graph, Node, Value, passes
from ttrain.graph.verify import verify
from ttrain.plan.arena import Block
from ttrain.plan.build import build_plan
from ttrain.plan.plan import Plan


class StaticStep(Step):
    """Bound at its first call, so that every step of a run is built before memory is taken."""

    engine: StaticEngine

    def __init__(self, engine: StaticEngine, name: str, plan: Plan) -> None:
        super().__init__(engine, name, plan.graph)
        self.plan: Plan = plan
        self._bound: BoundPlan | None = None
        # What brings the inputs of the next run into its buffers, and their values; None before the first prefetch.
        self._prefetched: tuple[Launch | None, Mapping[str, np.ndarray]] | None = None

    def start(self, inputs: Mapping[str, HostValue]) -> Callable[[], dict[str, Any]]:
        device, arrays = self.engine.device, self._arrays(inputs)
        with device.launching(self._what):
            bound = self.take_addresses()
            take, written = self._prefetched or (None, {})
            if take is not None:
                take()  # brings what was written into the step's buffers
                self._prefetched = None, {}
                known = {key for key, x in written.items() if key in arrays and np.array_equal(x, arrays[key])}
                arrays = {key: x for key, x in arrays.items() if key not in known}
            if arrays:
                device.upload_inputs(bound.inputs, arrays)
            self.run(bound)
        if device.overlaps and self._prefetched is None:  # before a capture, so that the device has all its memory
            self._prefetched = device.prefetch(bound.inputs, arrays), arrays
        return partial(host_outputs, device, self.plan.graph.outputs, bound.outputs)

    def prefetch(self, inputs: Mapping[str, HostValue]) -> None:
        if self._prefetched is not None:
            arrays = self._arrays(inputs)
            self._prefetched = self.engine.device.prefetch(self.take_addresses().inputs, arrays), arrays

    def run(self, bound: BoundPlan) -> None:
        """Run the bound plan once."""
        bound.run()

    def inspect(self, inputs: Mapping[str, HostValue], look: Look, ready: Launch | None = None) -> bool:
        device = self.engine.device
        arrays = self._arrays(inputs)
        with device.launching(self._what):
            bound = self.take_addresses()
            device.upload_inputs(bound.inputs, arrays)
            if ready is not None:
                ready()
            return bound.inspect(look)

    def launches(self) -> list[Launch]:
        return self.take_addresses().launches

    def take_addresses(self) -> BoundPlan:
        """The plan, bound now at the latest."""
        if self._bound is None:
            self._bound = self.engine.bind(self.plan)
        return self._bound


class StaticEngine(Engine):
    """Plans each step once. All steps share one arena, since only one of them runs at a time.

    Without arenas on the device, offsets of one plan mean nothing in another, so every step has tensors of its own.
    """

    name = "static"
    step_class: type[StaticStep] = StaticStep

    def __init__(self, device: Device, state: State, rematerialize: bool = True) -> None:
        super().__init__(device, state)
        self.rematerialize, self.groups = rematerialize, device.groups
        self._steps: list[StaticStep] = []
        self._arenas: dict[bool, tuple[Arena, int]] = {}  # shared ones with their bytes; True for the host's

    def build(self, name: str, trace: Trace) -> Step:
        graph = self.derive(trace)
        self.state.check(graph)
        step = self.step_class(self, name, self.plan(graph))
        self._steps.append(step)
        return step

    def derive(self, trace: Trace) -> Graph:
        """Trace a step and run every pass, verifying the graph at each border."""
        device, kernels = self.device, self.kernels
        graph = verify(traced_graph(trace, device), "recording")
        graph = verify(passes.remove_dead_code(graph), "dead code")
        graph = verify(passes.merge_common_subexpressions(graph), "common subexpressions")
        graph = verify(passes.fuse(graph, kernels), "fusion")
        graph = verify(passes.remove_dead_code(passes.decompose(graph, kernels, device.name)), "decomposition")
        graph = verify(passes.merge_common_subexpressions(graph), "common subexpressions of the parts")
        graph = verify(passes.copy_reshapes(graph, device.shares), "reshapes that copy")
        if self.rematerialize and device.rematerializes:
            graph = verify(rematerialize(graph), "rematerialization")
        graph = verify(passes.store_early(passes.remove_dead_code(graph)), "ordering")
        graph = verify(passes.gather_ahead(graph), "gathering of weights")
        graph = graph if device.host is None else verify(passes.gather_sides(graph), "gathering")
        return verify(passes.remove_dead_code(passes.group(graph)), "grouping") if self.groups else graph

    def plan(self, graph: Graph) -> Plan:
        return build_plan(graph, self.kernels, self.device, self.state.reuse)

    def bind(self, plan: Plan) -> BoundPlan:
        """Give a plan its addresses."""
        shares = self.device.arenas
        arena = self.shared_arena() if shares else self.device.allocate_arena(plan.arena_bytes, "activations")
        of_host = None if self.device.host is None else self.shared_arena(on_host=True)
        return BoundPlan(plan, self, (arena, of_host))

    @property
    def plans(self) -> list[Plan]:
        return [step.plan for step in self._steps]

    def close(self) -> None:
        self._steps.clear()
        self._arenas.clear()

    def shared_arena(self, on_host: bool = False) -> Arena:
        """The arena of all steps built so far. Steps built later that need more get one of their own."""
        needed = max(plan.host_arena_bytes if on_host else plan.arena_bytes for plan in self.plans)
        arena, nbytes = self._arenas.get(on_host, (None, -1))
        if needed > nbytes:
            names = ", ".join(step.name for step in self._steps)
            arena = self.device.side(on_host).allocate_arena(needed, f"activations of {names}")
            self._arenas[on_host] = arena, needed
        return arena


class BoundPlan(Bound):
    """A plan with addresses: launches without arguments, and the buffers of inputs and outputs."""

    def __init__(self, plan: Plan, engine: StaticEngine, arenas: tuple[Arena, Arena]) -> None:
        """The arenas are that of the device, and that of the host beside it."""
        super().__init__(engine, plan.placement.owner_of)
        self._plan, self._arenas = plan, arenas
        graph = plan.graph
        self.inputs = Buffers({name: self.buffer(value) for name, value in graph.inputs.items()})
        self.outputs = Buffers({name: self.buffer(value) for name, value in graph.outputs.items()})
        self.nodes = plan.launched
        self.node_launches: list[Launch] = [self.bind(node) for node in self.nodes]
        self.launches: list[Launch] = list(flat_launches(self.node_launches))

    def run(self) -> None:
        """Launch everything once, in order."""
        for launch in self.launches:
            launch()

    def parts(self) -> list[tuple[bool, list[Launch]]]:
        """Launches in runs of those that the device captures, and those between them that the host runs (True)."""
        pairs = groupby(zip(self.nodes, self.node_launches, strict=True), key=lambda pair: pair[0].by_host)
        return [(by_host, list(flat_launches(launch for _, launch in run))) for by_host, run in pairs]

    def inspect(self, look: Look) -> bool:
        """Launch node by node until `look` says True; whether it did."""
        for node, launch in zip(self.nodes, self.node_launches, strict=True):
            launch()
            if look(node, self.download):
                return True
        return False

    def placed(self, owner: Value) -> Placed:
        return self._place(self._plan.owned[owner], owner.spec)

    def workspace(self, node: Node, specs: Sequence[TensorSpec]) -> list[Buffer]:
        return [self._place(block, spec)[2] for block, spec in zip(self._plan.scratch[node], specs, strict=True)]

    def _place(self, block: Block, spec: TensorSpec) -> Placed:
        """Place a block at an offset of the arena, or below zero in what the state lends."""
        arena, offset, reuse = self._arenas[block.on_host], block.offset, self.state.reuse
        if offset < 0 and reuse is not None:
            arena, offset = self.state.reuse_arena, reuse.nbytes + offset
        return arena, offset, self.device.side(block.on_host).place(arena, offset, spec)
