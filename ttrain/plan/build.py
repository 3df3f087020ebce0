"""Graph -> plan, a pure function; touches no device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ttrain.core.spec import TensorSpec
from ttrain.device.base import Device, Kernel, Layout, of_side
from ttrain.graph import Graph, Kind, Node, Value
from ttrain.plan.arena import UNPLACED, Block, GradientReuse, pack, take_turns
from ttrain.plan.check import check
from ttrain.plan.lifetime import Placement, first_writes, place
from ttrain.plan.plan import Plan


def build_plan(
    graph: Graph, kernels: Mapping[str, Kernel], device: Device | None = None, reuse: GradientReuse | None = None
) -> Plan:
    """Place every value of a final graph, and prove the result (see check.py).

    Without arenas on the device, an offset stands for one tensor, and values take turns in it by layout. With `reuse`
    values also lie in the memory of state that the step has yet to overwrite.
    """
    whole = None if device is None or device.arenas else device  # takes memory in whole tensors
    own = {} if whole is None else _own_layouts(graph, kernels)
    placement = place(graph, kernels, own)
    owned = {
        owner: Block(owner, owner.spec.nbytes, start, end, on_host=owner.on_host)
        for owner, (start, end) in placement.lifetimes.items()
    }
    scratch = _scratch(graph, kernels, placement)
    plan = Plan(graph, placement, owned, scratch)
    on_device = [node for node in plan.launched if not node.on_host]
    plan.outside_bytes = max((kernels[n.op.name].outside(*n.specs, n.attributes) for n in on_device), default=0)
    if whole is not None:
        for block in plan.blocks:
            _lay_out(block, own, whole)
    if reuse is not None:
        plan.aliased = reuse.fixed(first_writes(graph, placement), len(graph.nodes))
    plan.arena_bytes = pack(plan.blocks, [*plan.aliased.values()]) if whole is None else take_turns(plan.blocks)
    plan.host_arena_bytes = pack(plan.host_blocks)
    check(plan, kernels)
    return plan


def _scratch(graph: Graph, kernels: Mapping[str, Kernel], placement: Placement) -> dict[Node, list[Block]]:
    """Scratch buffers of every node."""
    scratch: dict[Node, list[Block]] = {}
    for time, node in enumerate(graph.nodes):
        if node not in placement.elided:
            specs = of_side(kernels, node.on_host)[node.op.name].workspace(*node.specs, node.attributes)
            scratch[node] = [Block(node, x.nbytes, time, time, UNPLACED, x, node.on_host) for x in specs]
    return scratch


def _own_layouts(graph: Graph, kernels: Mapping[str, Kernel]) -> dict[Value, Layout]:
    """Return the layouts that kernels choose themselves, by value. Such a value shares its buffer with nothing."""
    found: dict[Value, Layout] = {}
    for node in graph.nodes:
        layouts = None if node.op.view else of_side(kernels, node.on_host)[node.op.name].layouts
        if layouts is not None:
            given = zip(node.outputs, layouts(*node.specs, node.attributes), strict=True)
            found.update((output, layout) for output, layout in given if layout is not None)
    return found


def _lay_out(block: Block, own: Mapping[Any, Layout], device: Device) -> None:
    """Set layout and bytes of a block on a device without arenas; of a scratch buffer the layout is still its spec.

    A step input shares with nothing: the next batch is written early.
    """
    owner = block.what
    spec = owner.spec if isinstance(owner, Value) else block.layout
    assert isinstance(spec, TensorSpec)
    layout = block.layout = own.get(owner, device.layout(spec))
    block.nbytes = device.layout_bytes(layout)
    if isinstance(owner, Value) and owner.kind is Kind.INPUT:
        block.layout = owner.name, layout
    elif owner in own:  # a tensor is known by its spec, so one that is held otherwise takes turns only with its like
        block.layout = spec, layout
