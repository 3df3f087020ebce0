"""Which buffer each value lives in, and from when to when."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field

from ttrain.device.base import Delivery, Kernel, of_side
from ttrain.graph.alias import overwritten, roots_of
from ttrain.graph.graph import Graph, Node, Value
from ttrain.graph.kinds import Kind

BEFORE = -1  # time at which step inputs are uploaded; node k runs at time k


@dataclass
class Lifetime:
    """A buffer of the arena is live from the launch at `start` to the launch at `end`, both inclusive."""

    start: int
    end: int


@dataclass
class Placement:
    """For every value the one whose buffer it shares, and the lifetimes of buffers that lie in the arena."""

    owner: dict[Value, Value] = field(default_factory=dict)
    lifetimes: dict[Value, Lifetime] = field(default_factory=dict)  # by owner; state is not in here
    elided: set[Node] = field(default_factory=set)  # nodes with nothing left to launch

    def owner_of(self, value: Value) -> Value:
        return self.owner.get(value, value)


def place(graph: Graph, kernels: Mapping[str, Kernel], apart: Container[Value] = frozenset()) -> Placement:
    """Decide sharing, then lifetimes. Pure; `kernels` tells how each op delivers. Values of `apart` share with none."""
    placement = Placement(roots_of(graph))
    placement.elided.update(node for node in graph.nodes if node.op.view)
    # Reuse comes first: a sum that ends up in state then lies there from its first term on.
    last_read = {owner: lifetime.end for owner, lifetime in _touched(graph, placement).items()}
    _reuse_dying_inputs(graph, placement, kernels, last_read, apart)
    _deliver_into_state(graph, placement, apart)
    touched = _touched(graph, placement)
    placement.lifetimes = {owner: touched[owner] for owner in touched if not owner.kind.is_state}
    return placement


def _touched(graph: Graph, placement: Placement) -> dict[Value, Lifetime]:
    """Per owner, the first and the last launch that touches it; the end of the step for outputs."""
    found = {value: Lifetime(BEFORE, BEFORE) for value in graph.inputs.values()}
    for time, node in enumerate(graph.nodes):
        for value in (*node.values, *node.outputs):
            found.setdefault(placement.owner_of(value), Lifetime(time, time)).end = time
    for value in graph.outputs.values():
        found.setdefault(placement.owner_of(value), Lifetime(BEFORE, BEFORE)).end = len(graph.nodes)
    return found


class _Accesses:
    """When each buffer is made, touched and overwritten."""

    def __init__(self, graph: Graph, owner: Mapping[Value, Value]) -> None:
        self.written: dict[Value, list[int]] = {}
        self.touched: dict[Value, list[int]] = {}
        self.overwritten: dict[Value, list[int]] = {}
        for time, node in enumerate(graph.nodes):
            for output in node.outputs:
                self.written.setdefault(owner[output], []).append(time)
            for value in (*node.values, *node.outputs):
                self.touched.setdefault(owner[value], []).append(time)
            for value in overwritten(node):
                self.overwritten.setdefault(owner[value], []).append(time)

    def may_share(self, owner: Value, state: Value, assigned: int) -> bool:
        """Whether the buffer whose value is assigned at `assigned` may be the state itself from the start.

        Nobody may touch the state between the buffer's first use and the assignment. Afterwards the buffer must not
        hold anything else, and must not be read any more once the state is overwritten again.
        """
        written = self.written[owner]
        again = min((time for time in self.overwritten[state] if time > assigned), default=None)
        early = any(written[0] <= time < assigned for time in self.touched[state])
        return not early and written[-1] < assigned and (again is None or max(self.touched[owner]) < again)

    def share(self, owner: Value, state: Value) -> None:
        self.touched[state] += self.touched[owner]


def _deliver_into_state(graph: Graph, placement: Placement, apart: Container[Value]) -> None:
    """Let the kernel whose result is assigned to state write there itself, and drop the copy."""
    owner_of, accesses = placement.owner_of, _Accesses(graph, placement.owner)
    kept = {owner_of(value) for value in graph.outputs.values()}
    moved: dict[Value, Value] = {}
    for time, node in enumerate(graph.nodes):
        if node.op.name != "assign":
            continue
        state, value = node.input("state"), node.input("value")
        owner, target = owner_of(value), owner_of(state)
        free = owner.kind is Kind.NODE and owner not in moved and owner not in kept and owner not in apart
        if not free or value.spec != state.spec or not accesses.may_share(owner, target, time):
            continue
        accesses.share(owner, target)
        moved[owner] = target
        placement.elided.add(node)
    for value, owner in placement.owner.items():
        placement.owner[value] = moved.get(owner, owner)


def read_values(node: Node) -> list[Value]:
    """Inputs whose contents a launch needs: an assignment overwrites its state unseen."""
    return node.values[1:] if node.op.name == "assign" else node.values


def first_writes(graph: Graph, placement: Placement) -> dict[str, int]:
    """The state whose contents a step does not read before it overwrites them, with the launch that does."""
    found: dict[Value, int] = {}
    read: set[Value] = set()
    for time, node in enumerate(graph.nodes):
        if node in placement.elided:
            continue
        read |= {placement.owner_of(value) for value in read_values(node)} - found.keys()
        for output in node.outputs:
            if (owner := placement.owner_of(output)).kind.is_state and owner not in read:
                found.setdefault(owner, time)
    return {owner.name: time for owner, time in found.items()}


def overwritable(node: Node, kernel: Kernel) -> list[Value]:
    """Inputs whose buffer the node's first output may take over, if nothing reads them afterwards."""
    if kernel.delivery is not Delivery.INTO:
        return []
    if node.op.elementwise:
        return node.values
    return [value for index in kernel.overwrites if (value := node.inputs[index]) is not None]


def _reuse_dying_inputs(
    graph: Graph,
    placement: Placement,
    kernels: Mapping[str, Kernel],
    last_read: dict[Value, int],
    apart: Container[Value],
) -> None:
    """Let an elementwise result take over the buffer of an input that nothing reads afterwards."""
    takes: dict[Value, Value] = {}
    assigned: set[Value] = set()  # buffers that may become state and must keep their value

    def final(owner: Value) -> Value:
        while owner in takes:
            owner = takes[owner]
        return owner

    for time, node in enumerate(graph.nodes):
        if node in placement.elided:
            continue
        if node.op.name == "assign" and node.input("value").spec == node.input("state").spec:
            assigned.add(final(placement.owner_of(node.input("value"))))
        output = node.outputs[0]
        own = placement.owner_of(output)
        if own is not output or output in apart:
            continue
        for value in overwritable(node, of_side(kernels, node.on_host)[node.op.name]):
            owner = final(placement.owner_of(value))
            dies = owner.kind is Kind.NODE and last_read[owner] == time
            if dies and value.spec == output.spec and owner not in assigned and owner not in apart:
                takes[own] = owner
                last_read[owner] = max(last_read[owner], last_read[own])
                break
    for value, owner in placement.owner.items():
        placement.owner[value] = final(owner)
