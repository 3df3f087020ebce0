"""Elementwise programs: the computation of one loop over memory, as data for a device's code generator.

No model records the op `fused`: a pass puts it in the place of neighbours, for a device that gains by it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ttrain.core.errors import GraphError
from ttrain.core.spec import TensorSpec
from ttrain.graph import Case, Composite, Graph, Value, cases, composite, op, require

Step = tuple[str, tuple[int, ...], tuple[tuple[str, Any], ...]]  # op name, operands, attributes
Program = tuple[Step, ...]


def step(name: str, *operands: int, **attributes: Any) -> Step:
    """One step of a program. Operands count the inputs first, then the results of the steps."""
    return name, operands, tuple(sorted(attributes.items()))


def program_of(
    body: Composite[..., Any], specs: Sequence[TensorSpec], attributes: Mapping[str, Any]
) -> tuple[Program, tuple[int, ...]]:
    """The primitives that a composite stands for, and which steps make its outputs.

    Raises GraphError where one of them is not elementwise, or an output is an input as it is.
    """
    probe = body.probe(specs, attributes)
    numbers: dict[Value, int] = {value: index for index, value in enumerate(probe.inputs) if value is not None}
    steps: list[Step] = []
    _append(probe.graph, numbers, steps, len(specs), body.name)
    results = tuple(numbers[value] - len(specs) for value in probe.outputs)
    if min(results) < 0:
        raise GraphError(f"{body.name}: an output is an input as it is. Leave it out.")
    return tuple(steps), results


def _append(graph: Graph, numbers: dict[Value, int], steps: list[Step], inputs: int, owner: str) -> None:
    for node in graph.nodes:
        if isinstance(node.op, Composite):
            inner = node.op.probe(node.specs[0], node.attributes)
            pairs = zip(inner.inputs, node.inputs, strict=True)
            inside = {new: numbers[old] for new, old in pairs if new is not None and old is not None}
            _append(inner.graph, inside, steps, inputs, owner)
            numbers.update((value, inside[new]) for value, new in zip(node.outputs, inner.outputs, strict=True))
            continue
        if not (node.op.elementwise or node.op.name in ("cast", "full")):
            raise GraphError(f"{owner}: {node.op.name} is not elementwise, so it can't be part of one loop.")
        steps.append(step(node.op.name, *(numbers[value] for value in node.values), **node.attributes))
        numbers[node.outputs[0]] = inputs + len(steps) - 1


def record(program: Program, results: Sequence[int], inputs: Sequence[Value]) -> list[Value]:
    """Record the steps one by one; the outputs."""
    graph, known = inputs[0].graph, list(inputs)
    for name, operands, attributes in program:
        known.append(op(name).record(*(known[item] for item in operands), graph=graph, **dict(attributes)))
    return [known[len(inputs) + item] for item in results]


@composite(family="fused", outputs=("results*",), elementwise=True, differentiable=False)
def fused(inputs: Sequence[Value], program: Program, results: tuple[int, ...]) -> tuple[Value, ...]:
    """A program of elementwise ops over tensors that broadcast to one shape, which every result has.

    `program` lists the steps (see `step`); `results` tells which steps' values are outputs. A lookup of rows
    (embedding) may be a step. Values in between need not be rounded to their dtype.
    """
    made = record(program, range(len(program)), inputs)
    shapes = {value.shape for value in made}
    require(len(shapes) == 1, "fused", f"results of shapes {sorted(shapes)}", "one shape")
    return tuple(made[item] for item in results)


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
