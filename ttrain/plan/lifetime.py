"""Liveness: the buffer of each value, and its first and last launch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Mapping
from dataclasses import dataclass, field

from ttrain.device.base import Delivery, Kernel, of_side
from ttrain.graph import Graph, Kind, Node, Value

BEFORE = -1  # time at which step inputs are uploaded; node k runs at time k


@dataclass
class Placement:
    """Sharing and lifetimes of buffers.

    For every value the owner is the one whose buffer it shares. For every owner in an arena the lifetime is the first
    and the last launch at which its buffer is live.
    """

    owner: dict[Value, Value] = field(default_factory=dict)
    lifetimes: dict[Value, tuple[int, int]] = field(default_factory=dict)  # state is not in here
    elided: set[Node] = field(default_factory=set)  # nodes with nothing left to launch

    def owner_of(self, value: Value) -> Value:
        return self.owner.get(value, value)


def place(graph: Graph, kernels: Mapping[str, Kernel], apart: Container[Value] = frozenset()) -> Placement:
    """Decide sharing, then lifetimes. Pure; `kernels` tells how each op delivers. Values of `apart` share with none."""
    # Reuse comes first: a sum that ends up in state then lies there from its first term on.
    views = {node for node in graph.nodes if node.op.view}
    placement = Placement(_reuse_dying_inputs(graph, kernels, apart), elided=views)
    _deliver_into_state(graph, placement, apart)
    touched = _touched(graph, placement.owner)
    placement.lifetimes = {owner: (times[0], times[-1]) for owner, times in touched.items() if not owner.kind.is_state}
    return placement


def _touched(graph: Graph, owner: Mapping[Value, Value]) -> dict[Value, list[int]]:
    """Return the launches that touch each owner's buffer; the end of the step for outputs."""
    found: dict[Value, list[int]] = defaultdict(list, {value: [BEFORE] for value in graph.inputs.values()})
    for time, node in enumerate(graph.nodes):
        for value in (*node.values, *node.outputs):
            found[owner[value]].append(time)
    for value in graph.outputs.values():
        found[owner[value]].append(len(graph.nodes))
    return found


def _reuse_dying_inputs(graph: Graph, kernels: Mapping[str, Kernel], apart: Container[Value]) -> dict[Value, Value]:
    """Owners of all values, where an elementwise result takes over the buffer of an input that nothing reads later."""
    roots = graph.roots()
    last = {root: times[-1] for root, times in _touched(graph, roots).items()}
    owner = {root: root for root in roots.values()}
    assigned: set[Value] = set()  # buffers that may become state and must keep their value
    for time, node in enumerate(graph.nodes):
        owner.update((output, owner[roots[output]]) for output in node.outputs)
        if node.op.name == "assign" and node.input("value").spec == node.input("state").spec:
            assigned.add(owner[node.input("value")])
        output = node.outputs[0]
        if node.op.view or owner[output] is not output or output in apart:
            continue
        for value in overwritable(node, of_side(kernels, node.on_host)[node.op.name]):
            taken = owner[value]
            dies = taken.kind is Kind.NODE and last[taken] == time and value.spec == output.spec
            if dies and taken not in assigned and taken not in apart:
                owner[output], last[taken] = taken, last[output]
                break
    return owner


def _deliver_into_state(graph: Graph, placement: Placement, apart: Container[Value]) -> None:
    """Let the kernel whose result is assigned to state write there itself, and drop the copy.

    Nobody may touch the state between the buffer's first use and the assignment. Afterwards the buffer must not hold
    anything else, and must not be read any more once the state is overwritten again.
    """
    touched, written = _touched(graph, placement.owner), defaultdict[Value, list[int]](list)
    for time, node in enumerate(graph.nodes):
        for output in () if node.op.view else node.outputs:
            written[placement.owner[output]].append(time)
    moved: dict[Value, Value] = {}
    for time, node in enumerate(graph.nodes):
        if node.op.name != "assign" or node.input("value").spec != node.input("state").spec:
            continue
        owner, state = placement.owner[node.input("value")], placement.owner[node.input("state")]
        if owner.kind is not Kind.NODE or owner in moved or owner in apart:
            continue
        made, again = written[owner], min((t for t in written[state] if t > time), default=len(graph.nodes))
        early = any(made[0] <= touch < time for touch in touched[state])
        if not early and made[-1] < time and max(touched[owner]) < again:
            touched[state] += touched[owner]
            moved[owner] = state
            placement.elided.add(node)
    placement.owner = {value: moved.get(owner, owner) for value, owner in placement.owner.items()}


def read_values(node: Node) -> list[Value]:
    """Inputs whose contents a launch needs: an assignment overwrites its state unseen."""
    return node.values[1:] if node.op.name == "assign" else node.values


def first_writes(graph: Graph, placement: Placement) -> dict[str, int]:
    """The state whose contents a step does not read before it overwrites them, with the launch that does."""
    found: dict[Value, int] = {}
    read: set[Value] = set()
    for time, node in enumerate(graph.nodes):
        if node in placement.elided and not node.op.view:
            continue
        read |= {placement.owner_of(value) for value in read_values(node)} - found.keys()
        if node.op.view:
            continue
        for output in node.outputs:
            if (owner := placement.owner_of(output)).kind.is_state and owner not in read:
                found.setdefault(owner, time)
    return {owner.name: time for owner, time in found.items()}


def overwritable(node: Node, kernel: Kernel) -> list[Value]:
    """Inputs whose buffer the node's first output may take over, if nothing reads them afterwards."""
    if kernel.delivery is not Delivery.OUT:
        return []
    if node.op.elementwise:
        return node.values
    return [value for index in kernel.overwrites if (value := node.inputs[index]) is not None]
