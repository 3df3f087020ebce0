"""Values, nodes and the graph that records them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from ttrain.core.errors import GraphError
from ttrain.core.spec import TensorSpec

if TYPE_CHECKING:
    from ttrain.graph.op import Op


class Kind(Enum):
    """Where a value comes from."""

    INPUT = "input"  # uploaded for every step: the batch, learning rate, step number, seed
    PARAMETER = "parameter"
    GRADIENT = "gradient"  # of a parameter, kept from backward to update
    OPTIMIZER = "optimizer"  # moments, velocities
    COPY = "copy"  # a parameter rounded to the compute dtype; derived, never saved
    CACHE = "cache"  # keys and values of a text that sampling goes on with, or a batch that is held; never saved
    NODE = "node"  # the output of a node

    @property
    def is_state(self) -> bool:
        """Whether the buffer outlives the step."""
        return self not in (Kind.INPUT, Kind.NODE)


class Stage(Enum):
    """Part of the step that a node belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


class Value:
    """A tensor of the graph: its spec, and the node that makes it. Holds no numbers."""

    __slots__ = ("graph", "index", "kind", "name", "number", "producer", "spec")

    def __init__(
        self, graph: Graph, spec: TensorSpec, kind: Kind, name: str, producer: Node | None = None, index: int = 0
    ) -> None:
        self.graph, self.spec, self.kind, self.name = graph, spec, kind, name
        self.producer, self.index = producer, index
        self.number = graph.next_number()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    @property
    def on_host(self) -> bool:
        """Whether the value lies in host memory beside a device that has its own; see place.py. Inputs count as not."""
        if self.producer is not None:
            return self.producer.op.on_host
        return self.kind.is_state and self.graph.hosted is not None and self.graph.hosted(self.name)

    def __repr__(self) -> str:
        return f"%{self.number}:{self.spec}" if self.kind is Kind.NODE else f"{self.name}:{self.spec}"


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

    @property
    def values(self) -> list[Value]:
        """The inputs that are present."""
        return [value for value in self.inputs if value is not None]

    def input(self, name: str) -> Value:
        """An input by its declared name."""
        names = self.op.inputs
        value = self.inputs[names.index(name if name in names else f"{name}?")]
        if value is None:
            raise GraphError(f"{self.op.name}: input {name!r} is absent.")
        return value

    def __repr__(self) -> str:
        outputs = ", ".join(map(repr, self.outputs))
        arguments = ["-" if value is None else repr(value) for value in self.inputs]
        arguments += [f"{key}={value}" for key, value in self.attributes.items()]
        return f"{outputs} = {self.op.name}({', '.join(arguments)})"


class RecordCounter:
    """How many nodes this process has recorded: a static step must not move it."""

    nodes = 0


@dataclass
class Graph:
    """Nodes in the order they were recorded, with the named values that enter and leave.

    `on_record` is called with each node right after it was appended: the dynamic engine launches it there.
    `on_release` is told of values that nothing recorded from now on will read. `hosted` tells by name which state lies
    in host memory, for a device that has its own; nodes are then placed as they are recorded, see place.py.
    """

    on_record: Callable[[Node], None] | None = None
    on_release: Callable[[Sequence[Value]], None] | None = None
    nodes: list[Node] = field(default_factory=list)
    inputs: dict[str, Value] = field(default_factory=dict)
    state: dict[str, Value] = field(default_factory=dict)
    outputs: dict[str, Value] = field(default_factory=dict)
    hosted: Callable[[str], bool] | None = None
    hosting: bool = False  # whether nodes run on the host whatever they read
    held: frozenset[str] = frozenset()  # names of inputs that are given once, as state, instead of for every step
    crossed: dict[Value, Value] = field(default_factory=dict)  # value -> the same on the other side
    _scope: list[str] = field(default_factory=list)
    _stage: Stage = Stage.FORWARD
    _segment: int | None = None
    _segments: int = 0
    _copy: int = 0
    _numbers: int = 0

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers - 1

    def input(self, name: str, spec: TensorSpec) -> Value:
        """The step input of that name, declared on first use."""
        if name in self.held:
            return self.state_value(name, spec, Kind.CACHE)
        return self._named(self.inputs, name, spec, Kind.INPUT)

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

    def output(self, name: str, value: Value) -> None:
        """Mark a value to be kept until the step ends and handed out under this name."""
        self.outputs[name] = value

    def append(self, op: Op, inputs: tuple[Value | None, ...], attributes: Mapping[str, Any]) -> Node:
        """Record one node; its op has checked nothing yet."""
        if self.hosted is not None:
            from ttrain.graph.place import placed

            op, inputs = placed(self, op, inputs, attributes)
        for value in inputs:
            if value is not None and value.graph is not self:
                raise GraphError(f"{op.name}: input {value!r} belongs to another graph.")
        specs = op.infer_outputs([None if value is None else value.spec for value in inputs], attributes)
        node = Node(op, inputs, attributes, (), "/".join(self._scope), self._stage, self._segment, self._copy)
        node.outputs = tuple(Value(self, spec, Kind.NODE, "", node, index) for index, spec in enumerate(specs))
        self.nodes.append(node)
        RecordCounter.nodes += 1
        if self.on_record is not None:
            self.on_record(node)
        return node

    def release(self, values: Sequence[Value]) -> None:
        """Tell the engine that nothing recorded from now on reads these values."""
        if self.on_release is not None:
            self.on_release(values)
            if self.crossed:
                gone = set(values)
                self.on_release([twin for value, twin in self.crossed.items() if value in gone])
                kept = self.crossed.items()
                self.crossed = {value: twin for value, twin in kept if value not in gone and twin not in gone}

    @contextmanager
    def host(self) -> Iterator[None]:
        """Nodes recorded inside run on the host, where the graph places its nodes at all."""
        previous, self.hosting = self.hosting, self.hosted is not None
        try:
            yield
        finally:
            self.hosting = previous

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Nodes recorded inside carry this name, for people who read the graph."""
        self._scope.append(name)
        try:
            yield
        finally:
            self._scope.pop()

    @contextmanager
    def stage(self, stage: Stage) -> Iterator[None]:
        previous, self._stage = self._stage, stage
        try:
            yield
        finally:
            self._stage = previous

    @contextmanager
    def segment(self) -> Iterator[int]:
        """Nodes recorded inside are computed again by backward instead of being kept."""
        previous, self._segment = self._segment, self._segments
        self._segments += 1
        try:
            yield self._segment
        finally:
            self._segment = previous

    @contextmanager
    def no_segment(self) -> Iterator[None]:
        """Nodes recorded inside belong to no segment, also within one."""
        previous, self._segment = self._segment, None
        try:
            yield
        finally:
            self._segment = previous

    @contextmanager
    def copying(self, number: int) -> Iterator[None]:
        """Nodes recorded inside are copies of earlier ones; merging them back would undo recomputation."""
        previous, self._copy = self._copy, number
        try:
            yield
        finally:
            self._copy = previous
