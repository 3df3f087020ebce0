"""Ops that no model records: a pass puts them in the place of neighbours that one pass over memory can serve.

All decompose into what they stand for, so only a device that gains by them needs a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ttrain.core.spec import TensorSpec
from ttrain.graph.case import Case
from ttrain.graph.composite import cases, composite, require
from ttrain.graph.graph import Graph, Node, Op, Value
from ttrain.graph.op import declare, op
from ttrain.ops.embedding import embedding_grad
from ttrain.ops.program import Program, evaluate, record, step


@declare
class Fused(Op):
    """A program of elementwise ops over tensors that broadcast to one shape, which every result has.

    `program` lists the steps (see `step`); `results` tells which steps' values are outputs. A lookup of rows
    (embedding) may be a step. Values in between need not be rounded to their dtype.
    """

    name = "fused"
    family = "fused"
    inputs = ("inputs*",)
    outputs = ("results*",)
    elementwise = True
    differentiable = False

    def infer(self, *specs: TensorSpec, program: Program, results: tuple[int, ...]) -> list[TensorSpec]:
        known: list[TensorSpec] = list(specs)
        for name, operands, attributes in program:
            known += op(name).infer_outputs([known[item] for item in operands], dict(attributes))[:1]
        outputs = [known[len(specs) + item] for item in results]
        shapes = {spec.shape for spec in known[len(specs) :]}
        self.require(len(shapes) == 1, f"results of shapes {sorted(shapes)}", "one shape")
        return outputs

    def reference(self, *tensors: Any, program: Program, results: tuple[int, ...]) -> Any:
        return evaluate(program, results, tensors)

    def decompose(self, node: Node, inputs: tuple[Value | None, ...]) -> Sequence[Value]:
        given = [value for value in inputs if value is not None]
        return record(node.attributes["program"], node.attributes["results"], given)

    def flops(self, node: Node) -> int:
        graph = Graph()
        parts = [graph.input(str(position), value.spec) for position, value in enumerate(node.values)]
        self.decompose(node, tuple(parts))
        return sum(part.op.flops(part) for part in graph.nodes)

    def cases(self) -> Sequence[Case]:
        bias_gelu = (step("add", 0, 1), step("gelu", 2, approximate="tanh"))
        both = (step("gelu", 1, approximate="tanh"), step("gelu_grad", 0, 1, approximate="tanh"))
        lookup = (step("embedding", 0, 1), step("add", 4, 2), step("dropout", 5, 3, p=0.25, stream=5))
        scaled = (step("multiply", 0, 1), step("scale", 3, factor=0.5), step("subtract", 4, 2), step("relu", 5))
        return [
            Case(((5, 33), (33,)), {"program": bias_gelu, "results": (0, 1)}),
            Case(((2, 3, 16), (2, 3, 16)), {"program": both, "results": (1, 0)}),
            Case(((2, 5), (7, 12), (5, 12), ()), {"program": lookup, "results": (2,)}, _LOOKUP_INTEGERS),
            Case(((3,), (7, 1), (3, 1), ()), {"program": lookup, "results": (1, 2)}, _LOOKUP_INTEGERS),
            Case(((4, 2, 3), (), (2, 1)), {"program": scaled, "results": (3,)}),
            Case(((300,), (1,), (300,)), {"program": scaled, "results": (3, 2)}),
        ]


_LOOKUP_INTEGERS = {"inputs.0": 7, "inputs.3": 2**62}


@composite(
    family="fused", outputs=("sum",), elementwise=True, differentiable=False,
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
