"""The bytes that ranks send each other in an optimizer step, by the collectives of a plan. No process is started."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise

from ttrain.core.tables import Table
from ttrain.core.units import format_bytes
from ttrain.device.timing import Work, duration
from ttrain.graph import Node, Stage
from ttrain.parallel.ranks import Ranks

_START = "_start"  # ends the names of what runs beside computing


def collectives(work: Work, ranks: Ranks) -> dict[str, dict[str, int]]:
    """Return, by kind of collective, its calls in an optimizer step and the bytes that one rank sends by it.

    `early` bytes of these are under way before backward has ended.
    """
    found: dict[str, dict[str, int]] = {}
    for times, nodes in work.nodes:
        end = max((place for place, node in enumerate(nodes) if node.stage is Stage.BACKWARD), default=0)
        for place, node in enumerate(nodes):
            if nbytes := times * sent_bytes(node, ranks):
                name = node.op.name.removesuffix("_state").removesuffix(_START)
                sent = found.setdefault(name, {"calls": 0, "nbytes": 0, "early": 0})
                sent["calls"] += times
                sent["nbytes"] += nbytes
                sent["early"] += nbytes if place < end else 0
    return found


def exposed_seconds(work: Work, ranks: Ranks, gbps: float, computing: float, weigh: Callable[[Node], float]) -> float:
    """Return how many seconds communication adds to a step that computes for `computing` seconds.

    The link carries one exchange after another, beside the nodes from its start to `collectives_done`. Of `computing`
    each node takes as much as it weighs.
    """
    scale = computing / sum(times * weigh(node) for times, nodes in work.nodes for node in nodes)
    waited = 0.0
    for times, nodes in work.nodes:
        now = free = 0.0
        for node in nodes:
            sent = link_seconds(sent_bytes(node, ranks), gbps)
            if node.op.name.endswith(_START):
                free = max(free, now) + sent
            else:
                wait = max(free - now, 0.0) if node.op.name == "collectives_done" else sent
                waited += times * wait
                now += wait + scale * weigh(node)
    return waited


def sent_bytes(node: Node, ranks: Ranks) -> int:
    """Bytes that this rank sends for a node; 0 where it is no collective.

    A sum over ranks sends every other rank's shard of a run to its owner, a gather its own shard to every other rank.
    A small tensor is taken to go round in a ring.
    """
    name, others = node.op.name, ranks.count - 1
    if name == "all_reduce":
        return 2 * node.values[0].spec.nbytes * others // ranks.count
    bounds = node.attributes.get("bounds", ())
    if not bounds:
        return 0
    size = node.values[0].spec.dtype.itemsize
    shards = [[stop - start for start, stop in pairwise(bucket)] for bucket in bounds]
    own = sum(bucket[ranks.rank] for bucket in shards)
    gathered, reduced = own * others, sum(map(sum, shards)) - own
    sent = {"all_gather_state": gathered, "reduce_scatter_start": reduced, "all_reduce_start": gathered + reduced}
    return size * sent.get(name, 0)


def link_seconds(nbytes: int, gbps: float) -> float:
    """Time that so many bytes take on a link of `gbps` Gbit/s."""
    return 8 * nbytes / (1e9 * gbps)


def communication_table(found: Mapping[str, Mapping[str, int]], ranks: Ranks, gbps: float) -> Table:
    """Return a table for people."""
    total = {key: sum(sent[key] for sent in found.values()) for key in ("calls", "nbytes", "early")}
    rows = [
        (name, str(sent["calls"]), format_bytes(sent["nbytes"]), format_bytes(sent["early"]),
         duration(link_seconds(sent["nbytes"], gbps)))
        for name, sent in (*found.items(), ("all", total))
    ]  # fmt: skip
    title = f"Communication of one of {ranks.count} ranks per optimizer step"
    note = f"At {gbps:g} Gbit/s (parallel.link_gbps); what is sent early goes on beside backward."
    return Table(title, ("collective", "calls", "bytes sent", "early", "time"), rows, (note,))
