"""What ranks send each other in an optimizer step, from the collectives of a plan; no process is started for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ttrain.core.tables import Table
from ttrain.core.units import format_bytes
from ttrain.device.timing import Work, duration
from ttrain.graph.graph import Node
from ttrain.parallel.ranks import Ranks


@dataclass(frozen=True)
class Collective:
    """One kind of collective: how often a step calls it, and the bytes that one rank sends by it."""

    name: str
    calls: int
    nbytes: int


def collectives(work: Work, ranks: Ranks) -> list[Collective]:
    """Those of one optimizer step, each by its name."""
    found: dict[str, Collective] = {}
    for times, nodes in work.nodes:
        for node in nodes:
            nbytes = sent_bytes(node, ranks)
            if nbytes:
                name = node.op.name.removesuffix("_state")
                before = found.get(name, Collective(name, 0, 0))
                found[name] = Collective(name, before.calls + times, before.nbytes + times * nbytes)
    return list(found.values())


def sent_bytes(node: Node, ranks: Ranks) -> int:
    """Bytes that this rank sends for a node; 0 where it is no collective.

    A sum over ranks sends every other rank's share of a run to its owner, a gather its own share to every other rank.
    A small tensor is taken to go round in a ring.
    """
    name, others = node.op.name, ranks.count - 1
    if name == "all_reduce":
        return 2 * node.values[0].spec.nbytes * others // ranks.count
    bounds = node.attributes.get("bounds", ())
    if not bounds:
        return 0
    size = node.values[0].spec.dtype.itemsize
    shares = [[stop - start for start, stop in pairwise(bucket)] for bucket in bounds]
    own = sum(bucket[ranks.rank] for bucket in shares)
    gathered, reduced = own * others, sum(map(sum, shares)) - own
    sent = {"all_gather_state": gathered, "reduce_scatter_state": reduced, "all_reduce_state": gathered + reduced}
    return size * sent.get(name, 0)


def link_seconds(nbytes: int, gbps: float) -> float:
    """Time that so many bytes take on a link of `gbps` Gbit/s."""
    return 8 * nbytes / (1e9 * gbps)


def communication_table(found: Sequence[Collective], ranks: Ranks, gbps: float) -> Table:
    """For people."""
    rows = [
        (each.name, str(each.calls), format_bytes(each.nbytes), duration(link_seconds(each.nbytes, gbps)))
        for each in found
    ]
    total = sum(each.nbytes for each in found)
    rows.append(
        ("all", str(sum(each.calls for each in found)), format_bytes(total), duration(link_seconds(total, gbps)))
    )
    title = f"Communication of one of {ranks.count} ranks per optimizer step"
    note = f"At {gbps:g} Gbit/s (parallel.link_gbps), where nothing of it overlaps with computing."
    return Table(title, ("collective", "calls", "bytes sent", "time"), rows, (note,))
