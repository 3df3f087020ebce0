"""The captured engine: the device records or compiles a planned step once and replays it."""

from __future__ import annotations

from ttrain.core.errors import CaptureError
from ttrain.device.base import Device, Launch
from ttrain.engine.base import Trace
from ttrain.engine.state import State
from ttrain.engine.static import BoundPlan, StaticEngine, StaticStep
from ttrain.graph.graph import Graph
from ttrain.graph.passes import remove_dead_code
from ttrain.graph.verify import verify
from ttrain.plan.plan import Plan


class TracedEngine(StaticEngine):
    """Replays what was captured: no Python per op on a device that records, compiled kernels on one that compiles.

    All steps of a run are built before the first one is captured; from then on the device refuses to allocate.
    """

    name = "traced"

    def __init__(self, device: Device, state: State, rematerialize: bool = True) -> None:
        super().__init__(device, state, rematerialize)
        self.compiler = device.compiler()
        if self.compiler is not None:
            self.kernels = self.compiler.kernels
        elif not device.supports_capture:
            raise CaptureError(f"device {device.name} can't capture a step. Use engine=static or engine=dynamic.")

    def derive(self, trace: Trace) -> Graph:
        graph = super().derive(trace)
        if self.compiler is not None and self.compiler.fuses:
            try:
                from ttrain.graph.passes.group import group_elementwise
            except ModuleNotFoundError:
                return graph
            graph = verify(remove_dead_code(group_elementwise(graph)), "grouping")
        return graph

    def make_step(self, name: str, plan: Plan) -> StaticStep:
        self._refuse_frozen(name, plan)
        return TracedStep(self, name, plan)

    def _refuse_frozen(self, name: str, plan: Plan) -> None:
        """A kernel that turns a tensor into a host number would repeat that number at every replay."""
        for node in plan.launched:
            frozen = self.kernels[node.op.name].frozen
            if frozen:
                raise CaptureError(
                    f"step {name}: the kernel of {node.op.name} on {self.device.name} reads {', '.join(frozen)} on the "
                    "host, so every replay would repeat the captured value. Use engine=static."
                )

    def bind(self, plan: Plan) -> BoundPlan:
        if self.compiler is not None:
            before = self.compiler.compilations
            self.compiler.prepare(plan.launched)
            self.counters.compilations += self.compiler.compilations - before
        bound = super().bind(plan)
        if self.compiler is not None:
            bound.launches = self.compiler.join(bound.launches)
        return bound

    def close(self) -> None:
        for step in self._steps:
            if isinstance(step, TracedStep):
                step.release()
        self.device.freeze(None)


class TracedStep(StaticStep):
    """First call: launched one by one, which warms kernels up. Second call: captured, then replayed."""

    engine: TracedEngine
    _replay: Launch | None = None

    def run(self, bound: BoundPlan) -> None:
        engine = self.engine
        if engine.compiler is not None:
            if self._replay is None:
                engine.counters.captures += 1
                self._replay = bound.run
            self._replay()
            return
        if not self._calls:
            bound.run()
            return
        if self._replay is None:
            # Every other step takes its addresses now: nothing may be allocated once a capture exists.
            engine.bind_all()
            uploads = engine.device.counters.uploads
            self._replay = engine.device.capture(bound.launches, self.name)
            engine.counters.captures += 1
            engine.counters.host_writes_in_capture += engine.device.counters.uploads - uploads
            engine.device.freeze(f"step {self.name}")
        self._replay()

    def release(self) -> None:
        """Drop the capture, before the device goes."""
        self._replay = None
        self._bound = None
