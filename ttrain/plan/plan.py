"""What a plan says: in which order the nodes of a step run, and where every value lies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ttrain.graph.graph import Graph, Node, Value
from ttrain.graph.kinds import Kind, Stage
from ttrain.plan.arena import Block, peak_bytes
from ttrain.plan.lifetime import Placement


@dataclass
class Plan:
    """The nodes of one step in order, with an arena slot per value that does not outlive the step.

    `outside_bytes` is the most that libraries allocate by themselves during a launch, as far as kernels tell.
    `offsets` gives the byte offset per owning value, `workspace` those of a node's scratch buffers; `owned` and
    `scratch` are the same with sizes and lifetimes. What nodes on the host make lies in an arena of its own there.
    """

    graph: Graph
    placement: Placement
    offsets: dict[Value, int]
    workspace: dict[Node, list[int]]
    owned: dict[Value, Block]
    scratch: dict[Node, list[Block]]
    arena_bytes: int
    host_arena_bytes: int = 0
    outside_bytes: int = 0

    @property
    def blocks(self) -> list[Block]:
        """Every buffer of the device's arena."""
        return [block for block in all_blocks(self.owned, self.scratch) if not block.on_host]

    @property
    def host_blocks(self) -> list[Block]:
        """Every buffer of the host's arena."""
        return [block for block in all_blocks(self.owned, self.scratch) if block.on_host]

    @property
    def launched(self) -> list[Node]:
        """Nodes that a kernel runs for: all but views and copies that delivery made unnecessary."""
        return [node for node in self.graph.nodes if node not in self.placement.elided]

    def state_bytes(self) -> dict[str, int]:
        """Bytes of persistent tensors per kind, without those in host memory."""
        totals = {kind.value: 0 for kind in Kind if kind.is_state}
        for value in (value for value in self.graph.state.values() if not value.on_host):
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


def all_blocks(owned: Mapping[Value, Block], scratch: Mapping[Node, list[Block]]) -> list[Block]:
    """Buffers of values, then those of scratch."""
    return [*owned.values(), *(block for group in scratch.values() for block in group)]
