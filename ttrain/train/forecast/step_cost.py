"""The cost of a step from its graph and plan: operations, bytes moved and sent, and live memory at each launch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from ttrain.core.tables import Table
from ttrain.core.units import format_bytes
from ttrain.device.base import align
from ttrain.device.timing import Work, duration
from ttrain.engine.state import State
from ttrain.graph import Graph, Kind, Node, Stage, Value
from ttrain.parallel.ranks import Ranks, Sharding
from ttrain.plan.arena import Block
from ttrain.plan.lifetime import Placement
from ttrain.plan.plan import Plan
from ttrain.train.steps.session import by_stage, model_flops

CLASSES = ("inputs", "activations", "gradients", "update", "workspace")  # of what lies in an arena
LARGEST = 5  # buffers that are listed
TRANSFERS = ("to_host", "to_device")
_CLASS = {Stage.FORWARD: "activations", Stage.BACKWARD: "gradients", Stage.UPDATE: "update"}


class PlannedBuffer(NamedTuple):
    """A buffer of a device's arena: what lies there, its class and bytes, and the launches between which it is live."""

    label: str
    group: str  # of CLASSES
    nbytes: int
    offset: int
    start: int
    end: int

    @classmethod
    def of(cls, block: Block) -> PlannedBuffer:
        return cls(*_named(block.what), block.nbytes, block.offset, block.start, block.end)


def _named(what: Value | Node | str) -> tuple[str, str]:
    """A label for what a buffer is for, and its class."""
    if not isinstance(what, Value):
        return what.op.name if isinstance(what, Node) else what, "workspace"
    node = what.producer
    if node is None:
        return f"input {what.name}", "inputs"
    names = node.op.outputs_of(node.attributes)
    name = names[what.index].rstrip("?*") if what.index < len(names) else str(what.index)
    output = f".{name}" if len(node.outputs) > 1 else ""
    return " ".join(filter(None, (node.scope, f"{node.op.name}{output}", str(what.spec)))), _CLASS[node.stage]


def step_cost(recorded: Graph, plan: Plan | None) -> dict[str, Any]:
    """Return the cost of one run of a step from its recorded graph and its plan, as plain values.

    Keys of parts are stages (forward, backward, update) or CLASSES; sizes are bytes. `flops` counts what the model asks
    for; `executed_flops` also what the plan computes again to save memory. `memory` splits `peak`, the most bytes live
    at once, of which `borrowed` lie where gradients will; `arena` is what packing took beside them, `host_arena` that
    in host memory, and `outside` what libraries allocate during a launch. `kept` lies from forward to backward, if
    there is one. `largest` are buffers that are live at the peak. Without a plan, as the dynamic engine runs, memory is
    not known and its numbers are 0.
    """
    planned = plan is not None
    if plan is None:
        plan = Plan(recorded, Placement(elided={node for node in recorded.nodes if node.op.view}), {}, {})
    blocks, launched = plan.blocks, plan.launched
    most, time = peak(blocks)
    buffers = map(PlannedBuffer.of, blocks)
    live = sorted((buffer for buffer in buffers if buffer.start <= time <= buffer.end), key=lambda b: -b.nbytes)
    trained = any(node.stage is Stage.BACKWARD for node in plan.graph.nodes)
    memory = dict.fromkeys(CLASSES, 0)
    for buffer in live:
        memory[buffer.group] += align(buffer.nbytes)
    return {
        "planned": planned,
        "launches": len(launched),
        "flops": model_flops(recorded),
        "executed_flops": by_stage((node, node.op.flops(node)) for node in launched),
        "moved": by_stage((node, node.op.nbytes(node)) for node in launched),
        "memory": memory,
        "kept": activation_bytes(plan) if planned and trained else None,
        "peak": most,
        "arena": plan.arena_bytes,
        "largest": [buffer._asdict() for buffer in live[:LARGEST]],
        "borrowed": sum(align(buffer.nbytes) for buffer in live if buffer.offset < 0),
        "host_arena": plan.host_arena_bytes,
        "outside": plan.outside_bytes,
        "transfers": transfer_bytes(launched),
        "ops": op_costs(launched),
    }


def op_costs(nodes: Iterable[Node]) -> list[dict[str, Any]]:
    """Return launches, bytes moved and operations by op, those first that move most.

    Those on the host stand by themselves, as host.<op>.
    """
    found = defaultdict[str, Counter[str]](Counter)
    for node in nodes:
        found[node.label].update(count=1, nbytes=node.op.nbytes(node), flops=node.op.flops(node))
    return sorted(({"op": op, **cost} for op, cost in found.items()), key=lambda cost: (-cost["nbytes"], cost["op"]))


def transfer_bytes(nodes: Sequence[Node]) -> dict[str, int]:
    """Bytes that one run of the nodes transfers, by direction."""
    return {name: sum(node.op.nbytes(node) for node in nodes if node.op.name == name) for name in TRANSFERS}


def peak(blocks: Sequence[Block]) -> tuple[int, int]:
    """The most bytes that are live at once, which no packing can go below, and the first launch when they are."""
    changes: Counter[int] = Counter()
    for block in blocks:
        changes[block.start] += align(block.nbytes)
        changes[block.end + 1] -= align(block.nbytes)
    times = sorted(changes)
    totals = dict(zip(times, accumulate(changes[time] for time in times), strict=True))
    first = max(times, key=lambda time: totals[time], default=0)
    return totals.get(first, 0), first


def activation_bytes(plan: Plan) -> int:
    """Bytes alive after the last node of forward, which there has to be: what backward reads of forward.

    A view that only backward reads may stand in the middle of forward.
    """
    boundary = 1 + max(time for time, node in enumerate(plan.graph.nodes) if node.stage is Stage.FORWARD)
    return sum(block.nbytes for block in plan.blocks if block.start < boundary <= block.end)


def state_bytes(plan: Plan) -> dict[str, int]:
    """Bytes of persistent tensors per kind, without those in host memory."""
    totals = {kind.value: 0 for kind in Kind if kind.is_state}
    for value in (value for value in plan.graph.state.values() if not value.on_host):
        totals[value.kind.value] += value.spec.nbytes
    return totals


_START = "_start"  # ends the names of what runs beside computing


def collectives(work: Work, ranks: Ranks) -> Mapping[str, Mapping[str, int]]:
    """Return, by kind of collective, its calls in an optimizer step and the bytes that one rank sends by it.

    `early` bytes of these are under way before backward has ended.
    """
    found = defaultdict[str, Counter[str]](Counter)
    for times, nodes in work.nodes:
        end = max((place for place, node in enumerate(nodes) if node.stage is Stage.BACKWARD), default=0)
        for place, node in enumerate(nodes):
            if nbytes := times * sent_bytes(node, ranks):
                name = node.op.name.removesuffix("_state").removesuffix(_START)
                found[name].update(calls=times, nbytes=nbytes, early=nbytes if place < end else 0)
    return dict(found)


def exposed_seconds(work: Work, ranks: Ranks, gbps: float, computing: float, weigh: Callable[[Node], float]) -> float:
    """Return how many seconds communication adds to a step that computes for `computing` seconds.

    The link carries one exchange after another, beside the nodes from its start to `collectives_done`, or to its own
    `exchange_done`. Of `computing` each node takes as much as it weighs.
    """
    scale = computing / sum(times * weigh(node) for times, nodes in work.nodes for node in nodes)
    waited = 0.0
    for times, nodes in work.nodes:
        now = free = 0.0
        ends: dict[str, float] = {}  # of exchanges, by key
        for node in nodes:
            name, key, sent = node.op.name, node.attributes.get("key"), link_seconds(sent_bytes(node, ranks), gbps)
            if name.endswith(_START) or (key and name != "exchange_done"):
                free = ends[key or ""] = max(free, now) + sent
            else:
                until = {"collectives_done": free, "exchange_done": ends.get(key or "", free)}.get(name)
                wait = sent if until is None else max(until - now, 0.0)
                waited += times * wait
                now += wait + scale * weigh(node)
    return waited


def sent_bytes(node: Node, ranks: Ranks, of_experts: bool = False) -> int:
    """Bytes that this rank sends for a node, or ranks on average for matrices of experts; 0 where it is no collective.

    A sum over ranks sends every other rank's shard of a run to its owner, a gather its own shard to every other rank.
    A small tensor is taken to go round in a ring.
    """
    name, others, facts = node.op.name, ranks.count - 1, node.attributes
    if name == "all_reduce":
        return 0 if of_experts else 2 * node.values[0].spec.nbytes * others // ranks.count
    bounds, owners = facts.get("bounds", ()), facts.get("owners", ())
    if not (bounds or owners):
        return 0
    specs = facts.get("specs") or [value.spec for value in node.values[: facts.get("count")]]
    owners = owners or Sharding(tuple(spec.size for spec in specs), bounds).parts
    own = every = 0
    for spec, of_ranks in zip(specs, owners, strict=True):
        if spec.rank == 3 or not of_experts:
            sizes = [spec.dtype.itemsize * sum(stop - start for start, stop in parts) for parts in of_ranks]
            own += sum(sizes) // ranks.count if of_experts else sizes[ranks.rank]
            every += sum(sizes)
    sent = {"all_gather": own * others, "reduce_scatter": every - own, "all_reduce": every - own + own * others}
    return sent[name.removesuffix("_state").removesuffix(_START)]


def experts_over_ranks(work: Work, ranks: Ranks, state: State) -> dict[str, int]:
    """Return what a rank would send and hold if each had some of the experts, in bytes on average; empty without.

    In an optimizer step `rows` would go to the ranks of their experts and back, where loads are even, in the place of
    `weights`, the weights and gradients of experts that it sends now. Of their state it holds `held`, and would hold
    `divided`.
    """
    launches = [(times, node) for times, nodes in work.nodes for node in nodes]
    moves = [(times, node) for times, node in launches if node.op.name in ("dispatch", "combine")]
    moved = sum(times * max(x.spec.nbytes for x in (node.values[0], *node.outputs)) for times, node in moves)
    found = {"rows": moved * (ranks.count - 1) // ranks.count, "held": 0, "divided": 0}
    found["weights"] = sum(times * sent_bytes(node, ranks, of_experts=True) for times, node in launches)
    for kind in Kind:
        stacks = [tensor for tensor in map(state.tensor, state.names(kind)) if tensor.spec.rank == 3]
        if any(tensor.placed for tensor in stacks):
            experts = stacks[0].spec.shape[0]
            found["held"] += sum(each.spec.nbytes // (1 if each.everywhere else ranks.count) for each in stacks)
            found["divided"] += sum(tensor.spec.nbytes for tensor in stacks) * -(-experts // ranks.count) // experts
    return found if found["rows"] else {}


def link_seconds(nbytes: int, gbps: float) -> float:
    """Time that so many bytes take on a link of `gbps` Gbit/s."""
    return 8 * nbytes / (1e9 * gbps)


def communication_table(
    found: Mapping[str, Mapping[str, int]], experts: Mapping[str, int], ranks: Ranks, gbps: float
) -> Table:
    """Return a table for people, with a line on `experts_over_ranks`."""
    total = {key: sum(sent[key] for sent in found.values()) for key in ("calls", "nbytes", "early")}
    rows = [
        (name, str(sent["calls"]), format_bytes(sent["nbytes"]), format_bytes(sent["early"]),
         duration(link_seconds(sent["nbytes"], gbps)))
        for name, sent in (*found.items(), ("all", total))
    ]  # fmt: skip
    title = f"Communication of one of {ranks.count} ranks per optimizer step"
    notes = [f"At {gbps:g} Gbit/s (parallel.link_gbps); what is sent early goes on beside backward."]
    if experts:
        sizes = {name: format_bytes(nbytes) for name, nbytes in experts.items()}
        told = (
            "{rows} of rows instead of {weights} of their weights and gradients, and hold {divided} instead of {held}"
        )
        notes.append(f"With experts divided, by all-to-all (not built), it would send {told.format_map(sizes)}.")
    return Table(title, ("collective", "calls", "bytes sent", "early", "time"), rows, tuple(notes))
