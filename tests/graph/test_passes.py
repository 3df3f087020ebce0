"""Passes join, remove and move nodes, leave others alone, and keep the numbers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.graph.tools import ROWS, assert_same_meaning, names, parameter, recorded, tokens
from ttrain import ops
from ttrain.autodiff import backward
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.null import NullDevice
from ttrain.graph import REGISTRY, Graph, Kind, Stage, Value, op
from ttrain.graph.passes import fuse, merge_common_subexpressions, remove_dead_code, store_early
from ttrain.graph.verify import verify
from ttrain.plan import build_plan
from ttrain.train.forecast.step_cost import peak

CUBE = TensorSpec((2, 4, 3))
KNOWN = {
    "x": ROWS, "row": TensorSpec((3,)), "square": TensorSpec((3, 3)), "cube": CUBE, "half": CUBE,
    "w": (5, 3), "b": (5,), "n": (3,), "m": (3,), "p": (4, 3), "k": (3, 3), "head": (2, 3),
    "targets": TensorSpec((4,), DType.INT64), "weight": TensorSpec(()),
    "s": (Kind.GRADIENT, ROWS), "t": (Kind.GRADIENT, ROWS),
}  # fmt: skip


def fused(graph: Graph) -> str:
    """Names after fusing; checks the result and its meaning."""
    after = verify(fuse(verify(graph, "recording"), REGISTRY), "fusion")
    assert_same_meaning(graph, after)
    return " ".join(names(after))


def copied_norm(graph: Graph, cube: Value, half: Value, n: Value) -> Value:
    total = cube + half
    with graph.stage(Stage.BACKWARD), graph.within(copy=1):
        return ops.layer_norm(total, n, None)


# What is recorded, by name and by what it becomes.
FORMS: dict[str, Any] = {
    "product and bias: linear": lambda x, w, b: ops.linear(x, w) + b,
    "product as matmul and bias: linear": lambda x, w, b: ops.matmul(x, w, transpose_b=True) + b,
    "product of three axes and bias: linear": lambda cube, w, b: ops.linear(cube, w) + b,
    "product of two transposes: matmul add": lambda square, k, n: ops.matmul(square, k, True, True) + n,
    "product of none: matmul add": lambda square, k, n: ops.matmul(square, k) + n,
    "product that a node reads: linear add relu": lambda x, w, b: [(y := ops.linear(x, w)) + b, ops.relu(y)],
    "product that is an output: linear add": lambda x, w, b: [(y := ops.linear(x, w)) + b, y],
    "product that is both terms: linear add": lambda row, w: (y := ops.linear(row, w)) + y,
    "two activations: linear tanh": lambda x, w: ops.tanh(ops.relu(ops.linear(x, w))),
    "sum and norm: scale add_layer_norm add": lambda cube, half, n, m: ops.layer_norm(y := cube + half * 0.5, n, m) + y,
    "sum read before its norm: add relu layer_norm add": lambda cube, half, n: (
        ops.relu(y := cube + half) + ops.layer_norm(y, n, None)
    ),
    "sum that is an output: add_layer_norm": lambda cube, half, n: [ops.layer_norm(y := cube + half, n, None), y],
    "sum with broadcasting: add layer_norm": lambda cube, p, n: ops.layer_norm(cube + p, n, None),
    "sum that is its own norm's weight: add layer_norm": lambda n, m: ops.layer_norm(y := n + m, y, None),
    "one sum under two norms: add_layer_norm layer_norm add": lambda cube, half, n, m: (
        ops.layer_norm(y := cube + half, n, None) + ops.layer_norm(y, m, None)
    ),
    "copy of a norm: add layer_norm": copied_norm,
    "logits that are an output: linear cross_entropy": lambda x, head, targets, weight: [
        y := ops.linear(x, head),
        ops.cross_entropy(y, targets, weight),
    ],
}


@pytest.mark.parametrize("form", FORMS)
def test_what_is_joined_and_what_stays(form: str) -> None:
    assert fused(recorded(FORMS[form], KNOWN)) == form.partition(": ")[2]


@pytest.mark.parametrize("b", [(4, 5), (1, 5), (4, 1), (), (Kind.PARAMETER, TensorSpec((5,), DType.FP64))], ids=str)
def test_a_sum_of_another_shape_or_dtype_is_no_bias(b: Any) -> None:
    assert fused(recorded(lambda x, w, b: ops.linear(x, w) + b, KNOWN, b=b)) == "linear add"


@pytest.mark.parametrize("name", ["relu", "tanh", "gelu", "gelu_tanh"])
def test_an_activation_is_joined_in_training_only_where_backward_reads_its_result(name: str) -> None:
    graph = recorded(lambda cube, w, b: ops.activation(ops.linear(cube, w) + b, name), KNOWN)
    after = fuse(graph, REGISTRY)
    assert names(after) == ["linear"] and after.nodes[0].attributes == {"activation": name}
    assert_same_meaning(graph, after)

    def train(x: Value, w: Value) -> dict[str, Value]:
        y = ops.activation(ops.linear(x, w), name)
        loss = ops.mean(y * y)
        return {"loss": loss, "gradient": backward(loss, [w])[0]}

    found = fused(recorded(train, KNOWN)).split()
    assert (not {"relu", "tanh", "gelu"} & set(found)) is (name in ("relu", "tanh"))


def test_residual_sum_and_rms_norm_and_their_gradients() -> None:
    def make(cube: Value, half: Value, n: Value) -> Value:
        total = cube + half
        return backward(ops.reduce_sum(ops.exp(ops.rms_norm(total, n)) + total, (0, 1, 2)), [cube])[0]

    found = fused(recorded(make, KNOWN)).split()
    assert "add_rms_norm" in found and "rms_norm" not in found
    assert found[-1] == "rms_norm_grad"  # which adds the gradient beside the norm


@pytest.mark.parametrize("trains", [False, True])
def test_head_and_cross_entropy_are_joined_in_evaluation(trains: bool) -> None:
    def make(x: Value, head: Value, targets: Value, weight: Value) -> dict[str, Value]:
        loss = ops.cross_entropy(ops.linear(x, head), targets, weight)
        return {"loss": loss, **({"gradient": backward(loss, [head])[0]} if trains else {})}

    graph = recorded(make, KNOWN)
    after = remove_dead_code(fuse(graph, REGISTRY))
    assert_same_meaning(graph, after)
    if trains:
        assert "head_cross_entropy" not in names(after)
    else:
        assert names(after) == ["head_cross_entropy"]
        assert after.nodes[0].attributes == {"smoothing": 0.0, "live": 2, "gradients": False}


@pytest.mark.parametrize("pattern", ["add", "relu", "residual"])
def test_nothing_is_moved_behind_a_change_of_what_it_reads(pattern: str) -> None:
    graph = Graph()
    x, weight = graph.input("x", ROWS), parameter(graph, "w", 3, 3)
    if pattern == "residual":
        state = graph.state_value("s", ROWS, Kind.OPTIMIZER)
        total = x + state
        ops.accumulate(state, x)
        graph.output("y", ops.layer_norm(total, parameter(graph, "n", 3), None))
        assert fused(graph) == "add accumulate layer_norm"
        return
    y = ops.linear(x, weight)
    ops.accumulate(weight, ops.matmul(x, x, transpose_a=True))
    graph.output("y", y + parameter(graph, "b", 3) if pattern == "add" else ops.relu(y))
    assert fused(graph) == f"linear matmul accumulate {pattern}"


def test_a_lookup_gradient_goes_into_its_sum() -> None:
    graph = Graph()
    base, dy = graph.input("base", TensorSpec((4, 6))), graph.input("dy", TensorSpec((3, 6)))
    gradients = [op("embedding_grad").record(dy, tokens(graph, "ids", 3), vocabulary=4) for _ in range(3)]
    graph.output("sum", (base + gradients[0]) + (gradients[1] + gradients[2]))
    assert fused(graph) == "embedding_grad add_embedding_grad add_embedding_grad add"


def norm(x: Value, n: Value) -> Any:
    return op("layer_norm").record(x, n, None, eps=1e-5)


# What is recorded, by name and by what is left of it.
DEAD: dict[str, Any] = {
    "what nobody reads: relu": lambda x: (ops.tanh(x * 2.0), [ops.relu(x)]),
    "a change of state and what leads to it: relu accumulate": lambda x, p: (ops.accumulate(p, ops.relu(x)),),
    "a node for one of its outputs: layer_norm": lambda x, n: norm(x, n)[1],
}
COMMON: dict[str, Any] = {
    "equal nodes on equal values: scale tanh": lambda x: [ops.tanh(x * 2.0), ops.tanh(x * 2.0)],
    "all outputs: layer_norm add": lambda x, n: norm(x, n)[1] + norm(x, n)[2],
    "other attributes: scale scale add": lambda x: x * 2.0 + x * 3.0,
    "state before and after a change: relu accumulate relu add": lambda x, p: (
        ops.relu(p) + ops.relu(ops.accumulate(p, x))
    ),
    "two equal changes of state: accumulate accumulate": lambda x, p: (ops.accumulate(ops.accumulate(p, x), x),),
}


@pytest.mark.parametrize("case", [*DEAD, *COMMON])
def test_what_goes_and_what_stays(case: str) -> None:
    graph = recorded((DEAD | COMMON)[case], KNOWN)
    before = list(graph.nodes)
    cleaned = verify((remove_dead_code if case in DEAD else merge_common_subexpressions)(graph), "cleaning")
    assert names(cleaned) == case.partition(": ")[2].split() and graph.nodes == before  # the old graph stays as it was
    assert_same_meaning(graph, cleaned)


def test_places_survive_a_pass_and_copies_and_segments_stay_apart() -> None:
    graph = Graph()
    x = graph.input("x", ROWS)
    graph.output("y0", ops.relu(x))
    with graph.within(copy=2):
        graph.output("y1", ops.relu(x))
    with graph.scope("a"), graph.scope("b"), graph.segment():
        graph.output("y2", ops.relu(x))
    nodes = merge_common_subexpressions(remove_dead_code(graph)).nodes
    assert [(node.scope, node.segment, node.copy) for node in nodes] == [("", None, 0), ("", None, 2), ("a/b", 0, 0)]


def exchange(x: Value, s: Value, t: Value) -> Any:
    """It starts behind the last of what it sends."""
    y = ops.relu(x)
    outputs = {"z": ops.tanh(ops.exp(y))}
    values = ops.collective.all_reduce_start([ops.assign(t, y), ops.accumulate(s, ops.relu(y))])
    ops.collective.collectives_done(values, len(values))
    return outputs


def update_of_ranks(graph: Graph, x: Value, s: Value) -> Any:
    """It follows what it reads, and ranks act together in one order."""
    y = ops.relu(x)
    outputs = {"z": (z := ops.tanh(y))}
    with graph.stage(Stage.UPDATE):
        outputs["sum"] = ops.collective.all_reduce(z)  # a rank may have nothing to move this for
        ops.collective.all_reduce_state([ops.assign(s, ops.exp(y))])
    return outputs


# What is recorded, by name and by the order that it gets.
ORDERED: dict[str, Any] = {
    "behind the maker: relu assign tanh": lambda x, s: (y := ops.relu(x), [ops.tanh(x)], ops.assign(s, y)),
    "a sum too: relu accumulate tanh": lambda x, s: (y := ops.relu(x), [ops.tanh(x)], ops.accumulate(s, y)),
    "state read meanwhile: relu tanh accumulate": lambda x, s: (y := ops.relu(x), [ops.tanh(s)], ops.accumulate(s, y)),
    "state overwritten meanwhile: relu accumulate accumulate": lambda x, s: (
        y := ops.relu(x),
        ops.accumulate(ops.accumulate(s, x), y),
    ),
    "a step input when it was: tanh accumulate": lambda x, s: ([ops.tanh(x)], ops.accumulate(s, x)),
    "behind another store: relu accumulate tanh assign": lambda x, s, t: (
        y := ops.relu(x),
        [ops.tanh(t)],
        ops.assign(t, ops.accumulate(s, y)),
    ),
    "ranks together: relu exp assign tanh all_reduce all_reduce_state": update_of_ranks,
    "sent: relu assign exp tanh relu accumulate all_reduce_start collectives_done": exchange,
}


@pytest.mark.parametrize("case", ORDERED)
def test_where_values_are_stored(case: str) -> None:
    graph = recorded(ORDERED[case], KNOWN)
    after = verify(store_early(verify(graph, "recording")), "ordering")
    assert_same_meaning(graph, after)
    assert names(after) == case.partition(": ")[2].split()


def test_gradients_are_not_all_live_at_once() -> None:
    graph = Graph()
    y, count = graph.input("x", TensorSpec((64, 64))), 10
    values = []
    for _ in range(count):
        y = ops.matmul(y, y)
        values.append(y)
    for index, value in enumerate(values):
        ops.accumulate(parameter(graph, f"p{index}", 64, 64), value)
    kernels, size = NullDevice().kernels, 64 * 64 * 4
    assert peak(build_plan(graph, kernels).blocks)[0] == count * size
    assert peak(build_plan(store_early(graph), kernels).blocks)[0] == 2 * size
