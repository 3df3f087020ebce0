"""Random step graphs: elementwise chains, broadcasting, views, sums, products, and state that is overwritten."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from ttrain import ops
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.base import Delivery, Kernel
from ttrain.graph import Graph, Kind, Stage, Value

SHAPES = ((), (1,), (3,), (2, 3), (1, 3), (2, 1), (3, 2), (6,), (1, 6))
LIKELY = (*SHAPES, (2, 3), (2, 3), (2, 3), (3, 2), (3, 2))  # equal ones are what buffers are shared between
FLOATS = (*[DType.FP32] * 6, DType.FP64, DType.BF16)
UNARY: tuple[Callable[[Value], Value], ...] = (ops.relu, ops.tanh, ops.gelu, lambda x: ops.scale(x, -0.5))
BINARY: tuple[Callable[[Value, Value], Value], ...] = (ops.add, ops.subtract, ops.multiply)


class _Recorder:
    """Draws one node after the other; `readable` are the values whose buffers nobody has overwritten since."""

    def __init__(self, draw: Any, graph: Graph, floats: Sequence[DType]) -> None:
        self.draw, self.graph, self.floats = draw, graph, floats
        self.readable: list[Value] = []
        self.state: list[Value] = []  # newest version of each

    def enter(self) -> None:
        for index in range(self.draw(st.integers(1, 3))):
            self.readable.append(self.graph.input(f"input{index}", self._spec()))
        for index in range(self.draw(st.integers(1, 4))):
            kind = self.draw(st.sampled_from((Kind.PARAMETER, Kind.GRADIENT, Kind.OPTIMIZER)))
            self.state.append(self.graph.state_value(f"state{index}", self._spec(), kind))
        self.readable += self.state

    def _spec(self) -> TensorSpec:
        return TensorSpec(self.draw(st.sampled_from(LIKELY)), self.draw(st.sampled_from(self.floats)))

    def any(self) -> Value:
        """Mostly recent values, so that chains grow."""
        recent = self.readable[-4:]
        return self.draw(st.sampled_from(self.draw(st.sampled_from((recent, self.readable)))))

    def node(self) -> None:
        kind = self.draw(
            st.sampled_from(("unary", "binary", "binary", "view", "move", "product", "norm", "store", "store"))
        )
        getattr(self, f"_{kind}")()

    def _unary(self) -> None:
        self.readable.append(self.draw(st.sampled_from(UNARY))(self.any()))

    def _binary(self) -> None:
        x, y = self.any(), self.any()
        fits = all(a == b or 1 in (a, b) for a, b in zip(x.shape[::-1], y.shape[::-1], strict=False))
        if fits:
            self.readable.append(self.draw(st.sampled_from(BINARY))(x, y))

    def _view(self) -> None:
        x = self.any()
        same = [shape for shape in (*SHAPES, (x.spec.size, 1)) if x.spec.with_shape(*shape).size == x.spec.size]
        self.readable.append(ops.reshape(x, self.draw(st.sampled_from(same))))

    def _move(self) -> None:
        x = self.any()
        choice = self.draw(st.sampled_from(("sum", "cast", "transpose")))
        if choice == "sum" and x.shape:
            self.readable.append(ops.reduce_sum(x, (self.draw(st.integers(0, x.spec.rank - 1)),)))
        elif choice == "transpose" and x.spec.rank == 2:
            self.readable.append(ops.transpose(x))
        else:
            self.readable.append(ops.cast(x, self.draw(st.sampled_from(self.floats))))

    def _product(self) -> None:
        x, y = self.any(), self.any()
        if y.spec.rank != 2 or not x.shape or x.spec.dtype is not y.spec.dtype:
            return
        if x.shape[-1] == y.shape[1]:
            y = ops.linear(x, y)
            biases = [b for b in self.readable if b.shape == y.shape[-1:] and b.spec.dtype is y.spec.dtype]
            y = ops.add(y, self.draw(st.sampled_from(biases))) if biases else y
            self.readable.append(ops.tanh(y) if self.draw(st.booleans()) else y)
        elif x.spec.rank == 2 and x.shape[1] == y.shape[0]:
            self.readable.append(ops.matmul(x, y))

    def _norm(self) -> None:
        x = self.any()
        weights = [w for w in self.readable if w.shape == x.shape[-1:] and x.shape]
        branches = [b for b in self.readable if b.spec == x.spec]
        if weights:
            x = ops.add(x, self.draw(st.sampled_from(branches))) if self.draw(st.booleans()) else x
            self.readable.append(x)
            self.readable.append(ops.layer_norm(x, self.draw(st.sampled_from(weights)), None))

    def _store(self) -> None:
        """Overwrite a state, preferably with a value that the plan may deliver straight into it."""
        index = self.draw(st.integers(0, len(self.state) - 1))
        state = self.state[index]
        values = [value for value in self.readable if value.shape == state.shape and value is not state]
        alike = [value for value in values if value.spec == state.spec and value.kind is Kind.NODE]
        if not values:
            return
        value = self.draw(st.sampled_from(alike or values))
        store = ops.assign if self.draw(st.booleans()) else ops.accumulate
        self.state[index] = store(state, value)
        roots = self.graph.roots()
        self.readable = [value for value in self.readable if roots[value] is not roots[state]] + [self.state[index]]


@st.composite
def step_graphs(draw: Any, nodes: int = 14, floats: Sequence[DType] = FLOATS) -> Graph:
    """A graph that passes the stage verifier."""
    graph = Graph()
    recorder = _Recorder(draw, graph, floats)
    recorder.enter()
    for _ in range(draw(st.integers(1, nodes))):
        with graph.stage(draw(st.sampled_from((Stage.FORWARD, Stage.FORWARD, Stage.BACKWARD)))):
            recorder.node()
    for index in range(draw(st.integers(1, 3))):
        graph.output(f"output{index}", recorder.any())
    return graph


@st.composite
def kernel_tables(draw: Any) -> dict[str, Kernel]:
    """Rows of an imaginary device: some deliver fresh results, some want workspace."""
    from ttrain.graph import REGISTRY

    fresh = draw(st.sets(st.sampled_from(("add", "relu", "matmul", "layer_norm", "cast", "transpose")), max_size=3))
    return {
        op.name: Kernel(_no_launch, Delivery.RETURNS if op.name in fresh else Delivery.OUT, workspace)
        for op in REGISTRY.values()
    }


def _no_launch(*_: Any) -> Any:
    raise AssertionError("the interpreter launches nothing")


def workspace(inputs: Any, outputs: Any, attributes: Any) -> list[TensorSpec]:
    """Return as much as the first output and a few bytes, for ops with more than one row."""
    return [outputs[0], TensorSpec((5,))] if outputs[0].rank == 2 else []
