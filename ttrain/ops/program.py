"""Elementwise programs: what one loop over memory computes, as data that a device's code generator reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ttrain.core.errors import GraphError
from ttrain.core.spec import TensorSpec
from ttrain.graph.composite import Composite
from ttrain.graph.graph import Graph, Value, op

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
