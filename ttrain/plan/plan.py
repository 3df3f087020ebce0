"""The plan of a step: the order of its nodes, and the place of every value."""

from __future__ import annotations

from dataclasses import dataclass, field

from ttrain.graph import Graph, Node, Value
from ttrain.plan.arena import Block
from ttrain.plan.lifetime import Placement


@dataclass
class Plan:
    """The nodes of one step in order, with an arena slot per value that does not outlive the step.

    `owned` and `scratch` are the buffers of values, by the one that owns it, and of a node while it runs.
    `outside_bytes` is the most that libraries allocate by themselves during a launch, as far as kernels tell. What
    nodes on the host make lies in an arena of its own there. `aliased` is what keeps its place in reused gradients,
    by the name of the state.
    """

    graph: Graph
    placement: Placement
    owned: dict[Value, Block]
    scratch: dict[Node, list[Block]]
    outside_bytes: int = 0
    arena_bytes: int = 0
    host_arena_bytes: int = 0
    aliased: dict[str, Block] = field(default_factory=dict)

    @property
    def blocks(self) -> list[Block]:
        """Every buffer of the device's arena."""
        return self._blocks(on_host=False)

    @property
    def host_blocks(self) -> list[Block]:
        """Every buffer of the host's arena."""
        return self._blocks(on_host=True)

    def _blocks(self, on_host: bool) -> list[Block]:
        both = [*self.owned.values(), *(block for group in self.scratch.values() for block in group)]
        return [block for block in both if block.on_host is on_host]

    @property
    def launched(self) -> list[Node]:
        """Nodes that a kernel runs for: all but views and copies that delivery made unnecessary."""
        return [node for node in self.graph.nodes if node not in self.placement.elided]
