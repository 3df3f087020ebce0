"""Graph -> plan: in which order nodes run and where every value lies. A pure function; touches no device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ttrain.device.base import Kernel
from ttrain.graph.graph import Graph, Kind, Node, Stage, Value
from ttrain.plan.arena import Block, pack, peak_bytes
from ttrain.plan.check import check
from ttrain.plan.lifetime import Placement, place


@dataclass
class Plan:
    """The nodes of one step in order, with an arena slot per value that does not outlive the step.

    `offsets` gives the byte offset per owning value, `workspace` those of a node's scratch buffers.
    """

    graph: Graph
    placement: Placement
    offsets: dict[Value, int]
    workspace: dict[Node, list[int]]
    blocks: list[Block]
    arena_bytes: int

    @property
    def launched(self) -> list[Node]:
        """Nodes that a kernel runs for: all but views and copies that delivery made unnecessary."""
        return [node for node in self.graph.nodes if node not in self.placement.elided]

    def state_bytes(self) -> dict[str, int]:
        """Bytes of persistent tensors per kind."""
        totals = {kind.value: 0 for kind in Kind if kind.is_state}
        for value in self.graph.state.values():
            totals[value.kind.value] += value.spec.nbytes
        return totals

    def activation_bytes(self) -> int:
        """Bytes alive between forward and backward: what backward reads of forward."""
        boundary = next((t for t, node in enumerate(self.graph.nodes) if node.stage is Stage.BACKWARD), None)
        if boundary is None:
            return self.peak_bytes()
        return sum(block.nbytes for block in self.blocks if block.start < boundary <= block.end)

    def peak_bytes(self) -> int:
        """Most arena bytes live at once: a lower bound of `arena_bytes`."""
        return peak_bytes(self.blocks)


def build_plan(graph: Graph, kernels: Mapping[str, Kernel]) -> Plan:
    """Place every value of a final graph, and prove the result (see check.py)."""
    placement = place(graph, kernels)
    blocks: list[Block] = []
    owned: dict[Value, Block] = {}
    for owner, lifetime in placement.lifetimes.items():
        owned[owner] = Block(owner.name or repr(owner), owner.spec.nbytes, lifetime.start, lifetime.end)
    scratch: dict[Node, list[Block]] = {}
    for time, node in enumerate(graph.nodes):
        if node in placement.elided:
            continue
        specs = kernels[node.op.name].workspace_specs(
            [None if value is None else value.spec for value in node.inputs],
            [output.spec for output in node.outputs],
            node.attributes,
        )
        if specs:
            scratch[node] = [Block(f"workspace of {node.op.name}", spec.nbytes, time, time) for spec in specs]
    blocks = [*owned.values(), *(block for group in scratch.values() for block in group)]
    arena_bytes = pack(blocks)
    plan = Plan(
        graph,
        placement,
        {owner: block.offset for owner, block in owned.items()},
        {node: [block.offset for block in group] for node, group in scratch.items()},
        blocks,
        arena_bytes,
    )
    check(plan, kernels)
    return plan
