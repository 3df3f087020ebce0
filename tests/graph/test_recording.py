"""A graph records named values, and nodes with their place in the model; each rule of the verifier is broken once."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.graph.tools import PAIR, recorded
from tests.ttnn.runs import sgd
from ttrain import ops
from ttrain.autodiff import backward
from ttrain.core.errors import GraphError, ShapeError
from ttrain.core.spec import DType, TensorSpec
from ttrain.graph import Graph, Kind, Stage, Value, op
from ttrain.graph.verify import verify
from ttrain.optim.base import EXAMPLE


def test_a_named_value_is_declared_once_and_then_found_again() -> None:
    graph = Graph()
    x, weight = graph.input("x", PAIR), graph.state_value("w", PAIR, Kind.PARAMETER)
    assert graph.input("x", PAIR) is x
    assert graph.state_value("w", PAIR, Kind.PARAMETER) is weight
    assert (list(graph.inputs), list(graph.state)) == (["x"], ["w"])
    assert (x.producer, x.kind.is_state, weight.kind.is_state) == (None, False, True)


@pytest.mark.parametrize(
    ("kind", "shape"), [(Kind.PARAMETER, (3, 2)), (Kind.GRADIENT, PAIR.shape)], ids=["shape", "kind"]
)
def test_another_declaration_under_the_same_name_is_refused(kind: Kind, shape: tuple[int, ...]) -> None:
    graph = Graph()
    graph.state_value("w", PAIR, Kind.PARAMETER)
    said = f"'w' was declared as parameter fp32[2, 3], now asked for as {kind.value} {TensorSpec(shape)}"
    with pytest.raises(GraphError, match=re.escape(said)):
        graph.state_value("w", TensorSpec(shape), kind)


def test_a_node_knows_its_op_values_and_place() -> None:
    graph = Graph()
    x = graph.input("x", PAIR)
    with graph.scope("blocks.0"), graph.scope("norm"), graph.stage(Stage.BACKWARD), graph.segment():
        with graph.within(copy=1):
            y = ops.scale(x, 2.0)
        with graph.within(segment=None):
            z = ops.relu(y)
    first, second = graph.nodes
    assert (first.op, first.inputs, first.outputs) == (op("scale"), (x,), (y,)) and first.attributes == {"factor": 2.0}
    assert (first.scope, first.stage, first.segment, first.copy) == ("blocks.0/norm", Stage.BACKWARD, 0, 1)
    assert (second.segment, second.copy) == (None, 0)
    assert z.producer is second and z.index == 0 and first.input("x") is x


def test_places_are_left_also_after_an_error() -> None:
    graph = Graph()
    x = graph.input("x", PAIR)
    places = graph.scope("block"), graph.stage(Stage.UPDATE), graph.segment(), graph.within(copy=3)
    with pytest.raises(ShapeError), places[0], places[1], places[2], places[3]:
        ops.matmul(x, x)
    ops.relu(x)
    node = graph.nodes[-1]
    assert (node.scope, node.stage, node.segment, node.copy) == ("", Stage.FORWARD, None, 0)
    assert len(graph.nodes) == 1


def test_segments_are_numbered() -> None:
    graph = Graph()
    x = graph.input("x", PAIR)
    with graph.segment():
        with graph.segment():
            ops.relu(x)
        ops.relu(x)
    with graph.segment(recomputed=False):
        ops.relu(x)
    assert [node.segment for node in graph.nodes] == [1, 0, None]


def test_a_value_of_another_graph_is_refused() -> None:
    with pytest.raises(GraphError, match="add: input x:fp32.2, 3. belongs to another graph"):
        ops.add(Graph().input("y", PAIR), Graph().input("x", PAIR))


def test_an_absent_input_is_named() -> None:
    graph = Graph()
    ops.linear(graph.input("x", PAIR), graph.state_value("w", PAIR, Kind.PARAMETER))
    with pytest.raises(GraphError, match="linear: input 'bias' is absent"):
        graph.nodes[0].input("bias")


def test_an_op_with_one_output_returns_it_and_with_more_all_of_them() -> None:
    graph = Graph()
    x, weight = graph.input("x", PAIR), graph.state_value("w", TensorSpec((3,)), Kind.PARAMETER)
    assert isinstance(op("relu").record(x), Value)
    outputs = op("layer_norm").record(x, weight, None, eps=1e-5)
    assert [output.spec for output in outputs] == [PAIR, TensorSpec((2,)), TensorSpec((2,))]
    assert isinstance(op("full").record(graph=graph, spec=PAIR, value=0.0), Value)


def test_a_gradient_amends_the_node_that_can_form_it_with_the_loss() -> None:
    graph = Graph()
    hidden, head = (graph.state_value(name, PAIR, Kind.PARAMETER) for name in ("hidden", "head"))
    targets, weight = graph.input("targets", TensorSpec((2,), DType.INT64)), graph.input("weight", TensorSpec(()))
    loss, plain = ops.head_cross_entropy(hidden, head, None, targets, weight)
    assert loss is plain and [node.outputs for node in graph.nodes] == [(loss,)]
    gradients = backward(loss, [hidden, head])
    heads = [node for node in graph.nodes if node.op.name == "head_cross_entropy"]
    assert [node.outputs for node in heads] == [(loss, *gradients)]
    assert (heads[0].stage, heads[0].attributes["gradients"]) == (Stage.FORWARD, True)
    assert backward(loss, [hidden, head]) == gradients and len(heads[0].outputs) == 3


def test_literal_no_ops_record_nothing() -> None:
    graph = Graph()
    x = graph.input("x", PAIR)
    same = [ops.scale(x, 1.0), ops.reshape(x, PAIR.shape), ops.cast(x, DType.FP32), ops.expand(x, PAIR.shape)]
    seed = graph.input("seed", TensorSpec((), DType.INT64))
    assert all(value is x for value in [*same, ops.dropout(x, seed, 0.0, 0)]) and not graph.nodes


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [
        (0, {}, "missing a required argument: 'x'"),
        (3, {}, "too many positional arguments"),
        (1, {"approximated": "none"}, "unexpected keyword argument 'approximated'"),
        (0, {"y": 1}, "missing a required argument: 'x'"),
        (2, {"approximate": "none"}, "multiple values for argument 'approximate'"),
    ],
)
def test_an_op_is_called_like_the_function_that_declares_it(args: int, kwargs: dict[str, Any], said: str) -> None:
    x = Graph().input("x", TensorSpec((2,)))
    assert ops.gelu(x, approximate="none").producer.attributes == ops.gelu(x, "none").producer.attributes
    with pytest.raises(TypeError, match=said):
        ops.gelu(*(x, "none", 1)[:args], **kwargs)


KNOWN = {"x": PAIR, "w": (2, 3), "lr": TensorSpec(())}
RULE = sgd().rule(EXAMPLE, False)


def test_a_sound_graph_is_returned() -> None:
    graph = recorded(lambda x, w: {"w": (new := ops.accumulate(w, old := x * w)), "y": ops.relu(new) + old}, KNOWN)
    assert verify(graph, "some pass") is graph


# What breaks a rule, by what is told.
BROKEN: dict[str, Any] = {
    r"= tanh\(.* which no earlier node makes": lambda graph, x: (ops.tanh(ops.relu(x)), graph.nodes.reverse()),
    "output 0 reads": lambda graph, x: ([ops.relu(x)], graph.nodes.clear()),
    "outputs that its op does not infer": lambda x: setattr(ops.relu(x), "spec", TensorSpec((3, 2))),
    r"relu\(w:.* reads w:fp32\[2, 3\], but its buffer holds": lambda x, w: (ops.assign(w, x), ops.relu(w)),
    "tanh.* but its buffer holds": lambda x, w: (v := ops.reshape(w, (6,)), ops.accumulate(w, x), ops.tanh(v)),
    "reshape.* but its buffer holds": lambda x, w: (ops.accumulate(w, x), ops.relu(ops.reshape(w, (6,)))),
    "exp.* but its buffer holds": lambda x, w: (v := ops.accumulate(w, x), ops.accumulate(v, x), ops.exp(v)),
    r"output 0 reads w:fp32\[2, 3\], but its buffer holds": lambda x, w: ([w], ops.assign(w, x)),
    "overwrites x.* which is not state": lambda x, w: (ops.accumulate(x, w),),
    "overwrites %.* which is not state": lambda x, w: (ops.accumulate(ops.relu(x), w),),
    r"overwrites w:fp32\[2, 3\] twice": lambda x, w, lr: ops.update(RULE, [[w, w], [x, x]], lr, lr) and None,
}


@pytest.mark.parametrize("said", BROKEN)
def test_a_broken_rule_is_named_with_the_pass(said: str) -> None:
    with pytest.raises(GraphError, match=f"^after some pass: .*{said}"):
        verify(recorded(BROKEN[said], KNOWN), "some pass")
