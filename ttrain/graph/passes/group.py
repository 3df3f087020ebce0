"""Join neighbours that one pass over memory can serve, for a device whose kernels are made for a plan.

Needs a kernel table with a row for op `fused`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ttrain.core.spec import DType
from ttrain.graph.graph import Graph, Kind, Node, Value, op
from ttrain.graph.passes.order import dependencies
from ttrain.graph.rewrite import Rewriter, uses

ELEMENTWISE = (
    "add", "subtract", "multiply", "divide", "scale", "exp", "log", "sqrt", "relu", "relu_grad", "tanh", "tanh_grad",
    "gelu", "gelu_grad", "cast", "expand", "dropout", "embedding", "maximum", "greater", "sigmoid", "sign",
    "silu", "silu_grad",
)  # fmt: skip
DTYPES = (DType.FP32, DType.BF16, DType.FP16)
MOST_STEPS = 12  # of one program: more would not fit the vector registers


@dataclass(eq=False)
class _Item:
    """Nodes that run together, in order, and the views of what they make; most items are a single node."""

    members: list[Node]
    groupable: bool
    views: list[Node] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.members[-1].outputs[0].shape

    def reads(self) -> set[Value]:
        """Values that come from outside."""
        return {value for node in self.members for value in node.values if value.producer not in self.members}


def group(graph: Graph) -> Graph:
    """Join elementwise nodes over one shape into `fused` nodes: those that feed one another, or read the same tensor.

    Two are joined where nothing has to run between them; the later one, with what it needs, comes up to the earlier.
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
            _record(rewriter, item, schedule.read_elsewhere(item))
        for view in item.views:
            rewriter.copy(view)
    return rewriter.finish()


class _Schedule:
    """Items in the order in which they run."""

    def __init__(self, graph: Graph) -> None:
        self.kept, self.readers = set(graph.outputs.values()), uses(graph)
        self.needed = dependencies(graph.nodes, graph.roots())
        self.items: list[_Item] = []
        self.item_of: dict[Node | None, _Item] = {}
        for node in graph.nodes:
            source = self.item_of.get(node.values[0].producer) if node.op.view else None
            if source is not None:  # a view costs nothing, so it goes where its source goes
                source.views.append(node)
            else:
                source = _Item([node], _groupable(node))
                self.items.append(source)
            self.item_of[node] = source

    def join(self, item: _Item) -> None:
        """Add an item to the nearest earlier one that it fits; otherwise leave it alone."""
        places = {other: place for place, other in enumerate(self.items)}
        here = places[item]
        for other in sorted(self._partners(item), key=lambda other: -places[other]):
            there = places[other]
            if there >= here or not self._alike(other, item):
                continue
            needed = self._needed(item, self.items[there + 1 : here])
            if any(other in self._after(each) for each in needed):
                continue
            self.items[there : here + 1] = sorted(self.items[there:here], key=lambda each: each not in needed)
            other.members += item.members
            other.views += item.views
            self.item_of.update(dict.fromkeys((*item.members, *item.views), other))
            return

    def _needed(self, item: _Item, between: Sequence[_Item]) -> set[_Item]:
        """Return the items before an item that it has to run after, directly or through others of them."""
        needed, wanted = set[_Item](), self._after(item)
        for each in reversed(between):
            if each in wanted:
                needed.add(each)
                wanted |= self._after(each)
        return needed

    def _after(self, item: _Item) -> set[_Item]:
        """Items that an item has to run after."""
        nodes = (*item.members, *item.views)
        return {self.item_of[needed] for node in nodes for needed in self.needed[node]} - {item}

    def _partners(self, item: _Item) -> set[_Item]:
        """Items that make what this one reads, or read a whole tensor that it reads too."""
        reads = item.reads()
        makers = {self.item_of[value.producer] for value in reads if value.producer is not None}
        return makers | {self.item_of[it] for value in reads if value.shape == item.shape for it in self.readers[value]}

    def _alike(self, first: _Item, second: _Item) -> bool:
        if not (first.groupable and second.groupable) or first.shape != second.shape:
            return False
        if any(value.producer in first.views for value in second.reads()):
            return False  # seen under another shape, it is not the same element
        small = len(first.members) + len(second.members) <= MOST_STEPS
        return small and first.members[0].stage is second.members[0].stage

    def read_elsewhere(self, item: _Item) -> list[Value]:
        """Return the values that others read of an item, first one that could take over an input's buffer.

        Only output 0 may.
        """
        made = [node.outputs[0] for node in item.members]
        specs = {value.spec for value in item.reads() if value.kind is Kind.NODE}
        read = [
            value
            for value in made
            if value in self.kept or any(reader not in item.members for reader in self.readers.get(value, []))
        ]
        return sorted(read, key=lambda value: value.spec not in specs)


def _groupable(node: Node) -> bool:
    if node.op.name not in ELEMENTWISE or len(node.values) != len(node.inputs):
        return False
    specs, output = [value.spec for value in node.values], node.outputs[0].spec
    if node.op.name == "embedding" and output in specs:  # might be written over the very rows it looks up
        return False
    return all(spec.dtype in (*DTYPES, DType.INT64) for spec in (*specs, output)) and output.size > 1


def _record(rewriter: Rewriter, item: _Item, outputs: Sequence[Value]) -> None:
    """Record one fused node for an item, and let its outputs stand for what others read of the members."""
    inputs = sorted(item.reads(), key=lambda value: (value.kind is not Kind.NODE, value.number))
    made = [node.outputs[0] for node in item.members]
    numbers = {value: number for number, value in enumerate((*inputs, *made))}
    program = tuple(
        (node.op.name, tuple(numbers[value] for value in node.values), tuple(sorted(node.attributes.items())))
        for node in item.members
    )
    results = tuple(numbers[output] - len(inputs) for output in outputs)
    fused = Node(op("fused"), tuple(inputs), {"program": program, "results": results})
    rewriter.replace(outputs, rewriter.record(item.members[-1], fused))
