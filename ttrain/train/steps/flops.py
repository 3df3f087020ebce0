"""Floating-point operations of a recorded step."""

from __future__ import annotations

from collections.abc import Iterator

from ttrain.graph.graph import Graph, Node
from ttrain.graph.kinds import Stage
from ttrain.graph.passes import remove_dead_code


def model_flops(recorded: Graph) -> dict[str, int]:
    """Operations that a recorded step needs, by stage: without copies that save memory and without unread values."""
    needed = remove_dead_code(recorded).nodes
    return by_stage((node, node.op.flops(node)) for node in needed if not node.copy)


def by_stage(counted: Iterator[tuple[Node, int]]) -> dict[str, int]:
    """Sums of what is counted of nodes, by stage."""
    totals = {stage.value: 0 for stage in Stage}
    for node, count in counted:
        totals[node.stage.value] += count
    return totals
