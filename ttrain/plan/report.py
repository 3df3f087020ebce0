"""What a step costs, read from its graph and its plan: operations, bytes moved, and what holds memory when."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ttrain.device.base import Kernel, align, of_side
from ttrain.graph.graph import Graph, Node, Value
from ttrain.graph.kinds import Stage
from ttrain.graph.passes import remove_dead_code
from ttrain.graph.place import transfer_bytes
from ttrain.graph.show import scope_width
from ttrain.plan.arena import Block, peak
from ttrain.plan.lifetime import BEFORE, Placement
from ttrain.plan.plan import Plan

CLASSES = ("inputs", "activations", "gradients", "update", "workspace")  # of what lies in an arena


@dataclass(frozen=True)
class StepCost:
    """Of one run of one step. Keys are stages (forward, backward, update) or CLASSES; sizes are bytes.

    `flops` counts what the model asks for; `executed_flops` also what the plan computes again to save memory.
    `memory` splits `peak`, the most bytes live at once, of which `borrowed` lie where gradients will; `arena` is what
    packing took beside them.
    `kept` are the bytes that lie from forward to backward, if there is one. Without a plan, as the dynamic engine runs,
    memory is not known and its numbers are 0.
    """

    planned: bool
    launches: int
    flops: dict[str, int]
    executed_flops: dict[str, int]
    moved: dict[str, int]
    memory: dict[str, int]
    kept: int | None
    peak: int
    arena: int
    largest: list[Block]  # of those live at the peak
    borrowed: int = 0
    host_arena: int = 0  # in host memory, of what offloaded parameters take part in
    outside: int = 0  # allocated by libraries during a launch, beside the arena
    transfers: dict[str, int] = field(default_factory=dict)  # bytes per direction between host and device
    ops: list[OpCost] = field(default_factory=list)  # of what is launched

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        told = ("label", "group", "nbytes", "offset", "start", "end")
        largest = [{key: getattr(block, key) for key in told} for block in self.largest]
        lists = {"largest": largest, "ops": [vars(cost) for cost in self.ops]}
        return {**vars(self), **lists}


def step_cost(recorded: Graph, plan: Plan | None, largest: int = 5) -> StepCost:
    """What a step costs, from the graph as recorded and from its plan; lists so many of its `largest` buffers."""
    planned = plan is not None
    if plan is None:
        plan = Plan(recorded, Placement(elided={node for node in recorded.nodes if node.op.view}), {}, {})
    buffers, launched = plan.blocks, plan.launched
    most, time = peak(buffers)
    live = sorted((buffer for buffer in buffers if buffer.start <= time <= buffer.end), key=lambda b: -b.nbytes)
    trained = any(node.stage is Stage.BACKWARD for node in plan.graph.nodes)
    memory = dict.fromkeys(CLASSES, 0)
    for buffer in live:
        memory[buffer.group] += align(buffer.nbytes)
    return StepCost(
        planned=planned,
        launches=len(launched),
        flops=model_flops(recorded),
        executed_flops=_by_stage((node, node.op.flops(node)) for node in launched),
        moved=_by_stage((node, node.op.nbytes(node)) for node in launched),
        memory=memory,
        kept=plan.activation_bytes() if planned and trained else None,
        peak=most,
        arena=plan.arena_bytes,
        largest=live[:largest],
        borrowed=sum(align(buffer.nbytes) for buffer in live if buffer.offset < 0),
        host_arena=plan.host_arena_bytes,
        outside=plan.outside_bytes,
        transfers=transfer_bytes(launched),
        ops=op_costs(launched),
    )


@dataclass(frozen=True)
class OpCost:
    """What all launches of one op cost in one run of a step."""

    op: str
    count: int
    nbytes: int  # read and written
    flops: int


def op_costs(nodes: Iterable[Node]) -> list[OpCost]:
    """Launched nodes by op, those that move most bytes first. Those on the host stand by themselves, as host.<op>."""
    found: dict[str, list[Node]] = {}
    for node in nodes:
        found.setdefault(node.label, []).append(node)
    costs = [
        OpCost(name, len(of), sum(node.op.nbytes(node) for node in of), sum(node.op.flops(node) for node in of))
        for name, of in found.items()
    ]
    return sorted(costs, key=lambda cost: (-cost.nbytes, cost.op))


def model_flops(recorded: Graph) -> dict[str, int]:
    """Operations that a recorded step needs, by stage: without copies that save memory and without unread values."""
    needed = remove_dead_code(recorded).nodes
    return _by_stage((node, node.op.flops(node)) for node in needed if not node.copy)


def _by_stage(counted: Iterator[tuple[Node, int]]) -> dict[str, int]:
    totals = {stage.value: 0 for stage in Stage}
    for node, count in counted:
        totals[node.stage.value] += count
    return totals


def show_plan(plan: Plan, kernels: Mapping[str, Kernel] | None = None) -> str:
    """The op list with buffers: one line a node, then one line a buffer.

    A value is shown where it lies: `@<offset>+<bytes>` in the arena, `=<name>` in state. A node without a number is not
    launched: a view, or a copy that the kernel before it made unnecessary. Where there are several ways to run a node,
    a row of the device's `kernels` tells which one it takes.
    """
    lines, launch, width = [f"arena: {plan.arena_bytes} bytes"], 0, scope_width(plan.graph.nodes)
    lines.append(f" node launch stage    {'scope':{width}}  outputs = op(inputs)")
    for time, node in enumerate(plan.graph.nodes):
        elided = node in plan.placement.elided
        number = "-" if elided else str(launch)
        launch += not elided
        work = "".join(f" workspace @{block.offset}+{block.nbytes}" for block in plan.scratch.get(node, []))
        text = node.text(partial(_place, plan), lambda value: f"{_place(plan, value)}:{value.spec}")
        place = f"{time:5} {number:>6} {node.stage.value:8} {node.scope:{width}}"
        way = None if elided or kernels is None else of_side(kernels, node.on_host)[node.op.name].way
        lines.append(f"{place}  {text}{work}" + (f" by {way(*node.specs, node.attributes)}" if way else ""))
    lines.append("")
    lines.append(f"{'offset':>12} {'bytes':>12} {'live':>11}  what")
    for buffer in sorted(plan.blocks, key=lambda b: (b.offset, b.start)):
        live = "..".join("in" if time == BEFORE else str(time) for time in dict.fromkeys((buffer.start, buffer.end)))
        lines.append(f"{buffer.offset:12} {buffer.nbytes:12} {live:>11}  {buffer.group}: {buffer.label}")
    return "\n".join(lines)


def _place(plan: Plan, value: Value) -> str:
    owner = plan.placement.owner_of(value)
    if owner.kind.is_state:
        return f"={owner.name}"
    block = plan.owned[owner]
    return f"@{block.offset}+{block.nbytes}"
