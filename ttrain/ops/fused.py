"""Ops that no model records: a pass puts them in the place of neighbours that one pass over memory can serve.

All decompose into what they stand for, so only a device that gains by them needs a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

from ttrain.core.spec import TensorSpec
from ttrain.graph.case import Case
from ttrain.graph.composite import cases, composite, primitive, require
from ttrain.graph.graph import Graph, Node, Value, op
from ttrain.ops.embedding import embedding_grad
from ttrain.ops.program import Program, evaluate, record, step


def _flops(node: Node) -> int:
    graph = Graph()
    _decomposed(node, tuple(graph.input(str(position), value.spec) for position, value in enumerate(node.values)))
    return sum(part.op.flops(part) for part in graph.nodes)


def _decomposed(node: Node, inputs: tuple[Value | None, ...]) -> Sequence[Value]:
    return record(node.attributes["program"], node.attributes["results"], [x for x in inputs if x is not None])


@primitive(
    outputs=("results*",),
    elementwise=True,
    flops=_flops,
    decompose=_decomposed,
    reference=lambda *tensors, program, results: evaluate(program, results, tensors),
)
def fused(inputs: Sequence[Value], program: Program, results: tuple[int, ...]) -> list[TensorSpec]:
    """A program of elementwise ops over tensors that broadcast to one shape, which every result has.

    `program` lists the steps (see `step`); `results` tells which steps' values are outputs. A lookup of rows
    (embedding) may be a step. Values in between need not be rounded to their dtype.
    """
    known = [value.spec for value in inputs]
    for name, operands, attributes in program:
        known += op(name).infer_outputs([known[item] for item in operands], dict(attributes))[:1]
    made = known[len(inputs) :]
    shapes = {spec.shape for spec in made}
    require(len(shapes) == 1, "fused", f"results of shapes {sorted(shapes)}", "one shape")
    return [made[item] for item in results]


_BIAS_GELU = (step("add", 0, 1), step("gelu", 2, approximate="tanh"))
_BOTH = (step("gelu", 1, approximate="tanh"), step("gelu_grad", 0, 1, approximate="tanh"))
_LOOKUP = (step("embedding", 0, 1), step("add", 4, 2), step("dropout", 5, 3, p=0.25, stream=5))
_LOOKUP_INTEGERS = {"inputs.0": 7, "inputs.3": 2**62}
_SCALED = (step("multiply", 0, 1), step("scale", 3, factor=0.5), step("subtract", 4, 2), step("relu", 5))
cases(
    fused,
    Case(((5, 33), (33,)), {"program": _BIAS_GELU, "results": (0, 1)}),
    Case(((2, 3, 16), (2, 3, 16)), {"program": _BOTH, "results": (1, 0)}),
    Case(((2, 5), (7, 12), (5, 12), ()), {"program": _LOOKUP, "results": (2,)}, _LOOKUP_INTEGERS),
    Case(((3,), (7, 1), (3, 1), ()), {"program": _LOOKUP, "results": (1, 2)}, _LOOKUP_INTEGERS),
    Case(((4, 2, 3), (), (2, 1)), {"program": _SCALED, "results": (3,)}),
    Case(((300,), (1,), (300,)), {"program": _SCALED, "results": (3, 2)}),
)


@composite(
    family="fused", outputs=("sum",), differentiable=False,
    flops=lambda node: node.input("dy").spec.size,
)  # fmt: skip
def add_embedding_grad(base: Value, dy: Value, ids: Value) -> Value:
    """sum = base + embedding_grad(dy, ids), rounded once. Over its base it touches only the rows that occur."""
    name, width = "add_embedding_grad", dy.shape[-1]
    require(dy.shape[:-1] == ids.shape, name, f"dy {dy.spec} and ids {ids.spec}", "equal leading axes")
    fits = base.spec.rank == 2 and base.shape[1] == width and base.spec.dtype is dy.spec.dtype
    require(fits, name, f"base {base.spec}", f"{dy.spec.dtype}[vocabulary, {width}]")
    return base + embedding_grad(dy, ids, base.shape[0])


cases(
    add_embedding_grad,
    Case(((7, 4), (3, 5, 4), (3, 5)), integers={"ids": 7}),
    Case(((65, 40), (33, 40), (33,)), integers={"ids": 65}),
)
