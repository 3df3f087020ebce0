"""Every row of the table against the op's reference in fp64, on ttnn's reference functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("ttnn", reason="the package ttnn is not installed")
import torch

import ttrain.ops  # noqa: F401 - fills the registry
from tests.ops.harness import every_op
from tests.ttnn.runs import golden
from ttrain.core.spec import DType, TensorSpec
from ttrain.engine.state import State, StateTensor
from ttrain.engine.static import StaticEngine
from ttrain.graph import REGISTRY, Case, Graph, Kind, Op, Value
from ttrain.verify.cases import cases_of, draw

TOLERANCE = 2e-5
EXCHANGES = {"all_reduce_start", "reduce_scatter_start", "collectives_done", "all_gather_state"}
NOT_RECORDED = {*EXCHANGES, "block_norms", "token_windows"}  # by a step of a mesh: of ranks, and of ids that lie there


def cases() -> list[Any]:
    return [
        pytest.param(op, case, id=f"{op.name}-{number}")
        for op in REGISTRY.values()
        for number, case in enumerate(cases_of(op))
        if not op.view and op.name not in NOT_RECORDED
    ]


class Example:
    """Random inputs of a case, and the graph of the one op on them. Inputs that the op overwrites are state."""

    def __init__(self, op: Op, case: Case) -> None:
        self.op, self.case = op, case
        self.arrays = draw(op, case, DType.FP32)

    @staticmethod
    def torch(array: np.ndarray | None) -> Any:
        return None if array is None else torch.from_numpy(np.asarray(array))

    def record(self, graph: Graph) -> list[Value]:
        written = set()
        inputs: list[Value | None] = []
        names = list(self.arrays)
        specs = {n: None if a is None else TensorSpec(a.shape, dtype(a)) for n, a in self.arrays.items()}
        probe = Graph()
        node = probe.append(
            self.op,
            tuple(None if specs[n] is None else probe.input(n, specs[n]) for n in names),
            self.case.attributes,
        )
        if not self.op.view:
            written = {names[index] for index in self.op.aliases(node).values()}
        for name in names:
            spec = specs[name]
            if spec is None:
                inputs.append(None)
            elif name in written:
                inputs.append(graph.state_value(name, spec, Kind.PARAMETER))
            else:
                inputs.append(graph.input(name, spec))
        self.written = sorted(written)
        return list(graph.append(self.op, tuple(inputs), self.case.attributes).outputs)

    def run(self) -> list[np.ndarray]:
        device = golden()
        graph = Graph()
        outputs = self.record(graph)
        state = State(device, [StateTensor(n, v.spec, v.kind) for n, v in graph.state.items()])
        for name in self.written:
            state.write(name, np.asarray(self.arrays[name], np.float32))

        def trace(graph: Graph) -> None:
            for number, value in enumerate(self.record(graph)):
                graph.output(str(number), value)

        step = StaticEngine(device, state).build("step", trace)
        inputs = {n: a for n, a in self.arrays.items() if a is not None and n not in self.written and n in step.inputs}
        given = {n: a if a.dtype.kind == "i" else a.astype(np.float32) for n, a in inputs.items()}
        results: dict[str, Any] = {}
        for _ in range(1 if self.written else 2):  # twice: the second run reuses what the first one bound
            results = step(given)
        return [np.asarray(results.get(str(number))) for number in range(len(outputs))]

    def expected(self) -> list[np.ndarray]:
        tensors = [self.torch(array) for array in self.arrays.values()]
        result = self.op.reference(*tensors, **self.case.attributes)
        several = result if isinstance(result, (list, tuple)) else [result]
        return [tensor.numpy() for tensor in several]


def dtype(array: np.ndarray) -> DType:
    return DType.INT64 if array.dtype.kind == "i" else DType.FP32


@every_op(cases())
def test_row_equals_reference(op: Op, case: Case) -> None:
    check_row(op, case)


def check_row(op: Op, case: Case) -> None:
    example = Example(op, case)
    actual, expected = example.run(), example.expected()
    for name, one, two in zip(range(len(actual)), actual, expected, strict=False):
        scale = max(1.0, float(np.abs(two).max(initial=0)))
        error = float(np.abs(one - two).max(initial=0)) / scale
        assert error < TOLERANCE, f"{op.name} output {name}: {error:.2e}"
