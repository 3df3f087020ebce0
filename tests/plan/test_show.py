"""A graph as text."""

from __future__ import annotations

from ttrain import ops
from ttrain.autodiff import backward
from ttrain.core.spec import TensorSpec
from ttrain.graph import Graph, Kind, Stage
from ttrain.train.forecast.show import show, show_node

TEXT = """\
input  x:fp32[2, 3]
parameter weight:fp32[4, 3]
gradient  weight/gradient:fp32[4, 3]
forward  up          %2:fp32[2, 4] = linear(x, weight, -)
forward  up          %3:fp32[2, 4] = relu(%2)
forward              %4:fp32[] = reduce_sum(%3, axes=(0, 1))
backward             %5:fp32[] = full(spec=fp32[], value=1.0)
backward reduce_sum  %6:fp32[1, 1] = reshape(%5, shape=(1, 1))
backward reduce_sum  %7:fp32[2, 4] = expand(%6, shape=(2, 4))
backward up          %8:fp32[2, 4] = relu_grad(%7, %3)
backward up          %9:fp32[4, 3] = matmul(%8, x, transpose_a=True, transpose_b=False)
backward up          %10:fp32[2, 3] = matmul(%8, weight, transpose_a=False, transpose_b=False)
update               %12:fp32[4, 3] = assign(weight/gradient, %9)
output loss = %4"""


def step() -> Graph:
    graph = Graph()
    weight = graph.state_value("weight", TensorSpec((4, 3)), Kind.PARAMETER)
    with graph.scope("up"):
        y = ops.relu(ops.linear(graph.input("x", TensorSpec((2, 3))), weight))
    loss = ops.reduce_sum(y, (0, 1))
    graph.output("loss", loss)
    (gradient,) = backward(loss, [weight])
    with graph.stage(Stage.UPDATE):
        ops.assign(graph.state_value("weight/gradient", gradient.spec, Kind.GRADIENT), gradient)
    return graph


def test_a_step_as_text_and_single_stages_of_it() -> None:
    assert show(step()) == TEXT
    lines = show(step(), [Stage.UPDATE]).splitlines()
    assert [line.split()[0] for line in lines] == ["input", "parameter", "gradient", "update", "output"]


def test_a_copy_is_marked() -> None:
    graph = Graph()
    with graph.within(copy=1):
        ops.relu(graph.input("x", TensorSpec((2,))))
    assert show_node(graph.nodes[0]).endswith("= relu(x)  (copy 1)")
