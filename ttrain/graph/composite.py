"""Declare an op by one function, in most cases its body. All else about the op follows from the body.

    @composite
    def rms_norm(x: Value, weight: Value, eps: float = 1e-6) -> Value:
        ...

Calling it records one node. Shape rule, reference, FLOPs, decomposition and gradient come from the body, so every
engine and device runs it. A device with a faster kernel has a row under the op's name. `@rms_norm.gradient` declares
another gradient, if that of the body takes too much memory or is not accurate. An op that has no body of other ops is
declared by its shape rule, under `@primitive`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Generic, NamedTuple, ParamSpec, Protocol, TypeVar, overload

from ttrain.core.errors import GraphError, ShapeError
from ttrain.core.shapes import Shapes
from ttrain.core.spec import DType, TensorSpec
from ttrain.graph.graph import Case, Graph, Kind, Node, Op, Value, declare

P = ParamSpec("P")
R = TypeVar("R")
Inputs = tuple[Value | None, ...]
Gradient = Callable[..., Sequence[Value | None]]  # (node, gradients of the outputs) -> of the inputs
# Annotation of a parameter -> how `Op.inputs` spells it, and how an attribute is converted.
_LISTED: dict[Any, str] = {Value: "{}", Value | None: "{}?", Sequence[Value]: "{}*"}
_CONVERTED: dict[Any, Callable[[Any], Any]] = {float: float, Sequence[int]: tuple}
_NOWHERE = Graph()  # of the values that a primitive's rule looks at


class Probe(NamedTuple):
    """A body recorded on inputs of given specs, in a graph of its own."""

    graph: Graph
    inputs: Inputs
    outputs: Sequence[Value]

    @staticmethod
    def of(body: Callable[[Inputs], Sequence[Value]], specs: Sequence[TensorSpec | None]) -> Probe:
        graph = Graph()
        inputs = tuple(None if spec is None else graph.input(str(i), spec) for i, spec in enumerate(specs))
        return Probe(graph, inputs, body(inputs))

    def run(self, tensors: Sequence[Any]) -> list[Any]:
        """Run the body on torch tensors, node by node, by the references of its ops."""
        known = dict(zip(self.inputs, tensors, strict=True))
        for node in self.graph.nodes:
            results = node.op.reference(*(known[value] for value in node.inputs), **node.attributes)
            known.update(zip(node.outputs, results if isinstance(results, list | tuple) else [results], strict=True))
        return [known[value] for value in self.outputs]


def specs_of(tensors: Sequence[Any]) -> list[TensorSpec | None]:
    """Return the specs of torch tensors; None for an absent one."""
    return [None if t is None else TensorSpec(tuple(t.shape), _DTYPES[str(t.dtype)]) for t in tensors]


class Declared(Op, Generic[P, R]):
    """An op that one function declares: its parameters annotated as values are the inputs, the others attributes."""

    def __init__(self, function: Callable[P, Any], shapes: str = "", **facts: Any) -> None:
        self.function = function
        self._signature = inspect.signature(function, eval_str=True)
        declared = self._signature.parameters.values()
        self.inputs = tuple(_LISTED[p.annotation].format(p.name) for p in declared if p.annotation in _LISTED)
        self._names = dict.fromkeys(p.name for p in declared)
        self._defaults = {p.name: p.default for p in declared if p.default is not p.empty}
        self._values = [p.name for p in declared if p.annotation in _LISTED]
        self.shapes = Shapes(shapes, self._values)
        self._converted = {p.name: _CONVERTED[p.annotation] for p in declared if p.annotation in _CONVERTED}
        self.name, self.__doc__ = function.__name__.strip("_"), function.__doc__
        self.family, self.accumulation = function.__module__.rpartition(".")[2], self.shapes.accumulation
        for fact, value in facts.items():
            setattr(self, fact, value)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        named = {**dict(zip(self._names, args, strict=False)), **kwargs}
        given: dict[str, Any] = {**self._defaults, **named}
        if given.keys() != self._names.keys() or len(named) != len(args) + len(kwargs):
            self._signature.bind(*args, **kwargs)  # raises TypeError; too slow to be asked for every node
        inputs: list[Value | None] = []
        for name, declared in zip(self._values, self.inputs, strict=True):
            inputs += given[name] if declared.endswith("*") else [given[name]]
        attributes = {name: given[name] for name in self._names if name not in self._values and given[name] is not None}
        attributes |= {name: make(attributes[name]) for name, make in self._converted.items() if name in attributes}
        return self.record(*inputs, **attributes)

    def gradient(self, function: Gradient) -> Gradient:
        """Decorator: `function(node, *gradients of the outputs)` records the gradients of the inputs."""
        self.vjp, self.differentiable = function, True  # type: ignore[method-assign]
        return function

    def _apply(self, inputs: Inputs, attributes: Mapping[str, Any]) -> Any:
        """Call the function; the tensors of a list come last."""
        single = [name for name in self.inputs if not name.endswith("*")]
        values = dict(zip(self._values, inputs, strict=False))
        if len(single) < len(self.inputs):
            values[self._values[-1]] = inputs[len(single) :]  # type: ignore[assignment]
        if self.shapes.text:
            self.shapes.check(self.name, {name: _specs(values.get(name)) for name in self._values})
        function: Callable[..., Any] = self.function
        return function(**values, **attributes)


def _specs(given: Value | Sequence[Value] | None) -> list[TensorSpec]:
    """Return the specs of an input or of a list of inputs; none where it is absent."""
    return [value.spec for value in ([given] if isinstance(given, Value) else given or ())]


class Primitive(Declared[P, R]):
    """An op that no others make up: its function is the shape rule. See `primitive`."""

    def __init__(self, rule: Callable[P, Any], **facts: Any) -> None:
        super().__init__(rule, **{"differentiable": "vjp" in facts, **facts})
        self.infer = lru_cache(maxsize=256)(self.infer)  # type: ignore[method-assign]

    def infer(self, *specs: TensorSpec | None, **attributes: Any) -> TensorSpec | Sequence[TensorSpec]:
        standing = tuple(None if spec is None else Value(_NOWHERE, spec, Kind.INPUT, "") for spec in specs)
        return self._apply(standing, attributes)


class Composite(Declared[P, R]):
    """An op whose function is its body. See `composite`."""

    def __init__(self, body: Callable[P, R], **facts: Any) -> None:
        super().__init__(body, **facts)
        if not self.inputs:
            raise GraphError(f"{body.__name__}: no parameter is annotated Value, Value | None or Sequence[Value].")
        self._probe = lru_cache(maxsize=64)(self._record_probe)

    @property
    def goes_through_body(self) -> bool:
        """True if no gradient was declared, so that autodiff goes through the body."""
        return "vjp" not in vars(self)

    def infer(self, *specs: TensorSpec | None, **attributes: Any) -> Sequence[TensorSpec]:
        return [output.spec for output in self.probe(specs, attributes).outputs]

    def decompose(self, node: Node, inputs: Inputs) -> Sequence[Value]:
        return self._outputs(inputs, node.attributes)

    def flops(self, node: Node) -> int:
        return sum(part.op.flops(part) for part in self.probe(node.specs[0], node.attributes).graph.nodes)

    def reference(self, *tensors: Any, **attributes: Any) -> Any:
        """The body on torch tensors, node by node."""
        outputs = self.probe(specs_of(tensors), attributes).run(tensors)
        return outputs[0] if len(outputs) == 1 and not self.outputs[0].endswith("*") else tuple(outputs)

    def probe(self, specs: Sequence[TensorSpec | None], attributes: Mapping[str, Any]) -> Probe:
        """The body on inputs of these specs. Raises ShapeError that begins with the name of this op."""
        return self._probe(tuple(specs), tuple(sorted(attributes.items())))

    def _record_probe(self, specs: tuple[TensorSpec | None, ...], attributes: tuple[tuple[str, Any], ...]) -> Probe:
        try:
            return Probe.of(partial(self._outputs, attributes=dict(attributes)), specs)
        except ShapeError as error:
            raise ShapeError(f"{self.name}: {str(error).partition(': ')[2]}") from None

    def _outputs(self, inputs: Inputs, attributes: Mapping[str, Any]) -> tuple[Value, ...]:
        """Record the body."""
        outputs = self._apply(inputs, attributes)
        return outputs if isinstance(outputs, tuple) else (outputs,)


@overload
def composite(body: Callable[P, R], /) -> Composite[P, R]: ...
@overload
def composite(shapes: str = "", /, **facts: Any) -> Callable[[Callable[P, R]], Composite[P, R]]: ...
def composite(body: Callable[P, R] | str = "", /, **facts: Any) -> Any:
    """Decorator: declare a function of values as an op.

    `facts` set attributes of Op, such as outputs and accumulation; `shapes` are the inputs that it takes, see
    core/shapes.py.

    Values come before attributes, lists of values last among them; attributes are hashable, and graph values annotated
    Value, Value | None or Sequence[Value].
    """
    if isinstance(body, str):
        return lambda function: declare(Composite(function, **{"shapes": body, **facts}))
    return declare(Composite(body, **facts))


class _OfRule(Protocol):
    """The op of a rule that gives one spec returns one value, that of a rule that gives a list returns a tuple."""

    @overload
    def __call__(self, rule: Callable[P, TensorSpec], /) -> Primitive[P, Value]: ...
    @overload
    def __call__(self, rule: Callable[P, list[TensorSpec]], /) -> Primitive[P, tuple[Value, ...]]: ...


def primitive(shapes: str = "", **facts: Any) -> _OfRule:
    """Decorator: declare an op by its shape rule, a function from values to the spec of the output or those of several.

    `facts` set attributes of Op and take the place of its methods: at least `reference`; `vjp(node, *gradients of the
    outputs)` where a gradient passes.
    """
    return lambda rule: declare(Primitive(rule, shapes=shapes, **facts))  # type: ignore[return-value]


def cases(op: Op, *given: Case) -> None:
    """Declare what the generated tests run an op on."""
    op.cases = (*op.cases, *given)


def require(condition: bool, owner: str, got: object, expected: str, fix: str = "") -> None:
    """Raise ShapeError unless the condition holds: for bodies that refuse what their parts would take."""
    if not condition:
        raise ShapeError(f"{owner}: got {got}, expected {expected}.{' ' + fix if fix else ''}")


_DTYPES = {f"torch.{dtype.in_torch}": dtype for dtype in DType}
