"""Values, nodes, ops and the graph that records them; kinds of values, and the stages of a step."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from typing import Any, TypeVar

from ttrain.core.errors import GraphError
from ttrain.core.spec import TensorSpec


class Kind(Enum):
    """The origin of a value."""

    INPUT = "input"  # uploaded for every step: the batch, learning rate, step number, seed
    PARAMETER = "parameter"
    FROZEN = "frozen"  # a parameter that no step of the run writes; saved once
    GRADIENT = "gradient"  # of a parameter, kept from backward to update
    OPTIMIZER = "optimizer"  # moments, velocities
    COPY = "copy"  # a parameter rounded to the compute dtype; derived, never saved
    BUFFER = "buffer"  # of a model, not trained but written by its steps, such as a running mean; saved
    CONSTANT = "constant"  # such as a mask, or a second model's weights: read anew at a start; never written or saved
    CACHE = "cache"  # keys and values of a text that sampling goes on with, or training data; never saved
    NODE = "node"  # the output of a node

    @property
    def is_state(self) -> bool:
        """True if the buffer outlives the step."""
        return self not in (Kind.INPUT, Kind.NODE)


class Stage(Enum):
    """Part of the step that a node belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


class Value:
    """A tensor of the graph: its spec, and the node that makes it. Holds no numbers.

    `example`, of a step input: numbers that a step may be given, as something that broadcasts to the shape.
    """

    __slots__ = ("example", "graph", "index", "kind", "name", "number", "on_host", "producer", "spec")

    def __init__(
        self, graph: Graph, spec: TensorSpec, kind: Kind, name: str, producer: Node | None = None, index: int = 0
    ) -> None:
        self.graph, self.spec, self.kind, self.name = graph, spec, kind, name
        self.producer, self.index = producer, index
        # Whether it lies in host memory beside a device that has its own; see place.py. Inputs never do.
        self.on_host = producer is not None and producer.on_host
        self.number = next(graph.numbers)
        self.example: float | Sequence[float] = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    def __repr__(self) -> str:
        return f"{self.label}:{self.spec}"

    @property
    def label(self) -> str:
        """Its name, or its number."""
        return self.name or f"%{self.number}"

    def __add__(self, other: Value | float) -> Value:
        return self.graph.apply("add", self, self._operand(other))

    def __sub__(self, other: Value | float) -> Value:
        return self.graph.apply("subtract", self, self._operand(other))

    def __rsub__(self, other: float) -> Value:
        return self._operand(other) - self

    def __mul__(self, other: Value | float) -> Value:
        if isinstance(other, Value):
            return self.graph.apply("multiply", self, other)
        return self if other == 1 else self.graph.apply("scale", self, factor=float(other))

    def __truediv__(self, other: Value | float) -> Value:
        return self.graph.apply("divide", self, self._operand(other))

    def __rtruediv__(self, other: float) -> Value:
        return self._operand(other) / self

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> Value:
        return self * -1.0

    def _operand(self, other: Value | float) -> Value:
        """A number as a scalar of this value's dtype."""
        if isinstance(other, Value):
            return other
        return self.graph.apply("full", spec=TensorSpec((), self.spec.dtype), value=float(other))


RecordSide = Callable[[Sequence["Value | None"], Mapping[str, Any], bool], Sequence[Value]]


@dataclass(eq=False, slots=True)
class Node:
    """One op applied to values. `inputs` may hold None where an op's input is optional."""

    op: Op
    inputs: tuple[Value | None, ...]
    attributes: Mapping[str, Any]
    outputs: tuple[Value, ...] = ()
    scope: str = ""
    stage: Stage = Stage.FORWARD
    segment: int | None = None  # which recomputed block a forward node belongs to
    copy: int = 0  # 0 the original; k the k-th copy that backward computes again
    on_host: bool = False  # runs on the host beside a device that has memory of its own; see place.py
    # What autodiff notes on a recorded graph for place.py; rewriting forgets it.
    gradient_of: Node | None = None
    copy_of: Node | None = None

    @property
    def label(self) -> str:
        """The name of its op, for people: `host.add` runs on the host."""
        return f"host.{self.op.name}" if self.on_host and not self.op.transfer else self.op.name

    @property
    def by_host(self) -> bool:
        """True if the host runs it or takes part. No capture of the device holds such a node."""
        return self.on_host or self.op.transfer

    @property
    def values(self) -> list[Value]:
        """The inputs that are present."""
        return [value for value in self.inputs if value is not None]

    @property
    def overwritten(self) -> list[Value]:
        """The inputs whose buffers it overwrites."""
        if self.op.view:
            return []
        return [value for index in self.op.aliases(self).values() if (value := self.inputs[index]) is not None]

    @property
    def specs(self) -> tuple[list[TensorSpec | None], list[TensorSpec]]:
        """Return the specs of the inputs, None where one is absent, and of the outputs."""
        given = [None if value is None else value.spec for value in self.inputs]
        return given, [value.spec for value in self.outputs]

    def input(self, name: str) -> Value:
        """An input by its declared name."""
        names = self.op.inputs
        value = self.inputs[names.index(name if name in names else f"{name}?")]
        if value is None:
            raise GraphError(f"{self.op.name}: input {name!r} is absent.")
        return value

    def __repr__(self) -> str:
        return self.text(repr)

    def text(self, called: Callable[[Value], str], made: Callable[[Value], str] = repr) -> str:
        """The node as a call, its inputs and outputs written by these functions."""
        arguments = ["-" if value is None else called(value) for value in self.inputs]
        arguments += [f"{key}={value}" for key, value in self.attributes.items()]
        return f"{', '.join(map(made, self.outputs))} = {self.label}({', '.join(arguments)})"


@dataclass(frozen=True)
class Case:
    """One test case of an op: input shapes (None for an absent input) and attributes.

    Without shapes it stands for several, which follow from the shapes that the op declares.

    `integers` maps an input's name to the exclusive upper bound of its random int64 values; `holes` names those in
    which some values are -1 instead (no target there). `positive` names inputs whose values must be above zero. The
    tensors of a list input are named `<list>.<number>`. `narrow` names tensors that are in the dtype which the case is
    run in although the op keeps such inputs wide. `values` gives int64 values that can't be random, in nested lists.
    """

    shapes: tuple[tuple[int, ...] | None, ...] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)
    integers: Mapping[str, int] = field(default_factory=dict)
    positive: tuple[str, ...] = ()
    holes: tuple[str, ...] = ()
    narrow: tuple[str, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)


class Op:
    """Base of every op. Subclasses state facts; they hold no tensors and touch no device.

    Attributes:
        name: as the graph prints it and as kernel tables spell it.
        family: section of the documentation.
        inputs, outputs: names in order. A trailing "?" marks an optional input, a trailing "*" a list of any length.
        elementwise: output 0 may share the buffer of an input of the same size.
        cheap: recomputing costs one pass over the input, so backward may do it instead of keeping the output.
        view: output 0 is input 0 under another shape, without a copy.
        mutates: output name -> input name whose buffer it overwrites.
        wide: floating-point inputs that are fp32 at least even where a step computes in bf16.
        constants: floating-point inputs that never get a gradient.
        differentiable: False for ops that only occur after backward.
        transfer: moves a value between such a device and the host.
        joint: all ranks take part, so it stays where nothing here reads it. It may overwrite what is no state.
        cases: shapes and attributes that the generated tests run; none where the cases of other ops record this one.
    """

    name: str
    family: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...] = ("y",)
    elementwise: bool = False
    cheap: bool = False
    view: bool = False
    mutates: Mapping[str, str] = {}
    accumulation: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()
    differentiable: bool = True
    transfer: bool = False
    joint: bool = False
    cases: Sequence[Case] = ()

    def outputs_of(self, attributes: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the outputs that a node with these attributes has, which may be fewer."""
        return self.outputs

    def infer(self, *specs: Any, **attributes: Any) -> TensorSpec | Sequence[TensorSpec]:
        """Specs of the outputs from those of the inputs. Raises ShapeError (got, expected, fix)."""
        raise GraphError(f"op {self.name} declares no shape rule")

    def vjp(self, node: Node, *gradients: Value | None) -> Sequence[Value | None]:
        """Record the nodes that turn gradients of the outputs into gradients of the inputs.

        A gradient of an output is None where nothing downstream needs it.
        """
        raise GraphError(f"op {self.name} has no gradient rule: it must not lie between a parameter and the loss")

    def reference(self, *tensors: Any, **attributes: Any) -> Any:
        """Compute the op in plain torch, differentiable by torch autograd: the oracle of the tests (fp64)."""
        raise GraphError(f"op {self.name} declares no reference")

    def flops(self, node: Node) -> int:
        """Floating-point operations of one execution; a multiply-add counts two."""
        return sum(output.spec.size for output in node.outputs)

    def nbytes(self, node: Node) -> int:
        """Bytes read and written by one execution, each tensor counted once."""
        return sum(value.spec.nbytes for value in {*node.values, *node.outputs})

    def decompose(self, node: Node, inputs: tuple[Value | None, ...]) -> Sequence[Value] | None:
        """Record the same computation with simpler ops on `inputs`; None where the op is a primitive."""
        return None

    def rematerialized(self, node: Node) -> Node | None:
        """A node on values that backward keeps, whose first output backward may make again; None: not cheaply."""
        return node if self.cheap and not self.view else None

    def aliases(self, node: Node) -> dict[int, int]:
        """Output index -> index of the input whose buffer it is (views and in-place updates)."""
        if self.view:
            return {0: 0}
        return {self.outputs.index(out): self.inputs.index(into) for out, into in self.mutates.items()}

    def by_side(
        self, inputs: Sequence[Value | None], attributes: Mapping[str, Any], record: RecordSide
    ) -> Sequence[Value] | None:
        """Record an op that takes tensors of device and host as one node for each side; None: transferred as usual.

        `record(inputs, attributes, on_host)` records this op on one side and returns its outputs.
        """
        return None

    # What follows is shared machinery; subclasses leave it alone.

    def infer_outputs(self, specs: Sequence[TensorSpec | None], attributes: Mapping[str, Any]) -> list[TensorSpec]:
        inferred = self.infer(*specs, **attributes)
        return [inferred] if isinstance(inferred, TensorSpec) else list(inferred)

    def record(self, *inputs: Value | None, graph: Graph | None = None, **attributes: Any) -> Any:
        """Append a node; returns its only output, or a tuple where there are several, or a list of any length."""
        if graph is None:
            graph = next(value.graph for value in inputs if value is not None)
        outputs = graph.append(self, inputs, attributes).outputs
        return outputs[0] if len(outputs) == 1 and not self.outputs[0].endswith("*") else outputs


REGISTRY: dict[str, Op] = {}  # every op by name
AnyOp = TypeVar("AnyOp", bound=Op)


def declare(op: AnyOp) -> AnyOp:
    """Add an op to the registry. A second declaration under a name is an error."""
    if op.name in REGISTRY:
        raise GraphError(f"op {op.name!r} is declared twice")
    REGISTRY[op.name] = op
    return op


def op(name: str) -> Op:
    """A declared op by name."""
    return REGISTRY[name]


@dataclass
class Graph:
    """Nodes in the order they were recorded, with the named values that enter and leave."""

    nodes: list[Node] = field(default_factory=list)
    inputs: dict[str, Value] = field(default_factory=dict)
    state: dict[str, Value] = field(default_factory=dict)
    outputs: dict[str, Value] = field(default_factory=dict)
    given: Mapping[str, Value] = field(default_factory=dict)  # what stands for inputs that are not handed to every step
    gathered: dict[Any, tuple[Value, ...]] = field(default_factory=dict)  # whole weights, by who gathers them
    needed: Container[Value] | None = None  # values whose gradients the backward pass asks for, while it is recorded
    _marks: Mapping[str, Any] = field(default_factory=dict)  # fields of the nodes that are recorded
    _segments: int = 0
    numbers: Iterator[int] = field(default_factory=count)  # of its values

    def input(self, name: str, spec: TensorSpec, example: float | Sequence[float] = 0) -> Value:
        """The step input of that name, declared on first use.

        A step that is run to be measured, before a run has inputs for it, gets the `example`; see Value.
        """
        value = self.given.get(name) or self._named(self.inputs, name, spec, Kind.INPUT)
        value.example = example or value.example
        return value

    def state_value(self, name: str, spec: TensorSpec, kind: Kind) -> Value:
        """The persistent tensor of that name, declared on first use."""
        return self._named(self.state, name, spec, kind)

    def _named(self, table: dict[str, Value], name: str, spec: TensorSpec, kind: Kind) -> Value:
        value = table.get(name)
        if value is None:
            value = table[name] = Value(self, spec, kind, name)
        elif value.spec != spec or value.kind is not kind:
            raise GraphError(
                f"{name!r} was declared as {value.kind.value} {value.spec}, now asked for as {kind.value} {spec}."
            )
        return value

    def apply(self, name: str, *inputs: Value | None, **attributes: Any) -> Any:
        """Record a declared op by name; see `Op.record`."""
        return REGISTRY[name].record(*inputs, graph=self, **attributes)

    def roots(self) -> dict[Value, Value]:
        """For every value the one whose buffer it shares, through views and in-place updates; else itself."""
        roots = {value: value for value in (*self.inputs.values(), *self.state.values())}
        for node in self.nodes:
            aliases = node.op.aliases(node)
            for index, output in enumerate(node.outputs):
                source = node.inputs[aliases[index]] if index in aliases else None
                roots[output] = output if source is None else roots.get(source, source)
        return roots

    def output(self, name: str, value: Value) -> None:
        """Mark a value to be kept until the step ends and handed out under this name."""
        self.outputs[name] = value

    def append(self, op: Op, inputs: tuple[Value | None, ...], attributes: Mapping[str, Any]) -> Node:
        """Record one node; its op has checked nothing yet."""
        for value in inputs:
            if value is not None and value.graph is not self:
                raise GraphError(f"{op.name}: input {value!r} belongs to another graph.")
        node = Node(op, inputs, attributes, **self._marks)
        specs = op.infer_outputs(node.specs[0], attributes)
        node.outputs = tuple(Value(self, spec, Kind.NODE, "", node, index) for index, spec in enumerate(specs))
        self.nodes.append(node)
        return node

    def amend(self, node: Node, **attributes: Any) -> tuple[Value, ...]:
        """Give a recorded node further attributes, and after its outputs those that come with them; returns all."""
        node.attributes = {**node.attributes, **attributes}
        specs = node.op.infer_outputs(node.specs[0], node.attributes)
        more = range(len(node.outputs), len(specs))
        node.outputs += tuple(Value(self, specs[index], Kind.NODE, "", node, index) for index in more)
        return node.outputs

    def differentiates(self, value: Value | None) -> bool:
        """True if the backward pass that is being recorded needs the gradient of a value."""
        return self.needed is None or value in self.needed

    @contextmanager
    def within(self, **marks: Any) -> Iterator[None]:
        """Nodes recorded inside have these values of their fields, such as `copy` or `on_host`."""
        previous, self._marks = self._marks, {**self._marks, **marks}
        try:
            yield
        finally:
            self._marks = previous

    def scope(self, name: str) -> AbstractContextManager[None]:
        """Nodes recorded inside carry this name, below those around it, for people who read the graph."""
        above = self._marks.get("scope")
        return self.within(scope=f"{above}/{name}" if above else name)

    def stage(self, stage: Stage) -> AbstractContextManager[None]:
        return self.within(stage=stage)

    def segment(self, recomputed: bool = True) -> AbstractContextManager[None]:
        """Nodes recorded inside are computed again by backward instead of being kept; as usual unless `recomputed`."""
        self._segments += recomputed
        return self.within(segment=self._segments - 1) if recomputed else self.within()
