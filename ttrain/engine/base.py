"""The contract of an engine: it builds steps over one state and runs them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ttrain.core.errors import GraphError, ShapeError
from ttrain.core.names import did_you_mean
from ttrain.core.spec import TensorSpec
from ttrain.device.base import NUMPY_DTYPES, Buffer, Device, Kernel, Launch, filled, of_side
from ttrain.engine.state import Placed, State
from ttrain.graph import Graph, Node, Value
from ttrain.graph.place import place
from ttrain.plan.plan import Plan

Trace = Callable[[Graph], None]  # records one step: declares inputs and state, marks outputs
Look = Callable[[Node, Callable[[Value], np.ndarray]], bool]  # (a node that has run, how to read values): no further?
HostValue = np.ndarray | float | int
# Kind of a declared dtype -> kinds that numpy casts to it as the same.
_TAKEN = {"f": "fiub", "i": "iub", "u": "ub", "b": "b"}


@dataclass
class EngineCounters:
    """Counts what an engine captures and compiles.

    `kernels_built` were compiled by this process, `kernels_cached` were found on the disk.
    """

    captures: int = 0
    compilations: int = 0
    kernels_built: int = 0
    kernels_cached: int = 0


class Step(ABC):
    """One built step. Calling it runs it once and returns its outputs by name."""

    plan: Plan | None = None

    def __init__(self, engine: Engine, name: str, graph: Graph, fixed: bool = True) -> None:
        """Upload all inputs, or if the graph is `fixed`, only those that it reads."""
        self.engine, self.name = engine, name
        self.inputs = {key: value.spec for key, value in graph.inputs.items()}
        read = {value for node in graph.nodes for value in node.inputs} | {*graph.outputs.values()}
        self.uploads = {key: value.spec for key, value in graph.inputs.items() if value in read or not fixed}
        self._expected = []
        for key, spec in self.uploads.items():  # where several chips share a batch, fields hold the rows of all of them
            whole = (engine.device.chips * spec.shape[0], *spec.shape[1:]) if spec.rank >= 2 else spec.shape
            self._expected.append((key, NUMPY_DTYPES[spec.dtype], spec.shape, whole))
        self._what = f"step {name}"  # for a device that watches launches

    def __call__(self, inputs: Mapping[str, HostValue]) -> dict[str, Any]:
        """Run on host values; scalar outputs come as float, others as arrays.

        Raises ShapeError naming the first input that is missing, unknown or of another shape.
        """
        return self.start(inputs)()

    @abstractmethod
    def start(self, inputs: Mapping[str, HostValue]) -> Callable[[], dict[str, Any]]:
        """Launch one run; the returned call waits for it and reads the outputs."""

    def prefetch(self, inputs: Mapping[str, HostValue]) -> None:
        """Let the device take in the inputs of the next call while it computes. Does nothing if it can't.

        The next call still gets all its inputs, and uploads those that differ.
        """

    @abstractmethod
    def inspect(self, inputs: Mapping[str, HostValue], look: Look, ready: Launch | None = None) -> bool:
        """Run node by node, and show each node to `look` while its outputs are there, until `look` returns True.

        Returns True if it did; later nodes have not run then. `ready` is called once the inputs are there. This finds
        the first NaN of a step, and profiles one.
        """

    def launches(self) -> list[Launch]:
        """Return the launches of one run, where they are fixed; none otherwise."""
        return []

    def _arrays(self, given: Mapping[str, HostValue]) -> dict[str, np.ndarray]:
        """Inputs that it reads, as arrays of the declared shape. A changed shape is refused, never rebuilt for."""
        if given.keys() != self.inputs.keys():
            self._refuse_names(given)
        arrays = {}
        for key, dtype, shape, whole in self._expected:
            array = np.asarray(given[key])
            if array.dtype is not dtype:
                if array.dtype.kind not in _TAKEN[dtype.kind]:
                    raise ShapeError(f"step {self.name}: input {key!r} has dtype {array.dtype}, expected {dtype}.")
                array = array.astype(dtype, copy=False)
            if array.shape != shape and array.shape != whole:
                told = f"step {self.name}: input {key!r} has shape {list(array.shape)}, expected {list(whole)}"
                raise ShapeError(f"{told}. A built step has fixed shapes; build another step for another shape.")
            arrays[key] = array
        return arrays

    def _refuse_names(self, given: Mapping[str, HostValue]) -> None:
        for key in sorted(given.keys() - self.inputs.keys()):
            raise ShapeError(f"step {self.name}: unknown input {key!r}. {did_you_mean(key, self.inputs)}")
        for key, spec in self.inputs.items():
            if key not in given:
                raise ShapeError(f"step {self.name}: input {key!r} ({spec}) is missing.")


class Engine(ABC):
    """Builds steps that share one state on one device."""

    name: str

    def __init__(self, device: Device, state: State) -> None:
        self.device, self.state = device, state
        self.kernels: Mapping[str, Kernel] = device.kernels
        self.counters = EngineCounters()

    @abstractmethod
    def build(self, name: str, trace: Trace) -> Step:
        """Return a step from the function that records it."""

    @property
    def plans(self) -> list[Plan]:
        """Return the plans of the steps built so far, where steps are planned."""
        return []

    def close(self) -> None:
        """Release what was built; the engine can build anew. The device outlives it."""


class Bound(ABC):
    """Finds the buffers of values, on a side each, and binds nodes to them; a subclass says where memory lies.

    `owner_of` tells of a value the one whose buffer it shares. Offsets are bytes.
    """

    def __init__(self, engine: Engine, owner_of: Callable[[Value], Value]) -> None:
        self.device, self.state, self.kernels = engine.device, engine.state, engine.kernels
        self.owner_of = owner_of

    @abstractmethod
    def placed(self, owner: Value) -> Placed:
        """Return the place of a value that is not state and owns its buffer."""

    @abstractmethod
    def workspace(self, node: Node, specs: Sequence[TensorSpec]) -> list[Buffer]:
        """The scratch buffers of a node, one for each spec."""

    def buffer(self, value: Value) -> Buffer:
        """Return the buffer of a value: its owner's, under the value's own shape and dtype."""
        owner = self.owner_of(value)
        arena, offset, buffer = self.state.placed(owner.name) if owner.kind.is_state else self.placed(owner)
        return buffer if owner.spec == value.spec else self.device.side(owner.on_host).place(arena, offset, value.spec)

    def download(self, value: Value) -> np.ndarray:
        """A host copy of what its buffer holds now."""
        return self.device.side(value.on_host).download(self.buffer(value))

    def bind(self, node: Node) -> Launch:
        """The call without arguments that runs a node."""
        kernel = of_side(self.kernels, node.on_host)[node.op.name]
        ins = [None if value is None else self.buffer(value) for value in node.inputs]
        outs = [self.buffer(output) for output in node.outputs]
        workspace = self.workspace(node, kernel.workspace(*node.specs, node.attributes))
        return self.device.side(node.on_host).bind(kernel, ins, outs, node.attributes, workspace)


def examples(graph: Graph) -> dict[str, np.ndarray]:
    """Arrays that a step may be given, by input, to run it before a run has made any."""
    return {name: filled(value.spec, value.example) for name, value in graph.inputs.items()}


def host_outputs(device: Device, values: Mapping[str, Value], buffers: Mapping[str, Buffer]) -> dict[str, Any]:
    """Return the outputs of a step on the host: scalars as float."""
    if device.host is None:
        arrays = device.download_outputs(buffers)
    else:
        arrays = {name: device.side(values[name].on_host).download(buffer) for name, buffer in buffers.items()}
    return {name: float(array) if array.ndim == 0 else array for name, array in arrays.items()}


def traced_graph(trace: Trace, device: Device | None = None) -> Graph:
    """The graph that a trace function records; for a device with a host beside it, its nodes are placed."""
    graph = Graph()
    trace(graph)
    if not graph.outputs and not graph.nodes:
        raise GraphError("the traced step records nothing")
    return graph if device is None or device.host is None else place(graph, device.offloaded)
