"""Ops that no model records: a pass puts them in the place of neighbours that one pass over memory can serve.

All decompose into what they stand for, so only a device that gains by them needs a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

from ttrain.core.spec import TensorSpec
from ttrain.graph.composite import cases, composite, require
from ttrain.graph.graph import Case, Value, op
from ttrain.ops.embedding import embedding_grad
from ttrain.ops.program import Program, record, step


def _specs(*known: TensorSpec, program: Program, results: tuple[int, ...]) -> list[TensorSpec]:
    found = list(known)
    for name, operands, attributes in program:
        found += op(name).infer_outputs([found[item] for item in operands], dict(attributes))[:1]
    made = found[len(known) :]
    shapes = {spec.shape for spec in made}
    require(len(shapes) == 1, "fused", f"results of shapes {sorted(shapes)}", "one shape")
    return [made[item] for item in results]


@composite(outputs=("results*",), elementwise=True, differentiable=False, infer=_specs)
def fused(inputs: Sequence[Value], program: Program, results: tuple[int, ...]) -> tuple[Value, ...]:
    """A program of elementwise ops over tensors that broadcast to one shape, which every result has.

    `program` lists the steps (see `step`); `results` tells which steps' values are outputs. A lookup of rows
    (embedding) may be a step. Values in between need not be rounded to their dtype.
    """
    return tuple(record(program, results, inputs))


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
