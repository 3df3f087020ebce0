"""The bytes that ranks send each other in an optimizer step, by the collectives of a plan. No process is started."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ttrain.core.tables import Table
from ttrain.core.units import format_bytes
from ttrain.device.timing import Work, duration
from ttrain.graph import Node, Stage
from ttrain.parallel.ranks import Ranks

_START = "_start"  # ends the names of what runs beside computing


@dataclass(frozen=True)
class Collective:
    """One kind of collective: how often a step calls it, and the bytes that one rank sends by it.

    `early` bytes of these are under way before backward has ended.
    """

    name: str
    calls: int
    nbytes: int
    early: int = 0


def collectives(work: Work, ranks: Ranks) -> list[Collective]:
    """Return the collectives of one optimizer step, each by its name."""
    found: dict[str, Collective] = {}
    for times, nodes in work.nodes:
        end = max((place for place, node in enumerate(nodes) if node.stage is Stage.BACKWARD), default=0)
        for place, node in enumerate(nodes):
            nbytes = times * sent_bytes(node, ranks)
            if nbytes:
                name = node.op.name.removesuffix("_state").removesuffix(_START)
                had, early = found.get(name, Collective(name, 0, 0)), nbytes if place < end else 0
                found[name] = Collective(name, had.calls + times, had.nbytes + nbytes, had.early + early)
    return list(found.values())


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


def communication_table(found: Sequence[Collective], ranks: Ranks, gbps: float) -> Table:
    """Return a table for people."""
    total = Collective("all", *(sum(getattr(each, name) for each in found) for name in ("calls", "nbytes", "early")))

    def told(nbytes: int) -> str:
        return duration(link_seconds(nbytes, gbps))

    rows = [
        (each.name, str(each.calls), *map(format_bytes, (each.nbytes, each.early)), told(each.nbytes))
        for each in (*found, total)
    ]
    title = f"Communication of one of {ranks.count} ranks per optimizer step"
    note = f"At {gbps:g} Gbit/s (parallel.link_gbps); what is sent early goes on beside backward."
    return Table(title, ("collective", "calls", "bytes sent", "early", "time"), rows, (note,))
