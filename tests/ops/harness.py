"""Runs one op of the registry on a device: draws the inputs of a case, records a graph, launches it node by node."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

import ttrain.ops  # noqa: F401 - fills the registry
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.base import Buffer, Delivery, Device
from ttrain.graph.graph import Graph, Kind, Node, Value
from ttrain.graph.op import REGISTRY, Case, Op

Arrays = dict[str, np.ndarray | None]  # by input name; None where an optional input is absent
TORCH = {DType.FP64: torch.float64, DType.FP32: torch.float32, DType.BF16: torch.bfloat16}
POISON = {DType.INT64: -(2**40), DType.INT32: -(2**30), DType.BOOL: True}


def all_cases(*dtypes: DType, where: Callable[[Op], bool] = lambda op: True) -> list[Any]:
    """(op, case, dtype) of every case of every op, with readable ids, for parametrize."""
    import pytest

    return [
        pytest.param(op, case, dtype, id=f"{op.name}-{number}-{dtype}")
        for op in REGISTRY
        if where(op)
        for number, case in enumerate(op.cases())
        for dtype in dtypes
    ]


def input_names(op: Op, case: Case) -> list[str]:
    """Names of the inputs of a case in order; the tensors of a list are numbered."""
    lists = [name for name in op.inputs if name.endswith("*")]
    single = len(op.inputs) - len(lists)
    listed = len(case.shapes) - single
    each = case.attributes.get("count", listed) if lists else 0
    present = listed // each if each else 0  # trailing lists may be absent
    names: list[str] = []
    for name in op.inputs:
        if not name.endswith("*"):
            names.append(name.rstrip("?"))
        elif lists.index(name) < present:
            names += [f"{name[:-1]}.{number}" for number in range(each)]
    assert len(names) == len(case.shapes), f"{op.name}: {names} for {case.shapes}"
    return names


def input_specs(op: Op, case: Case, dtype: DType) -> dict[str, TensorSpec | None]:
    """Specs of the inputs of a case where the step computes in `dtype`."""
    specs: dict[str, TensorSpec | None] = {}
    for name, shape in zip(input_names(op, case), case.shapes, strict=True):
        if shape is None:
            specs[name] = None
        elif name in case.integers or name in ("targets", "ids", "seed"):
            specs[name] = TensorSpec(shape, DType.INT64)
        else:
            specs[name] = TensorSpec(shape, dtype.wide if name.partition(".")[0] in op.wide else dtype)
    return specs


def rounded(array: np.ndarray, dtype: DType) -> np.ndarray:
    """The values of `array` in `dtype`, as fp64; integers stay."""
    if not dtype.is_floating:
        return array
    return torch.from_numpy(np.array(array)).to(TORCH[dtype]).double().numpy()


def draw(op: Op, case: Case, dtype: DType) -> Arrays:
    """Inputs of a case: the same numbers every time, representable in their dtypes."""
    generator = np.random.default_rng(zlib.crc32(f"{op.name} {case.shapes} {sorted(case.attributes)}".encode()))
    arrays: Arrays = {}
    for name, spec in input_specs(op, case, dtype).items():
        if spec is None:
            arrays[name] = None
        elif spec.dtype is DType.INT64:
            values = generator.integers(0, case.integers[name], spec.shape)
            if name in case.holes:
                values.reshape(-1)[::3] = -1
            arrays[name] = values
        else:
            values = (
                generator.uniform(0.5, 1.5, spec.shape) if name in case.positive else generator.normal(size=spec.shape)
            )
            arrays[name] = rounded(np.asarray(values), spec.dtype)
    given = {name: as_torch(array) for name, array in arrays.items()}
    for name, value in op.derived(given, case.attributes).items():
        spec = input_specs(op, case, dtype)[name]
        assert spec is not None
        arrays[name] = rounded(value.numpy(), spec.dtype)
    return arrays


def as_torch(array: np.ndarray | None) -> torch.Tensor | None:
    return None if array is None else torch.from_numpy(np.array(array))


def reference(op: Op, case: Case, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """Outputs of the op's reference in fp64."""
    results = op.reference(*tensors, **case.attributes)
    return list(results) if isinstance(results, list | tuple) else [results]


def record(op: Op, case: Case, dtype: DType) -> tuple[Graph, dict[str, Value], tuple[Value, ...]]:
    """A graph that applies the op to step inputs named as the op names them."""
    graph = Graph()
    values = {name: graph.input(name, spec) for name, spec in input_specs(op, case, dtype).items() if spec is not None}
    ordered = [values.get(name) for name in input_names(op, case)]
    outputs = op.record(*ordered, graph=graph, **case.attributes)
    return graph, values, outputs if isinstance(outputs, tuple) else (outputs,)


class Interpreter:
    """Launches the nodes of a graph in order, every value in memory of its own.

    Outputs and workspace hold NaN before a launch, so a kernel that reads what it should write is found out.
    `decomposing` names ops that run as their decompositions.
    """

    def __init__(self, device: Device, decomposing: Sequence[str] = ()) -> None:
        self.device, self.decomposing = device, decomposing
        self.buffers: dict[Value, Buffer] = {}

    def run(self, graph: Graph, feeds: Mapping[str, np.ndarray | None]) -> None:
        for name, value in graph.inputs.items():
            self.buffers[value] = self.allocate(value.spec)
            given = feeds[name]
            assert given is not None
            self.upload(self.buffers[value], given)
        done = 0
        while done < len(graph.nodes):  # a decomposition appends nodes, and they run where it stands
            self._node(graph, graph.nodes[done])
            done += 1

    def upload(self, buffer: torch.Tensor, array: np.ndarray) -> None:
        if buffer.dtype is torch.bfloat16:
            array = array.astype(np.float32)
        self.device.upload(buffer, np.array(array, order="C"))

    def allocate(self, spec: TensorSpec) -> Buffer:
        buffer = self.device.allocate(spec)
        buffer.fill_(float("nan") if spec.dtype.is_floating else POISON[spec.dtype])
        return buffer

    def read(self, value: Value) -> np.ndarray:
        buffer = self.buffers[value]
        return (
            buffer.detach().cpu().double().numpy() if buffer.dtype.is_floating_point else self.device.download(buffer)
        )

    def _node(self, graph: Graph, node: Node) -> None:
        if all(output in self.buffers for output in node.outputs):
            return
        if node.op.name in self.decomposing:
            self._decompose(graph, node)
            return
        aliases = node.op.aliases(node)
        for index, output in enumerate(node.outputs):
            shared = node.inputs[aliases[index]] if index in aliases else None
            if shared is None:
                self.buffers[output] = self.allocate(output.spec)
            else:
                self.buffers[output] = self.buffers[shared].view(output.spec.shape)
        if not node.op.view:
            self.launch(node)

    def launch(self, node: Node) -> None:
        ins = [None if value is None else self.buffers[value] for value in node.inputs]
        self.launch_on(node, ins, [self.buffers[output] for output in node.outputs])

    def launch_on(self, node: Node, ins: Sequence[Buffer | None], outs: Sequence[Buffer]) -> None:
        kernel = self.device.kernels[node.op.name]
        results = bound(self, node, ins, outs)()
        if kernel.delivery is Delivery.FRESH:
            for result, out in zip(results, outs, strict=True):
                self.device.copy(result, out)

    def _decompose(self, graph: Graph, node: Node) -> None:
        position = len(graph.nodes)
        parts = node.op.decompose(node, node.inputs)
        assert parts is not None, f"{node.op.name} has no decomposition"
        for part in graph.nodes[position:]:
            self._node(graph, part)
        for output, part in zip(node.outputs, parts, strict=False):
            self.buffers[output] = self.buffers[part]


def bound(
    interpreter: Interpreter, node: Node, ins: Sequence[Buffer | None], outs: Sequence[Buffer]
) -> Callable[[], Any]:
    """The launch of a node on these buffers, with poisoned workspace."""
    kernel = interpreter.device.kernels[node.op.name]
    in_specs = [None if value is None else value.spec for value in node.inputs]
    specs = kernel.workspace_specs(in_specs, [output.spec for output in node.outputs], node.attributes)
    return kernel.bind(ins, outs, node.attributes, [interpreter.allocate(spec) for spec in specs])


def inputs_of_kind(graph: Graph, kind: Kind) -> list[Value]:
    return [value for value in graph.inputs.values() if value.kind is kind]
