"""The grouping pass: any graph computes what it did, and what belongs together is together."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ttrain import ops
from ttrain.core.spec import DType, TensorSpec
from ttrain.graph import Graph, Kind, Stage, Value, op
from ttrain.graph.passes import remove_dead_code
from ttrain.graph.passes.group import group
from ttrain.graph.verify import verify
from ttrain.testing.cases import by_reference

SPEC = TensorSpec((4, 6))


def interpret(graph: Graph, feeds: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Outputs and final state of a graph by the references of its ops, in fp64."""
    known = by_reference(graph, feeds)
    root, final = (
        {value: name for name, value in graph.state.items()},
        {name: known[v] for name, v in graph.state.items()},
    )
    for node in graph.nodes:
        for index, source in node.op.aliases(node).items():
            value = node.inputs[source]
            if not node.op.view and value in root:
                root[node.outputs[index]] = root[value]
                final[root[value]] = known[node.outputs[index]]
    return {name: known[value] for name, value in graph.outputs.items()}, final


def assert_same(graph: Graph) -> Graph:
    """Group a graph and compare both on random values; returns the grouped one."""
    verify(graph, "recording")
    grouped = verify(remove_dead_code(group(graph)), "grouping")
    generator, feeds = torch.Generator().manual_seed(5), {}
    for name, value in (*graph.inputs.items(), *graph.state.items()):
        integer = value.spec.dtype is DType.INT64
        whole = torch.randint(0, 4, value.shape, generator=generator)
        feeds[name] = whole if integer else torch.randn(value.shape, generator=generator, dtype=torch.float64)
    for before, after in zip(interpret(graph, feeds), interpret(grouped, feeds), strict=True):
        assert before.keys() == after.keys()
        for name, tensor in before.items():
            torch.testing.assert_close(after[name], tensor, rtol=1e-12, atol=1e-12)
    return grouped


def names(graph: Graph) -> list[str]:
    return [node.op.name for node in graph.nodes if not node.op.view]


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Elementwise nodes, products, views, and state that is read, then overwritten, then read in its new version."""
    graph = Graph()
    values = [graph.input("a", SPEC), graph.input("b", SPEC), graph.state_value("s", SPEC, Kind.PARAMETER)]
    small, seed = graph.input("small", TensorSpec((6,))), graph.input("seed", TensorSpec((), DType.INT64))
    for number in range(draw(st.integers(2, 14))):
        kind = draw(st.sampled_from(["add", "small", "gelu", "dropout", "matmul", "view", "assign", "stage", "keep"]))
        x, y = draw(st.sampled_from(values)), draw(st.sampled_from(values))
        if kind == "add":
            values.append(ops.add(x, y))
        elif kind == "small":
            values.append(ops.multiply(x, small))
        elif kind == "gelu":
            values.append(op("gelu_grad").record(x, y, approximate="tanh"))
        elif kind == "dropout":
            values.append(ops.dropout(x, seed, 0.5, number))
        elif kind == "matmul":
            values.append(ops.matmul(ops.matmul(x, y, transpose_b=True), x))
        elif kind == "view":
            values.append(ops.reshape(ops.scale(ops.reshape(x, (24,)), 2.0), SPEC.shape))
        elif kind == "assign":
            old = [value for value in values if is_version_of_state(value)]
            values = [value for value in values if value not in old]
            values.append(ops.assign(old[-1], ops.add(x, y) if x not in old or y not in old else ops.scale(x, 3.0)))
        elif kind == "stage":
            graph._marks = {"stage": draw(st.sampled_from(list(Stage)))}
        else:
            graph.output(f"kept {number}", ops.tanh(x))
    graph.output("last", values[-1])
    return graph


def is_version_of_state(value: Value) -> bool:
    while value.producer is not None and value.producer.op.aliases(value.producer):
        value = value.producer.values[0]
    return value.kind.is_state


@settings(max_examples=150, deadline=None)
@given(graph=graphs())
def test_any_graph_computes_what_it_did(graph: Graph) -> None:
    assert_same(graph)


def test_a_chain_becomes_one_node() -> None:
    graph = Graph()
    x, bias = graph.input("x", SPEC), graph.input("bias", TensorSpec((6,)))
    graph.output("y", ops.tanh(ops.scale(ops.gelu(ops.add(x, bias)), 0.5)))
    grouped = assert_same(graph)
    assert names(grouped) == ["fused"] and len(grouped.nodes[0].outputs) == 1


def test_a_value_that_others_read_is_a_second_output() -> None:
    graph = Graph()
    x = graph.input("x", TensorSpec((4, 4)))
    doubled = ops.scale(x, 2.0)
    graph.output("y", ops.matmul(ops.gelu(doubled), doubled))
    grouped = assert_same(graph)
    assert names(grouped) == ["fused", "matmul"] and len(grouped.nodes[0].outputs) == 2


def test_readers_of_one_tensor_share_its_pass_around_products() -> None:
    """As in backward of a feed-forward block: gelu again and gelu_grad, with the product that feeds it in between."""
    graph = Graph()
    u, dy, weight = (graph.input(name, TensorSpec((6, 6))) for name in ("u", "dy", "weight"))
    state = graph.state_value("gradient", TensorSpec((6, 6)), Kind.GRADIENT)
    ops.assign(state, ops.matmul(dy, ops.reshape(ops.gelu(u), (6, 6)), transpose_a=True))
    before = ops.reshape(ops.matmul(dy, weight), (6, 6))
    graph.output("du", op("gelu_grad").record(before, u, approximate="tanh"))
    grouped = assert_same(graph)
    assert sorted(names(grouped)) == ["assign", "fused", "matmul", "matmul"]


def test_a_pass_does_not_cross_a_change_of_state() -> None:
    graph = Graph()
    x, state = graph.input("x", SPEC), graph.state_value("s", SPEC, Kind.PARAMETER)
    before = ops.add(x, state)
    ops.assign(state, ops.matmul(ops.matmul(before, x, transpose_b=True), x))
    graph.output("y", ops.tanh(before))
    assert_same(graph)


def test_forward_and_backward_stay_apart() -> None:
    graph = Graph()
    x = graph.input("x", SPEC)
    y = ops.gelu(x)
    with graph.stage(Stage.BACKWARD):
        graph.output("dx", op("gelu_grad").record(y, x, approximate="tanh"))
    assert names(assert_same(graph)) == ["gelu", "gelu_grad"]


def test_fp64_is_left_alone() -> None:
    graph = Graph()
    x = graph.input("x", TensorSpec((4, 6), DType.FP64))
    graph.output("y", ops.tanh(ops.scale(x, 2.0)))
    assert names(assert_same(graph)) == ["scale", "tanh"]
