"""The captured engine: the device records or compiles a planned step once and replays it."""

from __future__ import annotations

from functools import partial

from ttrain.core.errors import CaptureError
from ttrain.device.base import Arena, Device, Launch, StepCompiler, chain
from ttrain.engine.base import examples
from ttrain.engine.state import State
from ttrain.engine.static import BoundPlan, StaticEngine, StaticStep
from ttrain.graph import Graph, Kind, Stage
from ttrain.plan.plan import Plan


class TracedStep(StaticStep):
    """First call: launched one by one, which warms kernels up. Second call: captured, then replayed."""

    engine: TracedEngine
    _replay: Launch | None = None
    _warm = False

    def __init__(self, engine: TracedEngine, name: str, plan: Plan) -> None:
        """Refuse a kernel that turns a tensor into a host number: every replay would repeat it."""
        super().__init__(engine, name, plan)
        for node in plan.launched:
            found = () if node.on_host else engine.kernels[node.op.name].host_scalars  # the host's part isn't captured
            if found:
                raise CaptureError(
                    f"step {name}: the kernel of {node.op.name} on {engine.device.name} reads {', '.join(found)} on "
                    "the host, so every replay would repeat the captured value. Use engine=static."
                )

    def run(self, bound: BoundPlan) -> None:
        engine = self.engine
        if self._replay is None and engine.compiler is not None:
            engine.counters.captures += 1
            self._replay = bound.run
        if self._replay is None and not (self._warm and engine.capture(self)):
            bound.run()
            self._warm = True
        else:
            assert self._replay is not None
            self._replay()

    def warm_up(self) -> bool:
        """Run a step that was never run once on example inputs, so that the device has all its memory.

        False for a step that changes state: it is not run.
        """
        if self._warm:
            return True
        if any(node.overwritten for node in self.plan.graph.nodes):
            return False
        bound = self.take_addresses()
        self.engine.device.upload_inputs(bound.inputs, examples(self.plan.graph))
        bound.run()
        self._warm = True
        return True

    def record(self) -> None:
        """Let the device capture the bound plan: each run of its launches; in between the host runs its own."""
        device, runs = self.engine.device, self.take_addresses().parts()
        parts: list[Launch] = []
        for by_host, launches in runs:
            if by_host:
                parts += launches
            else:
                name = self.name if len(runs) == 1 else f"part {len(parts)} of {self.name}"
                parts.append(device.capture(launches, name))
                self.engine.counters.captures += 1
        self._replay = chain(*parts)

    def release(self) -> None:
        """Drop the capture, before the device goes."""
        self._replay = None
        self._bound = None


class TracedEngine(StaticEngine):
    """Replays what was captured: no Python per op on a device that records, compiled kernels on one that compiles.

    All steps of a run are built before the first one is captured; from then on the device refuses to allocate.
    """

    name = "traced"
    step_class = TracedStep
    _steps: list[TracedStep]  # type: ignore[assignment]

    def __init__(self, device: Device, state: State, rematerialize: bool = True) -> None:
        super().__init__(device, state, rematerialize)
        self.compiler = device.compiler()
        if self.compiler is not None:
            self.kernels, self.groups = self.compiler.kernels, True
        elif not device.supports_capture:
            raise CaptureError(f"device {device.name} can't capture a step. Use engine=static or engine=dynamic.")
        else:
            device.expect_capture()

    def plan(self, graph: Graph) -> Plan:
        plan = super().plan(graph)
        trains = any(node.stage is not Stage.FORWARD for node in graph.nodes)
        if self.compiler is None or (self._steps and not trains):  # evaluations take what was tuned for training
            return plan
        arenas: list[tuple[int, Arena]] = []  # of the trials, let go of with them
        anew = self.compiler.tune(plan.launched, partial(self._trial, self.compiler, graph, arenas))
        return super().plan(graph) if anew else plan

    def _trial(self, compiler: StepCompiler, graph: Graph, arenas: list[tuple[int, Arena]]) -> Launch:
        """Runs what a step launches, but for what writes state that outlives it, on activations of its own.

        Those of all trials of a step lie in one of the `arenas`, with their bytes, where it suffices.
        """
        plan = super().plan(graph)
        compiler.prepare(plan.launched)
        if not arenas or arenas[-1][0] < plan.arena_bytes:
            arena = self.device.allocate_arena(plan.arena_bytes, "the trials of a step")
            arenas.append((plan.arena_bytes, arena))
        bound = BoundPlan(plan, self, (arenas[-1][1], None))
        passing = (Kind.NODE, Kind.INPUT, Kind.GRADIENT)
        kept = [
            launch
            for node, launch in zip(bound.nodes, bound.node_launches, strict=True)
            if all(plan.placement.owner_of(output).kind in passing for output in node.outputs)
        ]
        ready = partial(self.device.upload_inputs, bound.inputs, examples(graph))  # a run writes over them
        return chain(ready, *compiler.join(kept))

    def bind(self, plan: Plan) -> BoundPlan:
        if self.compiler is not None:
            compiler, counters = self.compiler, self.counters
            compiler.prepare(plan.launched)
            counters.compilations, counters.kernels_built = compiler.compilations, compiler.built
            counters.kernels_cached = compiler.cached
        bound = super().bind(plan)
        if self.compiler is not None:
            bound.launches = self.compiler.join(bound.launches)
        return bound

    def capture(self, step: TracedStep) -> bool:
        """Capture a step that has run before; False where that has to wait.

        Nothing may be allocated once a capture exists. With arenas it is enough that every step has its addresses. A
        device without makes tensors when they are first needed, so there all steps have to run before the first
        capture, and all are captured together.
        """
        if self.device.arenas:
            for each in self._steps:
                each.take_addresses()
            step.record()
        else:
            warm = [each.warm_up() for each in self._steps]
            if not all(warm):
                return False
            for each in self._steps:
                each.record()
        self.device.freeze(f"step {step.name}")
        return True

    def close(self) -> None:
        for step in self._steps:
            step.release()
        super().close()
        self.device.freeze(None)
