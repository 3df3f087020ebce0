"""Time the kernels of this machine: each distinct kernel of a plan is timed, and its best time is kept.

A kernel is timed in memory of its own, on example inputs of its step and else on zeros. State that one update takes
together lies side by side, as in a run. A kernel that takes long is timed on fewer rows, and that time scaled by
operations and bytes. Where the time for measuring is over, the rest is estimated from these alone. A few kernels whose
time is known are timed again by every plan, since the machine may have been busy before.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ttrain.core.errors import UserError
from ttrain.core.files import replace_file
from ttrain.core.folders import cache_folder
from ttrain.core.spec import TensorSpec, flat_offsets
from ttrain.core.waiting import Waiting
from ttrain.device.base import Device, Kernel, StepCompiler, filled
from ttrain.graph.graph import Node
from ttrain.graph.kinds import Kind
from ttrain.train.forecast.peak import LEAST, Rates

REPEATS = 7  # timed launches of a kernel; its time is their lower quartile, since a neighbour can only slow it down
SECONDS = 0.25  # but no more launches once this much time has gone into one kernel
BAR_AFTER = 1.0  # seconds; what is done sooner needs no progress bar
OTHER = 8 * 2**20  # bytes that other kernels touch between two launches: more than a core's own caches hold
AGAIN = 8  # kernels of a plan whose time is known and which are timed again
LONG = 0.15  # seconds; a kernel that is expected to take longer is timed on fewer rows where there is such a plan
LIMIT = 256 * 2**20  # bytes; lists of state are cut to about this much, and the time scaled


@dataclass
class KernelTimes:
    """Seconds of a launch by kernel, from the cache of this machine or measured on an open device."""

    device: Callable[[], Device]  # opened only if something has to be measured
    machine: str
    path: Path = field(default_factory=lambda: cache_folder() / "kernels.json")
    bar: bool = False  # shows progress on stderr
    seconds: float = math.inf  # to measure for in all; what is left then is estimated by `rates`
    rates: Rates | None = None
    compiler: StepCompiler | None = None  # of a traced step, whose kernels these are then, by the ways that it takes
    clock: Callable[[], float] = time.perf_counter
    measured: int = 0
    estimated: dict[str, float] = field(default_factory=dict)  # seconds by kernel
    refused: str = ""  # why nothing could be compiled
    _known: dict[str, float] | None = None
    _open: Device | None = None
    _table: Mapping[str, Kernel] = field(default_factory=dict)
    _end: float | None = None  # of measuring, by the clock
    _sums: dict[str, tuple[float, float]] = field(default_factory=dict)  # by family: measured and expected seconds
    _other_work: Any = field(default_factory=lambda: np.zeros(OTHER, np.uint8))

    def of(self, nodes: Iterable[Node], fewer: Iterable[Node] | None = None) -> list[float]:
        """Seconds of every node, in order. What was measured is kept, also where somebody interrupts.

        `fewer` are the same nodes, on fewer rows where such are planned.
        """
        if self._known is None:
            self._known = self._read()
        whole = list(nodes)
        nodes = whole if fewer is None else list(map(self._timed, whole, fewer))
        seconds = self._seconds(self._known, nodes)
        return [each * self._ratio(node, timed) for each, node, timed in zip(seconds, whole, nodes, strict=True)]

    def _timed(self, node: Node, smaller: Node) -> Node:
        """Return the node to time for a node: the one on fewer rows, where it takes long and has no known time."""
        long = self.rates is not None and self.rates.seconds(node) > LONG
        return smaller if long and self._known is not None and self._key(node) not in self._known else node

    def _ratio(self, node: Node, timed: Node) -> float:
        return 1.0 if node is timed or self.rates is None else self.rates.seconds(node) / self.rates.seconds(timed)

    def _seconds(self, known: dict[str, float], nodes: Sequence[Node]) -> list[float]:
        keys = [self._key(node) for node in nodes]
        kernels = dict(zip(keys, nodes, strict=True))
        missing = {key: node for key, node in kernels.items() if key not in known}
        old = [key for key in kernels if key not in missing]
        for key in old:
            self._learn(kernels[key], known[key])
        if self.seconds > 0 or self.rates is None:
            counts = Counter(keys)
            again = random.choices(old, [known[key] * counts[key] for key in old], k=AGAIN) if old else []
            chosen = self._in_order(missing, counts) | {key: kernels[key] for key in again}
            self._measure_all(known, chosen)
        self.estimated |= {key: self._expected(node) for key, node in missing.items() if key not in known}
        return [known[key] if key in known else self.estimated[key] for key in keys]

    @property
    def note(self) -> str:
        """Return a note on kernels that were estimated; empty where all were measured."""
        if not self.estimated:
            return ""
        kernels = "kernel was" if len(self.estimated) == 1 else "kernels were"
        why = f" ({self.refused})" if self.refused else ""
        return f"; {len(self.estimated)} {kernels} not timed but estimated from FLOPs and bytes{why}"

    def _in_order(self, missing: dict[str, Node], counts: Mapping[str, int]) -> dict[str, Node]:
        """First those that take most of the step, where the time may not suffice for all."""
        return dict(sorted(missing.items(), key=lambda item: -self._expected(item[1]) * counts[item[0]]))

    def _measure_all(self, known: dict[str, float], chosen: dict[str, Node]) -> None:
        """Time kernels while there is time, each in two launches at least, and keep the best time of each."""
        if self._end is None:
            self._end = self.clock() + self.seconds
        before = self.measured
        try:
            for key, node in self._shown(chosen if self._prepared(chosen.values()) else {}):
                if self.rates is None or self.clock() + 2 * self._expected(node) < self._end:
                    earlier = known.get(key)
                    known[key] = min(self._measure(node), earlier or math.inf)
                    self._learn(node, known[key], earlier)
                    self.measured += 1
        finally:
            if self.measured > before:
                self._write(known)

    def _prepared(self, nodes: Collection[Node]) -> bool:
        """Opens the device, and compiles; False where there is nothing to measure, or no compiler."""
        if not nodes:
            return False
        if self._open is None:
            self._open = self.device()
            self._table = self._open.kernels
        if self.compiler is not None:
            try:
                with Waiting("Compiling kernels"):
                    self.compiler.prepare(list(nodes))
            except UserError as error:
                self.refused = str(error)
                return False
            self._table = self.compiler.kernels
        return True

    @property
    def left(self) -> float:
        """Seconds that measuring may still take."""
        return self.seconds if self._end is None else max(self._end - self.clock(), 0.0)

    def _expected(self, node: Node) -> float:
        """Expect a time by the rates, and by how much longer kernels of the family were measured to take."""
        measured, expected = self._sums.get(node.op.family, (1.0, 1.0))
        return 0.0 if self.rates is None else self.rates.seconds(node) * measured / expected

    def _learn(self, node: Node, seconds: float, before: float | None = None) -> None:
        """Learn from a kernel's seconds; `before` were learnt of it already. A mere launch teaches nothing."""
        if self.rates is not None and (plain := self.rates.seconds(node)) > 2 * LEAST:
            measured, expected = self._sums.get(node.op.family, (0.0, 0.0))
            new = (seconds, plain) if before is None else (seconds - before, 0.0)
            self._sums[node.op.family] = measured + new[0], expected + new[1]

    def _shown(self, chosen: dict[str, Node]) -> Iterable[tuple[str, Node]]:
        """Yield the kernels to measure, with a progress bar where one is wanted and they take long."""
        if not self.bar:
            yield from chosen.items()
            return
        from tqdm import tqdm

        with tqdm(total=len(chosen), desc="timing kernels", unit="kernel", delay=BAR_AFTER, leave=False) as bar:
            for item in chosen.items():
                if self._end is not None and math.isfinite(self._end):
                    bar.set_postfix_str(f"at most {self.left:.0f} s left", refresh=False)
                yield item
                bar.update()

    def close(self) -> None:
        """Close the device, if one was opened."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def _key(self, node: Node) -> str:
        specs = [str(None if value is None else value.spec) for value in (*node.inputs, *node.outputs)]
        where = f"{self.machine} {self._way(node)}".rstrip()
        text = " ".join([where, node.op.name, *specs, *(f"{k}={v}" for k, v in sorted(node.attributes.items()))])
        return f"{node.op.name} {hashlib.sha256(text.encode()).hexdigest()[:24]}"

    def _way(self, node: Node) -> str:
        if self.compiler is None:
            return ""
        way = self.compiler.kernels[node.op.name].way
        return "compiled" if way is None else way(*node.specs, node.attributes)

    def _measure(self, node: Node) -> float:
        assert self._open is not None  # by _prepared
        launch, scale = _bound(self._open, self._table, node)
        launch()
        times: list[float] = []
        end = self.clock() + SECONDS
        while len(times) < REPEATS and (not times or self.clock() < end):
            self._other_work += 1  # in a step, other kernels have used the cache since this one's inputs were made
            start = self.clock()
            launch()
            self._open.synchronize()
            times.append(self.clock() - start)
        return scale * sorted(times)[len(times) // 4]

    def _read(self) -> dict[str, float]:
        try:
            return {key: float(value) for key, value in json.loads(self.path.read_text("utf-8")).items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    def _write(self, known: dict[str, float]) -> None:
        others = self._read()
        best = others | {key: min(seconds, others.get(key, math.inf)) for key, seconds in known.items()}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self.path, json.dumps(best, indent=0, sort_keys=True) + "\n")
        except OSError:  # a home that can't be written: every plan measures
            pass


def machine_name(device: str, threads: int | None) -> str:
    """Return the conditions that a time holds for: the machine, the number of threads and the version of torch."""
    from importlib.metadata import version

    parts = [device, platform.node(), platform.machine(), os.cpu_count(), threads, version("torch")]
    return " ".join(map(str, parts))


def _bound(device: Device, table: Mapping[str, Kernel], node: Node) -> tuple[Callable[[], Any], float]:
    """A launch of the node's kernel on memory of its own, and the factor from its time to the node's."""
    node, scale = _cut(node)
    aliases, kernel = node.op.aliases(node), table[node.op.name]
    ins: list[Any] = [None] * len(node.inputs)
    for group in _groups(node):
        members = [(index, value.spec) for index in group if (value := node.inputs[index]) is not None]
        for (index, _), buffer in zip(members, _side_by_side(device, [spec for _, spec in members]), strict=True):
            ins[index] = buffer
    for buffer, value in zip(ins, node.inputs, strict=True):
        if value is not None and value.kind is Kind.INPUT:
            device.upload(buffer, filled(value.spec, value.example))
    outs = [
        ins[aliases[index]] if index in aliases else device.allocate(output.spec)
        for index, output in enumerate(node.outputs)
    ]
    workspace = [device.allocate(spec) for spec in kernel.workspace_specs(*node.specs, node.attributes)]
    return device.bind(kernel, ins, outs, node.attributes, workspace), scale


def _groups(node: Node) -> list[list[int]]:
    """Numbers of inputs that lie side by side: each list of an update op; every other input by itself."""
    count = node.attributes.get("count", 0)
    single = sum(not name.endswith("*") for name in node.op.inputs)
    present = (len(node.inputs) - single) // count if count else 0
    groups = [list(range(start * count, (start + 1) * count)) for start in range(present)]
    return groups + [[index] for index in range(present * count, len(node.inputs))]


def _side_by_side(device: Device, specs: Sequence[TensorSpec]) -> list[Any]:
    if not specs:
        return []
    size = specs[0].dtype.itemsize
    offsets, end = flat_offsets([spec.size for spec in specs])
    arena = device.allocate_arena(end * size, "a kernel to be timed")
    return [device.place(arena, offset * size, spec) for offset, spec in zip(offsets, specs, strict=True)]


def _cut(node: Node) -> tuple[Node, float]:
    """The node with shorter lists of state, where they are large, and how many times its work the whole is."""
    count = node.attributes.get("count", 0)
    total = sum(value.spec.nbytes for value in node.values)
    if count < 2 or total <= LIMIT:
        return node, 1.0
    lists = [group for group in _groups(node) if len(group) == count]
    kept = max(1, int(count * LIMIT / total))
    sizes = [node.inputs[index].spec.size for index in lists[0]]  # type: ignore[union-attr]
    order = sorted(range(count), key=lambda index: sizes[index])[-kept:]
    chosen = tuple(node.inputs[group[index]] for group in lists for index in order)
    rest = node.inputs[len(lists) * count :]
    written = len(node.outputs) // count
    outputs = tuple(node.outputs[part * count + index] for part in range(written) for index in order)
    shorter = Node(node.op, (*chosen, *rest), {**node.attributes, "count": kept}, outputs)
    return shorter, sum(sizes) / sum(sizes[index] for index in order)
