"""Graph -> plan, a pure function; touches no device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ttrain.core.spec import TensorSpec
from ttrain.device.base import Device, Kernel, Layout, of_side
from ttrain.graph.graph import Graph, Node, Value
from ttrain.graph.kinds import Kind
from ttrain.plan.arena import UNPLACED, Block, Loan, pack, take_turns
from ttrain.plan.check import check
from ttrain.plan.lifetime import Placement, first_writes, place
from ttrain.plan.plan import Plan


def build_plan(
    graph: Graph, kernels: Mapping[str, Kernel], device: Device | None = None, loan: Loan | None = None
) -> Plan:
    """Place every value of a final graph, and prove the result (see check.py).

    Without arenas on the device, an offset stands for one tensor, and values take turns in it by layout. With a `loan`
    values also lie in the memory of state that the step has yet to overwrite.
    """
    layouts = None if device is None or device.arenas else _Layouts(graph, kernels, device)
    placement = place(graph, kernels, frozenset() if layouts is None else layouts.special)
    owned = {
        owner: Block(owner, owner.spec.nbytes, start, end, on_host=owner.on_host)
        for owner, (start, end) in placement.lifetimes.items()
    }
    scratch = _scratch(graph, kernels, placement)
    if layouts is not None:
        layouts.give({owner: block for owner, block in owned.items() if not block.on_host})
        layouts.give_scratch(block for group in scratch.values() for block in group if not block.on_host)
    plan = Plan(graph, placement, owned, scratch, _outside(graph, kernels, placement))
    if loan is not None:
        plan.lent = loan.fixed(first_writes(graph, placement), len(graph.nodes))
    plan.arena_bytes = pack(plan.blocks, [*plan.lent.values()]) if layouts is None else take_turns(plan.blocks)
    plan.host_arena_bytes = pack(plan.host_blocks)
    check(plan, kernels)
    return plan


def _scratch(graph: Graph, kernels: Mapping[str, Kernel], placement: Placement) -> dict[Node, list[Block]]:
    """Scratch buffers of every node."""
    scratch: dict[Node, list[Block]] = {}
    for time, node in enumerate(graph.nodes):
        if node not in placement.elided:
            specs = of_side(kernels, node.on_host)[node.op.name].workspace_specs(*node.specs, node.attributes)
            scratch[node] = [Block(node, x.nbytes, time, time, UNPLACED, x, node.on_host) for x in specs]
    return scratch


def _outside(graph: Graph, kernels: Mapping[str, Kernel], placement: Placement) -> int:
    launched = (node for node in graph.nodes if node not in placement.elided and not node.on_host)
    rows = ((kernels[node.op.name].outside, node) for node in launched)
    return max((tell(*node.specs, node.attributes) for tell, node in rows if tell is not None), default=0)


class _Layouts:
    """How a device without arenas holds each value."""

    def __init__(self, graph: Graph, kernels: Mapping[str, Kernel], device: Device) -> None:
        self._device = device
        self._of: dict[Value, Layout] = {}
        for node in graph.nodes:
            layouts = None if node.op.view else of_side(kernels, node.on_host)[node.op.name].layouts
            if layouts is not None:
                given = zip(node.outputs, layouts(*node.specs, node.attributes), strict=True)
                self._of.update((output, layout) for output, layout in given if layout is not None)

    @property
    def special(self) -> frozenset[Value]:
        """Values that their kernels hold in a layout of their own: they share a buffer with nothing else."""
        return frozenset(self._of)

    def give(self, blocks: Mapping[Value, Block]) -> None:
        """Set layout and bytes of each block. A step input shares with nothing: the next batch is written early."""
        for owner, block in blocks.items():
            layout = self._of.get(owner, self._device.layout(owner.spec))
            block.nbytes = self._device.layout_bytes(layout)
            # A tensor is known by its spec, so one that is held otherwise takes turns only with its like.
            kept = (owner.spec, layout) if owner in self._of else layout
            block.layout = (owner.name, layout) if owner.kind is Kind.INPUT else kept

    def give_scratch(self, blocks: Iterable[Block]) -> None:
        """The same for scratch buffers, whose layout is still their spec."""
        for block in blocks:
            assert isinstance(block.layout, TensorSpec)
            block.layout = self._device.layout(block.layout)
            block.nbytes = self._device.layout_bytes(block.layout)
