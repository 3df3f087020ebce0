"""The cases of ops: inputs, drawn from a fixed seed, and PyTorch's results in fp64.

An op declares the cases that it is run on. The shapes of a case may be left out: they follow from those that the op
declares. An op without cases is run where the bodies and gradients of others record it, on the very numbers that reach
it there. So the op of a gradient needs no cases of its own.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from typing import Any

import numpy as np
import torch

from ttrain.core.errors import GraphError
from ttrain.core.spec import DType, TensorSpec
from ttrain.graph import REGISTRY, Case, Graph, Node, Op, Value
from ttrain.graph.composite import Declared
from ttrain.ops import add, cast, multiply, reduce_sum
from ttrain.ops.elementwise import PLAIN_SHAPES
from ttrain.optim import adafactor, adamw, averages, lion, muon, sgd  # noqa: F401 - their rules are ops too

Arrays = dict[str, np.ndarray | None]  # by input name; None where an optional input is absent
# Outputs that a loss may be formed from; the others are statistics that only the op's own backward reads.
DIFFERENTIABLE_OUTPUTS = {"split_heads": 3}
# What the axes `...` and then the letters of declared shapes stand for; PLAIN_SHAPES where there are no letters.
SIZES: tuple[tuple[Any, ...], ...] = (
    ((4,), 8, 5, 3, 6), ((2, 3), 32, 33, 5, 2), ((1, 1), 33, 2, 7, 4), ((5,), 257, 7, 2, 3),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Shown(Case):
    """A case that another op shows: node `number` of those that a case of `by` records of the op."""

    by: Op
    of: Case
    number: int

    def seen(self, op: Op, dtype: DType) -> Node:
        """The node where a step computes in `dtype`."""
        return [node for node in _unfolded(self.by, self.of, dtype).nodes if node.op is op][self.number]

    def draw(self, op: Op, dtype: DType) -> Arrays:
        """Return what reaches the node from the inputs of the other op."""
        node = self.seen(op, dtype)
        given, graph = draw(self.by, self.of, dtype), node.values[0].graph
        feeds = {
            name: given[name] if name in given else loss_weights([value], f"{name} of {op.name}")[0]
            for name, value in graph.inputs.items()
        }
        known = by_reference(graph, feeds, until=node)
        return {
            name: None if value is None else rounded(known[value].numpy(), value.spec.dtype)
            for name, value in zip(input_names(op, self), node.inputs, strict=True)
        }


def by_reference(
    graph: Graph, feeds: Mapping[str, Any], leaves: Container[Value] = (), until: Node | None = None
) -> dict[Value, torch.Tensor]:
    """Evaluate a graph on numbers by the references of its ops, in fp64. `leaves` are inputs that get a gradient."""
    known: dict[Value, torch.Tensor] = {}
    for name, value in {**graph.inputs, **graph.state}.items():
        tensor = torch.from_numpy(np.array(feeds[name]))
        floating = value.spec.dtype.is_floating
        known[value] = tensor.double().requires_grad_(value in leaves) if floating else tensor
    for node in itertools.takewhile(lambda node: node is not until, graph.nodes):
        results = node.op.reference(*(None if v is None else known[v] for v in node.inputs), **node.attributes)
        known.update(zip(node.outputs, results if isinstance(results, list | tuple) else [results], strict=False))
    return known


def cases_of(op: Op) -> Sequence[Case]:
    """Return the cases that an op is run on; none where it declares none and no other op records it."""
    return _declared(op) or _shown(len(REGISTRY)).get(op.name, ())


def _declared(op: Op) -> list[Case]:
    return [drawn for case in op.cases for drawn in ([case] if case.shapes or not op.inputs else _drawn(op, case))]


def _drawn(op: Op, case: Case) -> Iterator[Case]:
    """A case in several sizes, with the optional inputs and without. Integers are below the size of V."""
    assert isinstance(op, Declared)
    if not op.shapes.text:
        raise GraphError(f"{op.name}: it declares no shapes, so they can't be left out of its cases.")
    letters = [axis for axis in op.shapes.axes if axis != "..."]
    optional = any(name.endswith("?") for name in op.inputs)
    for lead, *sizes in SIZES if letters else [(lead,) for lead in PLAIN_SHAPES]:
        known = {"...": lead, **{letter: (size,) for letter, size in zip(letters, sizes, strict=False)}}
        given = op.shapes.of_sizes(known)
        bounds = {name: known.get("V", (2**62,))[0] for name in op.shapes.integers}
        for absent in (False, True) if optional else (False,):
            shapes = tuple(None if absent and name.endswith("?") else given[name.rstrip("?")] for name in op.inputs)
            yield replace(case, shapes=shapes, integers=bounds)


@lru_cache(maxsize=1)
def _shown(ops: int) -> Mapping[str, Sequence[Case]]:
    """Return the cases that ops without cases of their own are shown by others, by op; `ops` is the number of all."""
    found: dict[str, dict[Any, Case]] = {}
    for by, of in ((op, case) for op in REGISTRY.values() for case in _declared(op)):
        numbers: dict[str, int] = {}
        for node in _unfolded(by, of, DType.FP32).nodes:
            if not node.op.cases:
                number = numbers[node.op.name] = numbers.get(node.op.name, -1) + 1
                shapes = tuple(None if value is None else value.shape for value in node.inputs)
                case = Shown(shapes, node.attributes, by=by, of=of, number=number)
                found.setdefault(node.op.name, {}).setdefault((shapes, tuple(node.attributes.items())), case)
    return {name: list(shown.values()) for name, shown in found.items()}


def _unfolded(op: Op, case: Case, dtype: DType) -> Graph:
    """A case of an op, with its gradient behind it if it has one of its own, and its body."""
    graph, _, outputs = record(op, case, dtype)
    node = graph.nodes[0]
    if op.differentiable and not getattr(op, "goes_through_body", False):
        kept = outputs[: DIFFERENTIABLE_OUTPUTS.get(op.name, 1)]
        given = [graph.input(f"gradient {index}", output.spec) for index, output in enumerate(kept)]
        op.vjp(node, *given, *[None] * (len(outputs) - len(given)))
    op.decompose(node, node.inputs)
    return graph


def input_names(op: Op, case: Case) -> list[str]:
    """Names of the inputs of a case in order; the tensors of a list are numbered, and the last list takes the rest."""
    lists = [name for name in op.inputs if name.endswith("*")]
    listed = len(case.shapes) - (len(op.inputs) - len(lists))
    each = case.attributes.get("count", listed)
    names: list[str] = []
    for name in op.inputs:
        if not name.endswith("*"):
            names.append(name.rstrip("?"))
            continue
        taken = listed - each * (len(lists) - 1) if name == lists[-1] else each
        names += [f"{name[:-1]}.{number}" for number in range(taken)]
    assert len(names) == len(case.shapes), f"{op.name}: {names} for {case.shapes}"
    return names


def input_specs(op: Op, case: Case, dtype: DType) -> dict[str, TensorSpec | None]:
    """Specs of the inputs of a case where the step computes in `dtype`."""
    if isinstance(case, Shown):
        return dict(zip(input_names(op, case), case.seen(op, dtype).specs[0], strict=True))
    specs: dict[str, TensorSpec | None] = {}
    for name, shape in zip(input_names(op, case), case.shapes, strict=True):
        if shape is None:
            specs[name] = None
        elif name in case.integers or name in case.values or name in ("targets", "ids", "seed"):
            specs[name] = TensorSpec(shape, _integer(op, name))
        else:
            wide = name.partition(".")[0] in op.accumulation and name not in case.narrow
            specs[name] = TensorSpec(shape, dtype.accumulation if wide else dtype)
    return specs


def _integer(op: Op, name: str) -> DType:
    """Return the dtype that an op declares for an input of integers: int64, but for codes of few bits."""
    return op.shapes.integers.get(name, DType.INT64) if isinstance(op, Declared) else DType.INT64


def rounded(array: np.ndarray, dtype: DType) -> np.ndarray:
    """The values of `array` in `dtype`, as fp64; integers stay."""
    if not dtype.is_floating:
        return array
    return torch.from_numpy(np.array(array)).to(getattr(torch, dtype.in_torch)).double().numpy()


def draw(op: Op, case: Case, dtype: DType) -> Arrays:
    """Inputs of a case: the same numbers every time, representable in their dtypes."""
    if isinstance(case, Shown):
        return case.draw(op, dtype)
    generator = np.random.default_rng(zlib.crc32(f"{op.name} {case.shapes} {sorted(case.attributes)}".encode()))
    arrays: Arrays = {}
    specs = input_specs(op, case, dtype)
    for name, spec in specs.items():
        if spec is None:
            arrays[name] = None
        elif name in case.values:
            arrays[name] = np.array(case.values[name])
        elif not spec.dtype.is_floating:
            values = generator.integers(0, case.integers[name], spec.shape)
            if name in case.holes:
                values.reshape(-1)[::3] = -1
            arrays[name] = values.astype(spec.dtype.in_torch)
        else:
            positive = name in case.positive
            drawn = generator.uniform(0.5, 1.5, spec.shape) if positive else generator.normal(size=spec.shape)
            # Steps are counted, and fused optimizers take an integer.
            drawn = np.ceil(drawn) if (op.name, name) == ("update", "step") else drawn
            arrays[name] = rounded(np.asarray(drawn), spec.dtype)
    return arrays


def record(op: Op, case: Case, dtype: DType) -> tuple[Graph, dict[str, Value], tuple[Value, ...]]:
    """A graph that applies the op to step inputs named as the op names them."""
    graph = Graph()
    values = {name: graph.input(name, spec) for name, spec in input_specs(op, case, dtype).items() if spec is not None}
    ordered = [values.get(name) for name in input_names(op, case)]
    outputs = op.record(*ordered, graph=graph, **case.attributes)
    return graph, values, outputs if isinstance(outputs, tuple) else (outputs,)


def output_name(op: Op, case: Case, index: int) -> str:
    """The declared name of an output; all tensors of a list share its name."""
    names = op.outputs_of(case.attributes)
    return names[0 if len(names) == 1 or names[0].endswith("*") else index].rstrip("*?")


def leaves_of(op: Op, values: Mapping[str, Value]) -> dict[str, Value]:
    """Return the inputs that get a gradient."""
    return {n: v for n, v in values.items() if v.spec.dtype.is_floating and n.partition(".")[0] not in op.constants}


def output_choices(op: Op, case: Case, dtype: DType) -> list[list[int]]:
    """Sets of outputs that a loss is formed from: each alone, and all together."""
    count = min(DIFFERENTIABLE_OUTPUTS.get(op.name, 1), len(record(op, case, dtype)[2]))
    alone = [[index] for index in range(count)]
    return [*alone, list(range(count))] if count > 1 else alone


def loss_weights(outputs: Sequence[Value], name: str) -> list[np.ndarray]:
    """Return fixed random numbers that the outputs are weighted with to form a loss: they are its gradients."""
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    return [rounded(np.asarray(generator.normal(size=output.shape)), output.spec.dtype) for output in outputs]


def weighted_loss(outputs: Sequence[Value], feeds: dict[str, Any], name: str, prefix: str = "") -> Value:
    """Record sum(output * weight) over all outputs, a scalar; the weights become inputs, and join `feeds`."""
    terms = []
    for number, (output, weight) in enumerate(zip(outputs, loss_weights(outputs, name), strict=True)):
        key = f"{prefix}weight of output {number}"
        feeds[key] = weight
        product = multiply(output, output.graph.input(key, output.spec))
        terms.append(reduce_sum(cast(product, product.spec.dtype.accumulation), range(product.spec.rank)))
    return reduce(add, terms)


def reference_gradients(
    graph: Graph, feeds: Mapping[str, Any], loss: Value, leaves: Mapping[str, Value]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return a recorded loss and its gradients by `leaves`, from torch autograd over the references of the ops."""
    known = by_reference(graph, feeds, set(leaves.values()))
    gradients = torch.autograd.grad(known[loss], [known[value] for value in leaves.values()])
    return known[loss].detach().numpy(), {name: g.numpy() for name, g in zip(leaves, gradients, strict=True)}
