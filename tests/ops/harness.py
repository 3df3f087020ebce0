"""Runs one op of the registry on a device, launching its graph node by node into poisoned buffers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import ttrain.objectives.distillation  # noqa: F401 - it declares ops of its own
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.base import Buffer, Delivery, Device, serves
from ttrain.device.torch.kernels.common import TORCH_DTYPES, Bind, Context, kernel, spec_of
from ttrain.graph import REGISTRY, Case, Graph, Node, Op, Value, op
from ttrain.plan.lifetime import overwritable
from ttrain.testing.cases import Arrays, cases_of, draw, input_specs, output_name, record
from ttrain.testing.compare import Tolerance, compare, tolerance, verdict


def as_torch(array: np.ndarray | None) -> torch.Tensor | None:
    return None if array is None else torch.from_numpy(np.array(array))


_DRAWN: dict[tuple[int, int, DType], tuple[Op, Case, Arrays, list[torch.Tensor]]] = {}


def drawn(op: Op, case: Case, dtype: DType) -> tuple[Arrays, list[torch.Tensor]]:
    """The inputs of a case, and what the reference makes of them; drawn once for all devices that take the case."""
    key = id(op), id(case), dtype
    if key not in _DRAWN:
        arrays = draw(op, case, dtype)
        for array in arrays.values():
            if array is not None:
                array.setflags(write=False)
        results = op.reference(*map(as_torch, arrays.values()), **case.attributes)
        _DRAWN[key] = op, case, arrays, list(results) if isinstance(results, list | tuple) else [results]
    return _DRAWN[key][2:]


POISON = {DType.INT64: -(2**40), DType.INT32: -(2**30), DType.INT16: -(2**14), DType.BOOL: True}
POISON |= {DType.INT8: 77, DType.UINT8: 177}


def recorded_by_models(op: Op) -> bool:
    """Not those of family fused, which a pass makes for devices with rows for them: tests/native runs them. Nor an
    optimizer's rule by itself: op update runs it.
    """
    return op.family not in ("fused", "rule")


PANELS = (  # heights of the panels of experts, about those of tiles, and widths that no tile divides
    ([0, 64, 1, 0, 63, 65, 130, 0], 70, 131),
    ([0, 0, 200, 0], 33, 64),
    ([(7 * expert) % 5 for expert in range(64)], 64, 20),
    ([3], 128, 129),
)


def panel_cases() -> Iterator[tuple[Op, Case]]:
    """Products of the panels of experts. Nothing cancels in long sums, so that any order of their terms will do."""
    for heights, inner, outer in PANELS:
        rows, experts, values = sum(heights), len(heights), {"offsets": np.cumsum([0, *heights]).tolist()}
        for transpose in (False, True):
            shapes = (rows, inner), (experts, *((outer, inner) if transpose else (inner, outer))), (experts + 1,)
            yield (
                op("grouped_matmul"),
                Case(shapes, {"transpose": transpose}, positive=("rows", "weight"), values=values),
            )
        shapes = (rows, inner), (rows, outer), (experts + 1,)
        yield op("grouped_outer"), Case(shapes, positive=("a", "b"), values=values)


def all_cases(*dtypes: DType, where: Callable[[Op], bool] = recorded_by_models) -> list[Any]:
    """(op, case, dtype) of every case of every op, with readable ids."""
    return [
        pytest.param(op, case, dtype, id=f"{op.name}-{number}-{dtype}")
        for op in REGISTRY.values()
        if where(op)
        for number, case in enumerate(cases_of(op))
        for dtype in dtypes
    ]


def most_cases(where: Callable[[Op], bool] = recorded_by_models) -> list[Any]:
    """(op, case, dtype) of every case in fp32 and of every other one in bf16, for checks that take long."""
    narrow = [case for case in all_cases(DType.BF16, where=where) if int(case.id.split("-")[-2]) % 2 == 0]
    return [*all_cases(DType.FP32, where=where), *narrow]


def only(cases: Sequence[Any], keep: Callable[[Op, Case, DType], bool]) -> list[Any]:
    """Those cases in which a test has something to assert."""
    kept = [case for case in cases if keep(*case.values)]
    assert kept, "no case is left"
    return kept


def shared_with(device: Device, op: Op, case: Case, dtype: DType) -> list[Value]:
    """Inputs whose buffer a plan may give to the first output of a case."""
    graph, _, outputs = record(op, case, dtype)
    node = graph.nodes[0]
    kernel = device.kernels.get(op.name)
    taken = [] if op.aliases(node) or kernel is None else overwritable(node, kernel)
    return [value for value in taken if value.spec == outputs[0].spec]


def every_op(cases: Sequence[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a check of one case a test of each op, which names all of its cases that fail: a test a case would take
    longer to report than to run. The check takes fixtures, and then the values of a case. A test
    whose cases are all skipped is skipped.
    """
    ops: dict[str, list[Any]] = {}
    for case in cases:
        ops.setdefault(case.values[0].name, []).append(case)

    def decorate(check: Callable[..., None]) -> Callable[..., None]:
        parameters = inspect.signature(check).parameters
        own = len(cases[0].values)
        fixtures, names = list(parameters.values())[:-own], list(parameters)[-own:]

        def test(cases: list[Any], **given: Any) -> None:
            values = {case.id: dict(zip(names, case.values, strict=True)) for case in cases}
            raised = {name: outcome(check, {**given, **case}) for name, case in values.items()}
            skipped = {name: error for name, error in raised.items() if isinstance(error, pytest.skip.Exception)}
            failed = {name: error for name, error in raised.items() if error is not None and name not in skipped}
            if failed:
                first = next(iter(failed.values()))
                listed = "\n".join(f"{name}: {error!r}" for name, error in failed.items())
                raise AssertionError(f"{len(failed)} of {len(cases)} cases:\n{listed}") from first
            if len(skipped) == len(cases):
                pytest.skip(str(next(iter(skipped.values()))))

        cases_of = inspect.Parameter("cases", inspect.Parameter.KEYWORD_ONLY)
        test.__signature__ = inspect.Signature([*fixtures, cases_of])  # type: ignore[attr-defined]
        test.__name__, test.__doc__ = check.__name__, check.__doc__
        test.__module__ = check.__module__
        return pytest.mark.parametrize("cases", ops.values(), ids=ops)(test)

    return decorate


def outcome(check: Callable[..., None], given: Mapping[str, Any]) -> BaseException | None:
    """Return the exception of a check that fails or is skipped, else None."""
    try:
        check(**given)
    except (Exception, pytest.skip.Exception, pytest.fail.Exception) as error:
        return error
    return None


class Interpreter:
    """Launches the nodes of a graph in order, every value in memory of its own.

    Outputs and workspace hold NaN before a launch, so a kernel that reads what it should write is found out.
    Ops that have no kernel, and those that `decomposing` names, run as their decompositions.
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
        specs = [None if value is None else value.spec for value in node.inputs]
        served = node.op.view or serves(self.device.kernels, node.op.name, specs, node.attributes)
        if node.op.name in self.decomposing or not served:
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
        outs = [self.buffers[output] for output in node.outputs]
        fp64 = any(value.spec.dtype is DType.FP64 for value in node.values)
        if fp64 and node.op.name == "update" and self.device.name == "cuda":
            pytest.skip("no fp64 learning rate in aten's fused optimizers on CUDA")
        kernel = self.device.kernels[node.op.name]
        results = bound(self, node, ins, outs)()
        if kernel.delivery is Delivery.RETURNS:
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
    specs = kernel.workspace(*node.specs, node.attributes)
    return kernel.bind(ins, outs, node.attributes, [interpreter.allocate(spec) for spec in specs])


def launch_row(bind: Bind, context: Context, ins: Sequence[torch.Tensor], attributes: Mapping[str, Any]) -> None:
    """Launch a function of a call on these tensors, with scratch memory of zeros."""
    row = kernel(bind, context)
    specs = row.workspace([*map(spec_of, ins)], [], attributes)
    row.bind(ins, [], attributes, [torch.zeros(x.shape, dtype=TORCH_DTYPES[x.dtype]) for x in specs])()


def node_of(name: str, inputs: Sequence[torch.Tensor | None], attributes: Mapping[str, Any]) -> Node:
    """A node of an op on such tensors."""
    graph = Graph()
    values = [None if x is None else graph.input(f"{index}", spec_of(x)) for index, x in enumerate(inputs)]
    op(name).record(*values, graph=graph, **attributes)
    return graph.nodes[0]


def bind_node(
    device: Device, node: Node, inputs: Sequence[torch.Tensor | None]
) -> tuple[Callable[[], Any], list[torch.Tensor]]:
    """The launch of a node on these tensors, and its outputs."""
    kernel, aliases = device.kernels[node.op.name], node.op.aliases(node)
    outs = [
        inputs[aliases[index]] if index in aliases else device.allocate(output.spec)
        for index, output in enumerate(node.outputs)
    ]
    work = [device.allocate(spec) for spec in kernel.workspace(*node.specs, node.attributes)]
    return kernel.bind(inputs, outs, node.attributes, work), [out for out in outs if out is not None]


def assert_within(got: np.ndarray, expected: np.ndarray, dtype: DType, allowed: Tolerance, what: str) -> None:
    """Fail where an error exceeds the tolerance; NaN and infinity always do."""
    verdict([compare(got, expected, dtype, allowed, subject=what, quantity="")])


def assert_equals_reference(
    device: Device, op: Op, case: Case, dtype: DType, wide: Sequence[str] = (), times: int = 1, by_parts: bool = False
) -> None:
    """A case within its tolerance of the reference in fp64, with the inputs named `wide` in fp32; equal every time.

    An op that runs `by_parts`, as its decomposition, may be further off.
    """
    (arrays, expected), first = drawn(op, case, dtype), list[np.ndarray]()
    for _ in range(times):
        graph, _, outputs = record(op, case, dtype) if not wide else _widened(op, case, dtype, wide)
        interpreter = Interpreter(device, [op.name] if by_parts else [])
        interpreter.run(graph, arrays)
        found = [interpreter.read(output) for output in outputs]
        first = first or found
        assert len(found) == len(expected) and all(map(np.array_equal, found, first))
    for index, (output, got, value) in enumerate(zip(outputs, first, expected, strict=True)):
        name = output_name(op, case, index)
        unit, allowed = tolerance(op.name, name, output.spec.dtype, dtype)
        if by_parts and dtype is DType.BF16 and (op.name, name) == ("squared_error", "loss"):
            unit, allowed = DType.BF16, Tolerance(4, 4)  # a sum of bf16 squares, each rounded
        allowed = allowed * ((8 if dtype is DType.FP64 else 4) if by_parts else 1)
        assert_within(got, value.double().numpy(), unit, allowed, f"{op.name}.{name}")


def _widened(op: Op, case: Case, dtype: DType, wide: Sequence[str]) -> tuple[Graph, Any, Sequence[Value]]:
    graph = Graph()
    values = [
        None if spec is None else graph.input(name, spec.with_dtype(DType.FP32) if name in wide else spec)
        for name, spec in input_specs(op, case, dtype).items()
    ]
    return graph, None, op.record(*values, graph=graph, **case.attributes)


def assert_same_over(device: Device, op: Op, case: Case, dtype: DType, over: Sequence[Value]) -> None:
    """The bits of a case with its first output in the buffer of each of these inputs are those apart."""
    graph, values, outputs = record(op, case, dtype)
    arrays, apart = drawn(op, case, dtype)[0], Interpreter(device)
    apart.run(graph, arrays)
    for taken in (values[value.name] for value in over):
        again = Interpreter(device)
        for name, value in values.items():
            again.buffers[value] = again.allocate(value.spec)
            again.upload(again.buffers[value], np.asarray(arrays[name]))
        for output in outputs:
            again.buffers[output] = again.buffers[taken] if output is outputs[0] else again.allocate(output.spec)
        again.launch(graph.nodes[0])
        for output in outputs:
            np.testing.assert_array_equal(again.read(output), apart.read(output), err_msg=f"over {taken.name}")
