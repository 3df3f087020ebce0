"""Composite ops on a device that has no kernel for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from tests.graph.tools import assert_same_meaning, names, parameter, recorded
from tests.ttnn.runs import adamw, gpt
from ttrain import ops
from ttrain.core.errors import GraphError
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.base import Kernel
from ttrain.graph import REGISTRY, Graph, Node, Op, Value
from ttrain.graph.passes import decompose, remove_dead_code
from ttrain.graph.verify import verify
from ttrain.train.steps.step_graph import StepGraph

COMPOSITE = {item.name for item in REGISTRY.values() if type(item).decompose is not Op.decompose}
PRIMITIVE = {item.name for item in REGISTRY.values()} - COMPOSITE


def train_graph(compute: DType = DType.FP32) -> Graph:
    sizes = {"layers": 2, "heads": 2, "width": 4, "context": 3, "vocabulary": 2}
    model = gpt(compute, dropout=0.3, **sizes)
    graph = Graph()
    StepGraph(model, adamw(), rows=2).trace_train(graph)
    return verify(graph, "recording")


def test_a_training_step_on_a_device_with_primitive_kernels_only_means_the_same() -> None:
    assert {"attention", "attention_grad", "update", "head_cross_entropy"} <= COMPOSITE
    assert {"matmul", "add", "softmax", "reduce_sum"} <= PRIMITIVE
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


def test_a_node_that_its_row_does_not_support_becomes_its_body() -> None:
    def narrow(inputs: Sequence[TensorSpec | None], attributes: Mapping[str, Any]) -> bool:
        assert inputs[0] is not None and inputs[2] is None and attributes == {"activation": "relu"}
        return inputs[0].shape[1] < 4

    rows = dict.fromkeys(PRIMITIVE, Kernel(lambda *_: lambda: None))
    rows["linear"] = Kernel(lambda *_: lambda: None, supports=narrow)
    graph = Graph()
    for width in (3, 5):
        x, w = graph.input(f"x{width}", TensorSpec((2, width))), parameter(graph, f"w{width}", 4, width)
        graph.output(f"y{width}", ops.reshape(ops.linear(x, w, activation="relu"), (4, 2)))
    del rows["reshape"]  # a view needs no row
    assert names(decompose(graph, rows, "simple")) == ["linear", "reshape", "matmul", "relu", "reshape"]


def test_parts_take_the_place_of_the_op() -> None:
    graph = Graph()
    x = graph.input("x", TensorSpec((2, 3)))
    with graph.scope("up"), graph.segment(), graph.within(copy=1):
        graph.output("y", ops.linear(x, parameter(graph, "w", 4, 3), parameter(graph, "b", 4)))
    places = {(node.op.name, node.scope, node.segment, node.copy) for node in decompose(graph, PRIMITIVE, "d").nodes}
    assert places == {("matmul", "up", 0, 1), ("add", "up", 0, 1)}


class Parted(Op):
    """An op of one input whose decomposition the test gives."""

    family, inputs = "test", ("x",)

    def __init__(self, name: str, parts: Callable[[Value], Any], outputs: tuple[str, ...] = ("y",)) -> None:
        self.name, self.parts, self.outputs = name, parts, outputs

    def infer(self, x: TensorSpec) -> list[TensorSpec]:
        return [x] * len(self.outputs)

    def decompose(self, node: Node, inputs: tuple[Value | None, ...]) -> Sequence[Value]:
        assert inputs[0] is not None
        return [self.parts(inputs[0])]


LEFT = Parted("left", lambda x: RIGHT.record(x))
RIGHT = Parted("right", LEFT.record)
HALVED = Parted("halved", lambda x: x * 0.5, ("half", "rest"))
WIDENED = Parted("widened", lambda x: ops.cast(x, DType.FP64))
REFUSED: dict[str, tuple[Callable[[Value], Value], str]] = {
    "no kernel": (lambda x: ops.relu(x), "device simple has no kernel for relu, and the op has no decomposition"),
    "an output left out": (lambda x: ops.sqrt(HALVED.record(x)[1]), "sqrt.*left out"),
    "another spec": (lambda x: WIDENED.record(x), "the specs must be equal"),
    "a circle": (lambda x: LEFT.record(x), "the decompositions of (left|right) lead back to themselves"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_can_not_be_decomposed_is_named(why: str) -> None:
    make, said = REFUSED[why]
    with pytest.raises(GraphError, match=said):
        decompose(recorded(make, {"x": TensorSpec((2,))}), PRIMITIVE - {"relu"}, "simple")
