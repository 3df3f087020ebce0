"""The time of a step on this machine, added up from the time of each kernel. No step is run.

Each distinct kernel of a plan is timed on example inputs or zeros, one that takes long in a single launch, and its best
time is kept. Where the time for measuring is over, the rest is estimated from operations and bytes. A few kernels whose
time is known are timed again by every plan, since the machine may have been busy before.

The peak of a device in FLOP/s, which mfu is relative to, is measured with a large matrix product. With the bytes per
second of its memory the peak bounds the time of any kernel from below.
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from ttrain.core.errors import UserError
from ttrain.core.folders import cache_folder
from ttrain.core.spec import DType, flat_offsets
from ttrain.core.units import format_duration
from ttrain.core.waiting import Waiting
from ttrain.device.base import Device, Kernel, StepCompiler, chain, filled
from ttrain.device.measured import Section, positive
from ttrain.device.timing import Estimate, StepTime, Way, Work, duration
from ttrain.graph import Kind, Node

_FIRST, _AGAIN = 0.1, 0.02  # seconds for each of what is measured before a step: two products and a copy
_SIZES = {"cpu": 1024, "cuda": 8192, "mps": 4096, "xpu": 8192}
_TIMES = 5  # processes that measure a rate; later ones take the best of these
_MOVED = 64 * 2**20  # bytes that are copied: more than caches hold
LEAST = 2e-6  # s that a launch takes however small its kernel is
REACHED = 0.6  # share of peak and bandwidth that kernels are taken to reach where none was timed


@dataclass(frozen=True)
class Rates:
    """The best rates of a device: FLOP/s of products, and byte/s of memory, read and written together."""

    flops: float
    nbytes: float

    def seconds(self, node: Node) -> float:
        """Return about how many seconds a kernel takes, from its operations and bytes."""
        return LEAST + self.roof(node.op.flops(node), node.op.nbytes(node)) / REACHED

    def roof(self, flops: int, nbytes: int) -> float:
        """Seconds at these rates: of the operations or of the bytes, whichever takes longer."""
        return max(flops / self.flops, nbytes / self.nbytes)


# The best rate, and the number of measurements that it is from.
_KEPT = Section("rates", lambda entry: (positive(entry[0]), int(entry[1])), max)
_rates: dict[str, Rates] = {}  # as this process measured them


def measured_rates(device: str, dtype: str, index: int = 0) -> Rates | None:
    """Return the best rates ever timed on the CPU or a GPU of torch, with the current number of threads.

    `dtype` is fp32, bf16 or fp16. The first processes time some products and copies, and the very first one for longer;
    the best numbers are kept in the user's cache folder. None for devices that torch does not drive.
    """
    if device not in _SIZES:
        return None
    key = f"{cache_folder()} {_key(device, dtype, index)}"
    if key not in _rates:
        flops = _cached(_key(device, dtype, index), partial(_measure, device, dtype, index))
        moved = _cached(f"bandwidth {_key(device, 'bytes', index)}", partial(_measure_bandwidth, device, index))
        _rates[key] = Rates(flops, moved)
    return _rates[key]


def keep_rate(flops: float, device: str, dtype: str, index: int = 0) -> None:
    """Keep the FLOP/s of a product as the best rate, if no product was faster before."""
    key = _key(device, dtype, index)
    _KEPT.keep({key: (flops, _KEPT.known().get(key, (0.0, 0))[1])})
    _rates.clear()


def _key(device: str, dtype: str, index: int) -> str:
    """Return the conditions that a measurement holds for."""
    import torch

    from ttrain.device.torch.kernels.costs import machine

    named = getattr(getattr(torch, device), "get_device_name", None)  # of cuda and xpu
    model = platform.machine() if named is None else named(index)
    return " ".join(map(str, [device, model, platform.node(), dtype, torch.get_num_threads(), machine()]))


def _measure_bandwidth(device: str, index: int, seconds: float) -> float:
    """Byte/s of a copy, which reads and writes."""
    import torch

    place = torch.device(device, index)
    source, target = (torch.zeros(_MOVED, dtype=torch.uint8, device=place) for _ in range(2))
    return 2 * _MOVED / _fastest(lambda: target.copy_(source), place, seconds)


def reading_rate(device: str, index: int = 0) -> float | None:
    """Return the best measured byte/s of reading memory. It is kept; None for devices that torch does not drive."""
    if device not in _SIZES:
        return None
    return _cached(f"reading {_key(device, 'bytes', index)}", partial(_measure_reading, device, index))


def _measure_reading(device: str, index: int, seconds: float) -> float:
    """Byte/s of a search for the largest of many numbers."""
    import torch

    place = torch.device(device, index)
    source = torch.ones(_MOVED, device=place)
    return source.nbytes / _fastest(source.amax, place, seconds)


def _measure(device: str, dtype: str, index: int, seconds: float) -> float:
    """Best FLOP/s over the libraries that torch brings; a neighbour on the machine can only slow a product down."""
    import torch

    size = _SIZES[device]
    place = torch.device(device, index)
    kind = getattr(torch, DType.parse(dtype).in_torch)
    x, y, out = (torch.full((size, size), 0.5, dtype=kind, device=place) for _ in range(3))
    products = [lambda: torch.mm(x, y, out=out)]
    onednn = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if device == "cpu" and kind is torch.float32 and onednn is not None and torch.backends.mkldnn.is_available():
        products.append(lambda: onednn.default(x, y, None, "none", [], ""))
    if device == "cpu" and kind is torch.bfloat16:  # faster without instructions for it
        products.append(lambda: out.copy_(x.float() @ y.float()))
    fastest = min(_fastest(product, place, seconds) for product in products)
    return 2 * size**3 / fastest


def _fastest(product: Callable[[], Any], place: Any, seconds: float) -> float:
    """Seconds of the fastest of the products on a device of torch that fit into the time."""
    import torch

    from ttrain.device.torch.kernels import costs

    launch = product if place.type == "cpu" else chain(product, partial(torch.accelerator.synchronize, place))
    return costs.seconds({"": launch}, 1, seconds, sys.maxsize)[""]


def _cached(key: str, measure: Callable[[float], float]) -> float:
    """The best of _TIMES measurements: a neighbour on the machine can spoil some of them. Later ones are short."""
    best, times = _KEPT.known().get(key, (0.0, 0))
    if times < _TIMES:
        best = max(best, measure(_AGAIN if times else _FIRST))
        _KEPT.keep({key: (best, times + 1)})
    return best


COMPUTE_FAMILIES = ("matmul", "attention", "loss")  # of ops that do many operations per byte
RECORD = 30e-6  # s of Python to record a node and find memory for it, which engine=dynamic does at every step
LAUNCH = 2.5e-6  # s of Python per launch that a timed kernel does not contain
REPEATS = 7  # timed launches of a kernel; its time is their lower quartile, since a neighbour can only slow it down
SECONDS = 0.25  # but no more launches once this much time has gone into one kernel
LONG = 0.5  # seconds; a kernel that takes longer is launched once
OTHER = 8 * 2**20  # bytes that other kernels touch between two launches: more than a core's own caches hold
AGAIN = 8  # kernels of a plan whose time is known and which are timed again
LIMIT = 256 * 2**20  # bytes; lists of state are cut to about this much, and the time scaled

Timer = Callable[[Sequence[Node]], AbstractContextManager[Callable[[Node], float]]]  # for these kernels, one by one


@dataclass
class KernelTimes:
    """Seconds of kernels by themselves: as kept on this machine, as measured now, or by its rates."""

    timer: Timer  # opened only if something has to be measured
    machine: str
    rates: Rates
    seconds: float = math.inf  # to measure for; what is left then is estimated
    compiler: StepCompiler | None = None  # of a traced step, whose kernels go the ways that it takes
    path: Path | None = None  # of the store of measurements, where it is not that of the cache folder
    clock: Callable[[], float] = time.perf_counter
    measured: int = 0
    estimated: int = 0
    refused: str = ""  # why nothing could be measured

    @property
    def note(self) -> str:
        """Return a note on kernels that were estimated; empty where all were measured."""
        why = self.refused or "plan.seconds=<more> times more"
        kernels = "kernel was" if self.estimated == 1 else "kernels were"
        told = f"; {self.estimated} {kernels} not timed but estimated from FLOPs and bytes ({why})"
        return told if self.estimated else ""

    @property
    def _kept(self) -> Section[float]:
        return Section("kernels", positive, min, self.path)

    def of(self, work: Work) -> dict[Node, float]:
        """Return the seconds of every node. What was measured is kept, also where somebody interrupts."""
        keys, counts = {}, Counter[str]()
        for repeats, nodes in work.nodes:
            for node in nodes:
                keys[node] = self._key(node)
                counts[keys[node]] += repeats
        kernels = {key: node for node, key in keys.items()}
        known = self._kept.known()
        if self.seconds > 0:
            self._measure(known, kernels, counts)
        self.estimated = len(kernels.keys() - known.keys())
        slowness = self._slowness({node: known[key] for key, node in kernels.items() if key in known})
        return {
            node: known[key] if key in known else self.rates.seconds(node) * slowness.get(node.op.family, 1.0)
            for node, key in keys.items()
        }

    def _measure(self, known: dict[str, float], kernels: Mapping[str, Node], counts: Mapping[str, int]) -> None:
        """Time kernels while there is time, and keep the best time of each.

        Those come first that take most of the step.
        """
        weight = {key: counts[key] * known.get(key, self.rates.seconds(node)) for key, node in kernels.items()}
        old = [key for key in kernels if key in known]
        chosen = sorted(kernels.keys() - known.keys(), key=lambda key: -weight[key])
        chosen += dict.fromkeys(random.choices(old, [weight[key] for key in old], k=AGAIN)) if old else ()
        limit = f" for at most {format_duration(self.seconds)}" if math.isfinite(self.seconds) else ""
        end = self.clock() + self.seconds
        try:
            # All kernels, in the order of the graph: their library is then the one that an earlier plan compiled.
            with self.timer([*kernels.values()]) as seconds, Waiting(f"Timing kernels{limit}"):
                end = self.clock() + self.seconds
                for key in chosen:
                    if self.clock() + 2 * self.rates.seconds(kernels[key]) < end:
                        known[key] = min(seconds(kernels[key]), known.get(key, math.inf))
                        self.measured += 1
        except UserError as error:
            self.refused = str(error)
        finally:
            self.seconds = max(end - self.clock(), 0.0)
            if self.measured:
                self._kept.keep(known)

    def _slowness(self, known: Mapping[Node, float]) -> dict[str, float]:
        """Return how many times as long as by the rates kernels of a family take. A mere launch teaches nothing."""
        measured, plain = defaultdict[str, float](float), defaultdict[str, float](float)
        for node, seconds in known.items():
            if (by_rates := self.rates.seconds(node)) > 2 * LEAST:
                measured[node.op.family] += seconds
                plain[node.op.family] += by_rates
        return {family: measured[family] / plain[family] for family in plain}

    def _key(self, node: Node) -> str:
        specs = [str(None if value is None else value.spec) for value in (*node.inputs, *node.outputs)]
        way = ""
        if self.compiler is not None:
            chosen = self.compiler.kernels[node.op.name].way
            way = " compiled" if chosen is None else f" {chosen(*node.specs, node.attributes)}"
        settings = (f"{name}={value}" for name, value in sorted(node.attributes.items()))
        text = " ".join([f"{self.machine}{way}", node.op.name, *specs, *settings])
        return f"{node.op.name} {hashlib.sha256(text.encode()).hexdigest()[:24]}"


def host_time(work: Work, seconds: Mapping[Node, float], engine: str) -> StepTime:
    """Return the time of a step on `engine` by the seconds of its kernels."""
    times = {True: 0.0, False: 0.0}  # of kernels that compute more than they move, and of the others
    for repeats, node in ((repeats, node) for repeats, nodes in work.nodes for node in nodes):
        times[node.op.family in COMPUTE_FAMILIES] += repeats * seconds[node]
    compute, bandwidth = times[True], times[False]
    # Python launches kernels one by one, unless they are captured or compiled.
    dispatch, host_input = LAUNCH * work.launches * (engine != "traced"), work.inputs * 5e-6 + work.input_bytes / 4e9
    total = compute + bandwidth + dispatch + host_input
    return StepTime(total, dispatch, compute, bandwidth, host_input, work.launches)


def host_estimate(work: Work, times: Mapping[str, StepTime], engine: str, peak: float) -> Estimate:
    """Estimate by the times of this machine's kernels: of engines static, traced or both, `engine` among them.

    dynamic launches what static does, and so is an engine of a plugin taken to.
    """
    by = dict(times)
    if "static" in by:
        static, more = by["static"], by["static"].launches * RECORD
        by["dynamic"] = replace(static, dispatch=static.dispatch + more, total=static.total + more)
    ways = [Way(name, f"engine={name}", by[name].total) for name in ("static", "traced", "dynamic") if name in by]
    time, note = by.get(engine) or by["static"], ""
    if time.dispatch:
        share = f"{time.dispatch / time.total:.0%} of the step"
        note = f"{time.launches} launches take Python {duration(time.dispatch)}, {share}."
    return Estimate(work, time, ways, peak, note)


def machine_name(device: str, threads: int | None) -> str:
    """Return the conditions that a time holds for: the machine, the number of threads and the version of torch."""
    from importlib.metadata import version

    parts = [device, platform.node(), platform.machine(), os.cpu_count(), threads, version("torch")]
    return " ".join(map(str, parts))


@contextmanager
def timing(
    opened: Callable[[], AbstractContextManager[Device]], compiler: StepCompiler | None, nodes: Sequence[Node]
) -> Iterator[Callable[[Node], float]]:
    """Open a device, and compile what is compiled. Yield what times one of the nodes. See `Timer`."""
    with opened() as device:
        table, others = device.kernels, np.zeros(OTHER, np.uint8)
        if compiler is not None:
            compiler.prepare(nodes)
            table = compiler.kernels
        yield partial(_timed, device, table, others)


def _timed(device: Device, table: Mapping[str, Kernel], others: np.ndarray, node: Node) -> float:
    """Return the lower quartile of the seconds of some launches."""
    launch, scale = _bound(device, table, node)

    def once() -> float:
        np.add(others, 1, out=others)  # in a step, other kernels have used the cache since this one's inputs were made
        return device.seconds(launch)

    first, end = once(), time.perf_counter() + SECONDS
    if first > LONG:
        return scale * first
    times = [once()]
    while len(times) < REPEATS and time.perf_counter() < end:
        times.append(once())
    return scale * sorted(times)[len(times) // 4]


def _bound(device: Device, table: Mapping[str, Kernel], node: Node) -> tuple[Callable[[], Any], float]:
    """Return a launch of the node's kernel on memory of its own, and the factor from its time to the node's.

    Inputs lie side by side, as state does that one update takes together.
    """
    node, scale = _cut(node)
    aliases, kernel = node.op.aliases(node), table[node.op.name]
    ends = accumulate(flat_offsets([value.spec.size])[1] * value.spec.dtype.itemsize for value in node.values)
    offsets = [0, *ends]
    arena, places = device.allocate_arena(offsets[-1], "a kernel to be timed"), iter(offsets)
    ins = [None if value is None else device.place(arena, next(places), value.spec) for value in node.inputs]
    for buffer, value in zip(ins, node.inputs, strict=True):
        if value is not None and value.kind is Kind.INPUT:
            device.upload(buffer, filled(value.spec, value.example))
    outs = [
        ins[aliases[index]] if index in aliases else device.allocate(output.spec)
        for index, output in enumerate(node.outputs)
    ]
    workspace = [device.allocate(spec) for spec in kernel.workspace(*node.specs, node.attributes)]
    return device.bind(kernel, ins, outs, node.attributes, workspace), scale


def _cut(node: Node) -> tuple[Node, float]:
    """Return the node with shorter lists of state, where they are large, and how many times its work the whole is."""
    count, total = node.attributes.get("count", 0), sum(value.spec.nbytes for value in node.values)
    if count < 2 or total <= LIMIT:
        return node, 1.0
    kept = max(1, int(count * LIMIT / total))
    single = sum(not name.endswith("*") for name in node.op.inputs)
    listed = (len(node.inputs) - single) // count * count  # the lists come first, one after another
    inputs = tuple(value for place, value in enumerate(node.inputs) if place >= listed or place % count < kept)
    outputs = tuple(value for place, value in enumerate(node.outputs) if place % count < kept)
    shorter = Node(node.op, inputs, {**node.attributes, "count": kept}, outputs)
    return shorter, total / sum(value.spec.nbytes for value in shorter.values)
