"""Composite ops on a device that has no kernel for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.graph.tools import assert_same_meaning, names, parameter
from ttrain import ops
from ttrain.core.errors import GraphError
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.base import Kernel
from ttrain.graph import REGISTRY, Graph, Node, Op, Value
from ttrain.graph.passes import decompose, remove_dead_code
from ttrain.graph.verify import verify
from ttrain.models.gpt import GPT
from ttrain.models.settings import GPTConfig
from ttrain.optim.adamw import AdamW
from ttrain.optim.settings import AdamWConfig
from ttrain.train.steps.step_graph import StepGraph

COMPOSITE = {item.name for item in REGISTRY.values() if type(item).decompose is not Op.decompose}
PRIMITIVE = {item.name for item in REGISTRY.values()} - COMPOSITE


def train_graph(compute: DType = DType.FP32) -> Graph:
    sizes = {"layers": 2, "heads": 2, "width": 4, "context": 3, "vocabulary": 2}
    model = GPT(GPTConfig(dropout=0.3, **sizes), compute)
    graph = Graph()
    StepGraph(model, AdamW(AdamWConfig()), rows=2).trace_train(graph)
    return verify(graph, "recording")


def test_there_are_composite_and_primitive_ops() -> None:
    assert {"attention", "attention_grad", "update", "head_cross_entropy"} <= COMPOSITE
    assert {"matmul", "add", "softmax", "reduce_sum"} <= PRIMITIVE


def test_a_training_step_on_a_device_with_primitive_kernels_only_means_the_same() -> None:
    graph = train_graph()
    assert COMPOSITE & set(names(graph))
    simple = verify(remove_dead_code(decompose(graph, PRIMITIVE, "simple")), "decomposition")
    assert not COMPOSITE & set(names(simple))
    assert_same_meaning(graph, simple)


@pytest.mark.parametrize("compute", [DType.FP32, DType.BF16])
@pytest.mark.parametrize("absent", sorted(COMPOSITE))
def test_each_composite_op_can_be_missing_alone(absent: str, compute: DType) -> None:
    supported = {item.name for item in REGISTRY.values()} - {absent}
    simple = verify(decompose(train_graph(compute), supported, "simple"), "decomposition")
    assert absent not in names(simple)


def test_a_supported_op_is_left_alone_and_so_is_a_view() -> None:
    graph = Graph()
    x = ops.reshape(graph.input("x", TensorSpec((2, 3))), (3, 2))
    graph.output("y", ops.linear(x, parameter(graph, "w", 4, 2)))
    assert names(decompose(graph, {"linear"}, "simple")) == ["reshape", "linear"]


def test_a_node_that_its_row_does_not_support_becomes_its_body() -> None:
    def narrow(inputs: Sequence[TensorSpec | None], attributes: Mapping[str, Any]) -> bool:
        assert inputs[0] is not None and inputs[2] is None and attributes == {"activation": "relu"}
        return inputs[0].shape[1] < 4

    rows = dict.fromkeys(PRIMITIVE, Kernel(lambda *_: lambda: None))
    rows["linear"] = Kernel(lambda *_: lambda: None, supports=narrow)
    graph = Graph()
    for width in (3, 5):
        x, w = graph.input(f"x{width}", TensorSpec((2, width))), parameter(graph, f"w{width}", 4, width)
        graph.output(f"y{width}", ops.linear(x, w, activation="relu"))
    assert names(decompose(graph, rows, "simple")) == ["linear", "matmul", "relu"]


def test_a_primitive_without_kernel_is_named() -> None:
    graph = Graph()
    ops.relu(graph.input("x", TensorSpec((2,))))
    with pytest.raises(GraphError, match="device simple has no kernel for relu, and the op has no decomposition"):
        decompose(graph, {"add"}, "simple")


def test_parts_take_the_place_of_the_op() -> None:
    graph = Graph()
    x = graph.input("x", TensorSpec((2, 3)))
    with graph.scope("up"), graph.segment(), graph.within(copy=1):
        graph.output("y", ops.linear(x, parameter(graph, "w", 4, 3), parameter(graph, "b", 4)))
    places = {(node.op.name, node.scope, node.segment, node.copy) for node in decompose(graph, PRIMITIVE, "d").nodes}
    assert places == {("matmul", "up", 0, 1), ("add", "up", 0, 1)}


def test_a_value_that_a_decomposition_leaves_out_is_not_read_in_silence() -> None:
    class Halved(Op):
        name, family, inputs, outputs = "halved", "test", ("x",), ("half", "rest")

        def infer(self, x: TensorSpec) -> list[TensorSpec]:
            return [x, x]

        def decompose(self, node: Node, inputs: tuple[Value | None, ...]) -> Sequence[Value]:
            assert inputs[0] is not None
            return [ops.scale(inputs[0], 0.5)]

    graph = Graph()
    _, rest = Halved().record(graph.input("x", TensorSpec((3,))))
    graph.output("y", ops.relu(rest))
    with pytest.raises(GraphError, match="relu.*left out"):
        decompose(graph, {"relu", *PRIMITIVE}, "half")


def test_a_decomposition_keeps_the_specs() -> None:
    class Widened(Op):
        name, family, inputs = "widened", "test", ("x",)

        def infer(self, x: TensorSpec) -> TensorSpec:
            return x

        def decompose(self, node: Node, inputs: tuple[Value | None, ...]) -> Sequence[Value]:
            assert inputs[0] is not None
            return [ops.cast(inputs[0], DType.FP64)]

    graph = Graph()
    graph.output("y", Widened().record(graph.input("x", TensorSpec((2,)))))
    with pytest.raises(GraphError, match="the specs must be equal"):
        decompose(graph, {"cast"}, "simple")


def test_ops_that_decompose_into_each_other_are_named() -> None:
    class Left(Op):
        name, family, inputs = "left", "test", ("x",)

        def infer(self, x: TensorSpec) -> TensorSpec:
            return x

        def decompose(self, node: Node, inputs: tuple[Value | None, ...]) -> Sequence[Value]:
            return [Right().record(*inputs)]

    class Right(Left):
        name = "right"

        def decompose(self, node: Node, inputs: tuple[Value | None, ...]) -> Sequence[Value]:
            return [Left().record(*inputs)]

    graph = Graph()
    Left().record(graph.input("x", TensorSpec((2,))))
    with pytest.raises(GraphError, match="the decompositions of (left|right) lead back to themselves"):
        decompose(graph, {"add"}, "simple")
