"""Joining neighbours that one pass over memory can serve, for a device whose kernels are made for a plan.

Needs a kernel table with a row for op `fused`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ttrain.core.spec import DType
from ttrain.graph.alias import overwritten, roots_of
from ttrain.graph.graph import Graph, Node, Value, op
from ttrain.graph.kinds import Kind
from ttrain.graph.rewrite import Rewriter

ELEMENTWISE = (
    "add", "subtract", "multiply", "divide", "scale", "exp", "log", "sqrt", "relu", "relu_grad", "tanh", "tanh_grad",
    "gelu", "gelu_grad", "cast", "expand", "dropout", "embedding", "maximum", "greater", "sigmoid", "sign",
    "silu", "silu_grad",
)  # fmt: skip
DTYPES = (DType.FP32, DType.BF16)
MOST_STEPS = 12  # of one program: more would not fit the vector registers


@dataclass(eq=False)
class _Item:
    """Nodes that run together, in order, and the views of what they make; most items are a single node."""

    members: list[Node]
    groupable: bool = False
    views: list[Node] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.members[-1].outputs[0].shape

    def reads(self) -> set[Value]:
        """Values that come from outside."""
        own = self.makes()
        return {value for node in self.members for value in node.values if value not in own}

    def makes(self) -> set[Value]:
        return {output for node in (*self.members, *self.views) for output in node.outputs}


def group(graph: Graph) -> Graph:
    """Join elementwise nodes over one shape into `fused` nodes: those that feed one another, or read the same tensor.

    Two are joined where the later one, with what it needs, may come up to the earlier, or the earlier one down to it:
    what they pass must not make or read their values, nor overwrite state that they read.
    """
    schedule = _Schedule(graph)
    for item in list(schedule.items):
        if item.groupable:
            schedule.join(item)
    rewriter = Rewriter(graph)
    for item in schedule.items:
        if len(item.members) == 1:
            rewriter.copy(item.members[0])
        else:
            _record(rewriter, item, schedule)
        for view in item.views:
            rewriter.copy(view)
    return rewriter.finish()


class _Schedule:
    """Items in the order in which they run."""

    def __init__(self, graph: Graph) -> None:
        self.roots, self.kept = roots_of(graph), set(graph.outputs.values())
        self.items: list[_Item] = []
        self.maker: dict[Value, _Item] = {}
        for node in graph.nodes:
            if node.op.view and node.values[0] in self.maker:  # costs nothing, so it goes where its source goes
                item = self.maker[node.values[0]]
                item.views.append(node)
            else:
                item = _Item([node], _groupable(node))
                self.items.append(item)
            self.maker.update(dict.fromkeys(node.outputs, item))
        self.readers: dict[Value, list[_Item]] = {}
        for item in self.items:
            for value in item.reads():
                self.readers.setdefault(value, []).append(item)

    def join(self, item: _Item) -> None:
        """Add an item to the nearest earlier one that it fits; otherwise leave it alone."""
        places = {other: place for place, other in enumerate(self.items)}
        here = places[item]
        for other in sorted(self._partners(item), key=lambda other: -places.get(other, -1)):
            there = places.get(other, here)
            if there >= here or not self._alike(other, item):
                continue
            between = self.items[there + 1 : here]
            order = self._up(other, item, between)
            if order is None and self._may_pass(other, between, earlier=False):
                order = [*between, other]
            if order is not None:
                self.items[there : here + 1] = order
                self._merge(other, item)
                return

    def _up(self, other: _Item, item: _Item, between: Sequence[_Item]) -> list[_Item] | None:
        """The order in which an item, with what it needs, comes up to an earlier one; None where it can't."""
        needed: list[_Item] = []
        wanted = item.reads()
        for each in reversed(between):
            if each.makes() & wanted:
                needed.insert(0, each)
                wanted |= each.reads()
        passed = [other]
        for each in between:
            if each not in needed:
                passed.append(each)
            elif not self._may_pass(each, passed, earlier=True) or any(overwritten(node) for node in each.members):
                return None
        if not self._may_pass(item, passed[1:], earlier=True):
            return None
        return [*needed, *passed]

    def _partners(self, item: _Item) -> set[_Item]:
        """Items that make what this one reads, or read a whole tensor that it reads too."""
        found: set[_Item] = set()
        for value in item.reads():
            if value in self.maker:
                found.add(self.maker[value])
            if value.shape == item.shape:
                found.update(self.readers[value])
        return found

    def _alike(self, first: _Item, second: _Item) -> bool:
        if not (first.groupable and second.groupable) or first.shape != second.shape:
            return False
        if any(output in second.reads() for view in first.views for output in view.outputs):
            return False  # seen under another shape, it is not the same element
        small = len(first.members) + len(second.members) <= MOST_STEPS
        return small and first.members[0].stage is second.members[0].stage

    def _may_pass(self, item: _Item, between: Iterable[_Item], earlier: bool) -> bool:
        """Whether an item may move past these, towards the start or the end of the step."""
        reads, makes = item.reads(), item.makes()
        touched = {self.roots[value] for value in reads}
        for other in between:
            if (other.makes() & reads) if earlier else (other.reads() & makes):
                return False
            if any(self.roots[value] in touched for node in other.members for value in overwritten(node)):
                return False
        return True

    def _merge(self, first: _Item, second: _Item) -> None:
        first.members += second.members
        first.views += second.views
        self.maker.update(dict.fromkeys(second.makes(), first))
        for value in second.reads():
            self.readers[value] = [first if other is second else other for other in self.readers[value]]

    def read_elsewhere(self, item: _Item, value: Value) -> bool:
        viewed = any(value in view.values for view in item.views)
        return viewed or value in self.kept or any(other is not item for other in self.readers.get(value, []))


def _groupable(node: Node) -> bool:
    if node.op.name not in ELEMENTWISE or len(node.values) != len(node.inputs):
        return False
    specs, output = [value.spec for value in node.values], node.outputs[0].spec
    if node.op.name == "embedding" and output in specs:  # might be written over the very rows it looks up
        return False
    return all(spec.dtype in (*DTYPES, DType.INT64) for spec in (*specs, output)) and output.size > 1


def _record(rewriter: Rewriter, item: _Item, schedule: _Schedule) -> None:
    """Record one fused node for an item, and let its outputs stand for what others read of the members."""
    inputs: dict[Value, int] = {}
    for value in sorted(item.reads(), key=lambda value: (value.kind is not Kind.NODE, value.number)):
        inputs[value] = len(inputs)
    numbers: dict[Value, int] = dict(inputs)
    for position, node in enumerate(item.members):
        numbers[node.outputs[0]] = len(inputs) + position
    program = tuple(
        (node.op.name, tuple(numbers[value] for value in node.values), tuple(sorted(node.attributes.items())))
        for node in item.members
    )
    outputs = [node.outputs[0] for node in item.members if schedule.read_elsewhere(item, node.outputs[0])]
    outputs = _with_dying_first(outputs, inputs)
    results = tuple(numbers[output] - len(inputs) for output in outputs)
    with rewriter.at(item.members[-1]):
        values = [rewriter.map[value] for value in inputs]
        node = rewriter.new.append(op("fused"), tuple(values), {"program": program, "results": results})
    rewriter.replace(outputs, node.outputs)


def _with_dying_first(outputs: Sequence[Value], inputs: Mapping[Value, int]) -> list[Value]:
    """First an output that could take over an input's buffer: only output 0 may."""
    specs = {value.spec for value in inputs if value.kind is Kind.NODE}
    return sorted(outputs, key=lambda output: output.spec not in specs)
