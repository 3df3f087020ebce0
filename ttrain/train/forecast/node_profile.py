"""The time of each node of a step beside the machine's best, as tables, values and a timeline."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from operator import attrgetter
from statistics import median
from typing import Any

from ttrain.core.tables import Table
from ttrain.core.units import format_bytes, format_count
from ttrain.device.base import Device
from ttrain.device.timing import duration
from ttrain.graph import Node, Stage
from ttrain.train.forecast.show import show_ways
from ttrain.train.forecast.step_time import Rates

Span = tuple[Node, float, float]  # a node, and when it began and ended, in seconds
_LABEL = attrgetter("label")


class Stopwatch:
    """Takes the times of the nodes that a step shows it, one step after another."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stamps: list[tuple[Node | None, Callable[[], float]]] = []

    def ready(self) -> None:
        """The next node begins now."""
        self._stamps.append((None, self._device.stamp()))

    def look(self, node: Node, _read: object) -> bool:
        """Note that a node was launched."""
        self._stamps.append((node, self._device.stamp()))
        return False

    def spans(self) -> list[Span]:
        """Return the spans of the step that ran, and forget them."""
        self._device.synchronize()
        stamps, self._stamps = [(node, when()) for node, when in self._stamps], []
        pairs = pairwise(stamps)
        return [(node, before, after) for (_, before), (node, after) in pairs if node is not None]


Cost = dict[str, Any]  # of some launches of one step: launches, seconds, flops, nbytes; roof, seconds at the rates


def _cells(cost: Cost, whole: float) -> tuple[str, ...]:
    """Return cells of a table: count, time, share of the step, work and rates, share of the roof."""
    seconds = max(cost["seconds"], 1e-12)
    return (
        str(cost["launches"]), duration(cost["seconds"]), f"{cost['seconds'] / whole:.1%}", format_count(cost["flops"]),
        format_bytes(cost["nbytes"]), format_count(cost["flops"] / seconds),
        format_bytes(int(cost["nbytes"] / seconds)), f"{cost['roof'] / seconds:.0%}",
    )  # fmt: skip


@dataclass(frozen=True)
class NodeProfile:
    """Profile of the nodes of one optimizer step: medians over `steps` steps."""

    device: str
    engine: str
    steps: int
    top: int
    plain: float  # seconds of a step that nobody looks into
    watched: float  # seconds of one whose nodes are timed
    rates: Rates
    nodes: Mapping[Node, Cost]
    timeline: Sequence[Span] = field(repr=False)  # of the last step
    ways: Mapping[str, str] = field(default_factory=dict)  # that products go, see show.product_ways

    @classmethod
    def of(
        cls, device: str, engine: str, top: int, plain: Sequence[float], watched: Sequence[float], rates: Rates,
        steps: Sequence[Sequence[Span]], ways: Mapping[str, str],
    ) -> NodeProfile:  # fmt: skip
        """Make a profile from the seconds of plain and of watched steps, and the spans of the latter."""
        counts, taken = Counter(node for node, _, _ in steps[-1]), defaultdict[Node, list[float]](list)
        for spans in steps:
            sums = defaultdict[Node, float](float)
            for node, begin, end in spans:
                sums[node] += end - begin
            for node, took in sums.items():
                taken[node].append(took)
        nodes = {}
        for node, seconds in taken.items():
            count, flops, nbytes = counts[node] or 1, node.op.flops(node), node.op.nbytes(node)
            work = {"flops": count * flops, "nbytes": count * nbytes, "roof": count * rates.roof(flops, nbytes)}
            nodes[node] = {"launches": count, "seconds": median(seconds), **work}
        return cls(device, engine, len(steps), top, median(plain), median(watched), rates, nodes, steps[-1], ways)

    @property
    def whole(self) -> Cost:
        return self.by(lambda _: "all")["all"]

    @property
    def overhead(self) -> float:
        """Share by which timing the nodes makes a step longer."""
        return self.watched / self.plain - 1

    def by(self, key: Callable[[Node], str]) -> dict[str, Cost]:
        """Nodes of one key together, those first that take longest."""
        groups = defaultdict[str, Any](Counter)
        for node, share in self.nodes.items():
            groups[key(node)].update(share)
        return dict(sorted(groups.items(), key=lambda group: -group[1]["seconds"]))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "device": self.device, "engine": self.engine, "steps": self.steps, "step_ms": 1e3 * self.plain,
            "profiled_step_ms": 1e3 * self.watched, "overhead": self.overhead,
            "flops_per_s": self.rates.flops, "bytes_per_s": self.rates.nbytes, "roof_ms": 1e3 * self.whole["roof"],
            "of_roof": self.whole["roof"] / self.plain, "products": dict(self.ways),
            "nodes": [
                {"op": node.op.name, "part": _part(node), "stage": node.stage.value, **share,
                 "of_roof": share["roof"] / max(share["seconds"], 1e-12),
                 "outputs": [str(value.spec) for value in node.outputs]}
                for node, share in self.nodes.items()
            ],
            "parts": self.by(part_of),
            "ops": self.by(_LABEL),
        }  # fmt: skip

    def tables(self) -> list[Table]:
        """Return tables for people."""
        whole = self.whole
        time, roof = whole["seconds"], whole["roof"]
        columns = ("launches", "time", "share", "FLOP", "bytes", "FLOP/s", "bytes/s", "of roof")
        longest = sorted(self.nodes.items(), key=lambda item: -item[1]["seconds"])[: self.top]
        nodes = [(_part(node), node.stage.value, node.label, *_cells(share, time)) for node, share in longest]
        rates = f"{format_count(self.rates.flops)} FLOP/s and {format_bytes(int(self.rates.nbytes))}/s"
        notes = (
            f"A step takes {duration(self.plain)}, and {duration(self.watched)} with its nodes timed one by one: "
            f"{self.overhead:+.1%}. The nodes together take {duration(time)}.",
            f"At the roof, {rates} as measured here, they would take {duration(roof)}: each kernel its FLOPs or "
            f"its bytes, whichever takes longer. That is {roof / self.plain:.0%} of the step.",
            *([show_ways(self.ways)] if self.ways else []),
        )
        groups = ("By part of the model", "part", part_of), ("By op", "op", _LABEL)
        return [
            Table(f"Longest {len(nodes)} of {len(self.nodes)} nodes", ("part", "stage", "op", *columns), nodes),
            *(
                Table(title, (name, *columns), [(part, *_cells(share, time)) for part, share in self.by(key).items()])
                for title, name, key in groups
            ),
            Table("One step", ("", *columns), [("all nodes", *_cells(whole, time))], notes),
        ]

    def trace(self) -> dict[str, Any]:
        """The last step as events of Chrome's trace format: nodes within the parts of the model, within stages."""
        start = self.timeline[0][1]
        spans = [([node.stage.value, *_path(node), node.label], node, begin, end) for node, begin, end in self.timeline]
        facts = {node: {**share, "outputs": " ".join(str(v.spec) for v in node.outputs)}
                 for node, share in self.nodes.items()}  # fmt: skip
        return {"traceEvents": list(_events(spans, 0, start, facts)), "displayTimeUnit": "ms"}


def _events(
    spans: Sequence[tuple[list[str], Node, float, float]], depth: int, start: float, facts: Mapping[Node, Any]
) -> Iterator[dict[str, Any]]:
    """Complete events: runs of neighbours with one name at this depth are one, with those of the next depth inside."""
    for (name, last), group in groupby(spans, lambda span: (span[0][depth], len(span[0]) == depth + 1)):
        members = list(group)
        for part in [[member] for member in members] if last else [members]:
            begin, end = part[0][2], part[-1][3]
            times = {"ts": 1e6 * (begin - start), "dur": 1e6 * (end - begin)}
            yield {"name": name, "ph": "X", "pid": 1, "tid": 1, **times, "args": facts[part[0][1]] if last else {}}
            if not last:
                yield from _events(part, depth + 1, start, facts)


def _part(node: Node) -> str:
    """The node's part of the model: the layer whose parameter it reads, else its scope."""
    inside = (value.name for value in node.values if value.kind.is_state and value.name.startswith(f"{node.scope}."))
    return next((name.rpartition(".")[0] for name in inside if node.scope), node.scope)


def _path(node: Node) -> list[str]:
    """`blocks.3.attention` -> blocks.3, attention: a number belongs to the name before it."""
    return re.findall(r"[^./]+(?:\.\d+)?", _part(node))


def part_of(node: Node) -> str:
    """Return the part of the model, equal for all blocks; for a node outside the model, its stage in brackets."""
    part = "" if node.stage is Stage.UPDATE else _part(node)
    return re.sub(r"\.\d+", ".*", part) or f"({node.stage.value})"
