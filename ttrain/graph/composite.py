"""Ops that are plain functions over other ops: what there is to know about one follows from its body.

    @composite
    def rms_norm(x: Value, weight: Value, eps: float = 1e-6) -> Value:
        ...

Calling it records one node. Shape rule, reference, FLOPs, decomposition and gradient come from the body, so every
engine and device runs it; a device that is faster at it has a row under its name. Where memory or accuracy asks for
another gradient than the body's, `@rms_norm.gradient` names it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar, overload

from ttrain.core.errors import GraphError, ShapeError
from ttrain.core.spec import DType, TensorSpec
from ttrain.graph.case import Case
from ttrain.graph.graph import REGISTRY, Graph, Node, Op, Value

P = ParamSpec("P")
R = TypeVar("R")
Inputs = tuple[Value | None, ...]
Gradient = Callable[..., Sequence[Value | None]]  # (node, gradients of the outputs) -> of the inputs
_LISTED: dict[Any, str] = {
    Value: "{}",
    Value | None: "{}?",
    Sequence[Value]: "{}*",
}  # annotation -> how `Op.inputs` spells it


class Probe(NamedTuple):
    """A body recorded on inputs of given specs, in a graph of its own."""

    graph: Graph
    inputs: Inputs
    outputs: tuple[Value, ...]


class Composite(Op, Generic[P, R]):
    """An op whose body is a function of values; parameters that are no values are attributes. See `composite`."""

    def __init__(self, body: Callable[P, R], **facts: Any) -> None:
        self.body, self.own_gradient = body, None  # type: Callable[P, R], Gradient | None
        self._signature = inspect.signature(body, eval_str=True)
        declared = self._signature.parameters.values()
        if not any(p.annotation in _LISTED for p in declared):
            raise GraphError(f"{body.__name__}: no parameter is annotated Value, Value | None or Sequence[Value].")
        self.inputs = tuple(_LISTED[p.annotation].format(p.name) for p in declared if p.annotation in _LISTED)
        self._values = [p.name for p in declared if p.annotation in _LISTED]
        self._floats = [p.name for p in declared if p.annotation is float]
        self._cases: tuple[Case, ...] = ()
        self.name, self.__doc__ = body.__name__.strip("_"), body.__doc__
        self.family = body.__module__.rpartition(".")[2]
        for fact, value in facts.items():
            setattr(self, fact, value)
        self._probe = lru_cache(maxsize=64)(self._record_probe)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        inputs: list[Value | None] = []
        for name, declared in zip(self._values, self.inputs, strict=True):
            given: Any = bound.arguments[name]
            inputs += given if declared.endswith("*") else [given]
        given_attributes = ((name, bound.arguments[name]) for name in bound.arguments if name not in self._values)
        attributes = {name: value for name, value in given_attributes if value is not None}
        attributes |= {name: float(attributes[name]) for name in self._floats if name in attributes}
        return self.record(*inputs, **attributes)

    def gradient(self, function: Gradient) -> Gradient:
        """Decorator: `function(node, *gradients of the outputs)` records the gradients of the inputs."""
        self.own_gradient = function
        return function

    def vjp(self, node: Node, *gradients: Value | None) -> Sequence[Value | None]:
        """The own gradient. Without one autodiff goes through the body instead."""
        return super().vjp(node, *gradients) if self.own_gradient is None else self.own_gradient(node, *gradients)

    def infer(self, *specs: TensorSpec | None, **attributes: Any) -> Sequence[TensorSpec]:
        return [output.spec for output in self.probe(specs, attributes).outputs]

    def decompose(self, node: Node, inputs: Inputs) -> Sequence[Value]:
        return self._apply(inputs, node.attributes)

    def flops(self, node: Node) -> int:
        specs = [None if value is None else value.spec for value in node.inputs]
        return sum(part.op.flops(part) for part in self.probe(specs, node.attributes).graph.nodes)

    def reference(self, *tensors: Any, **attributes: Any) -> Any:
        """The body on torch tensors, node by node."""
        specs = [None if t is None else TensorSpec(tuple(t.shape), _DTYPES[str(t.dtype)]) for t in tensors]
        probe = self.probe(specs, attributes)
        known = dict(zip(probe.inputs, tensors, strict=True))
        for node in probe.graph.nodes:
            results = node.op.reference(*(known[value] for value in node.inputs), **node.attributes)
            known.update(zip(node.outputs, results if isinstance(results, list | tuple) else [results], strict=True))
        outputs = [known[value] for value in probe.outputs]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def cases(self) -> Sequence[Case]:
        return self._cases

    def add_cases(self, given: Sequence[Case]) -> None:
        self._cases = (*self._cases, *given)

    def probe(self, specs: Sequence[TensorSpec | None], attributes: Mapping[str, Any]) -> Probe:
        """The body on inputs of these specs. Raises ShapeError that begins with the name of this op."""
        return self._probe(tuple(specs), tuple(sorted(attributes.items())))

    def _record_probe(self, specs: tuple[TensorSpec | None, ...], attributes: tuple[tuple[str, Any], ...]) -> Probe:
        graph = Graph()
        inputs = tuple(None if spec is None else graph.input(str(i), spec) for i, spec in enumerate(specs))
        try:
            return Probe(graph, inputs, self._apply(inputs, dict(attributes)))
        except ShapeError as error:
            raise ShapeError(f"{self.name}: {str(error).partition(': ')[2]}") from None

    def _apply(self, inputs: Inputs, attributes: Mapping[str, Any]) -> tuple[Value, ...]:
        """Record the body; the tensors of a list come last."""
        single = [name for name in self.inputs if not name.endswith("*")]
        values = dict(zip(self._values, inputs, strict=False))
        if len(single) < len(self.inputs):
            values[self._values[-1]] = inputs[len(single) :]  # type: ignore[assignment]
        body: Callable[..., Any] = self.body
        outputs = body(**values, **attributes)
        return outputs if isinstance(outputs, tuple) else (outputs,)


@overload
def composite(body: Callable[P, R], /) -> Composite[P, R]: ...
@overload
def composite(**facts: Any) -> Callable[[Callable[P, R]], Composite[P, R]]: ...
def composite(body: Callable[P, R] | None = None, **facts: Any) -> Any:
    """Decorator: declare a function of values as an op; `facts` set attributes of Op, such as outputs and wide.

    Values come before attributes, lists of values last among them; attributes are hashable, and graph values annotated
    Value, Value | None or Sequence[Value].
    """

    def declare(function: Callable[P, R]) -> Composite[P, R]:
        made = Composite(function, **facts)
        REGISTRY.add(made)
        return made

    return declare if body is None else declare(body)


def cases(op: Composite[..., Any], *given: Case) -> None:
    """Declare what the generated tests run an op on."""
    op.add_cases(given)


def require(condition: bool, owner: str, got: object, expected: str, fix: str = "") -> None:
    """Raise ShapeError unless the condition holds: for bodies that refuse what their parts would take."""
    if not condition:
        raise ShapeError(f"{owner}: got {got}, expected {expected}.{' ' + fix if fix else ''}")


_DTYPES = {
    "torch.float64": DType.FP64, "torch.float32": DType.FP32, "torch.bfloat16": DType.BF16,
    "torch.int64": DType.INT64, "torch.int32": DType.INT32, "torch.bool": DType.BOOL,
}  # fmt: skip
