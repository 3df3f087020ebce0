"""Own code or a library: who multiplies in a plan, by what both take on this machine.

Products of libraries put all kernels of a plan on OpenMP's threads. So a product that a library makes faster by itself
is no gain yet: where such products promise one, whole steps are timed both ways.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch

from ttrain.core.errors import UserError
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.base import Buffer, Kernel, Launch
from ttrain.device.torch.kernels.common import TORCH_DTYPES
from ttrain.device.torch.kernels.costs import TIE, recalled, seconds, warmed, winner
from ttrain.device.torch.kernels.product import LIBRARIES, SMALLEST
from ttrain.device.torch.native.native import Native, Sizing
from ttrain.device.torch.native.request import NodeLike, Request
from ttrain.device.torch.native.toolchain import code_version

OWN, FASTEST = "own", "fastest"
LONGEST = 0.5  # seconds of both steps together by their products; longer ones are compared by these alone
_TURNS, _SECONDS = 2, 0.03  # of a product: at least so many, and until that much time has gone into it
_STEP_TURNS, _STEP_SECONDS = 5, 0.5  # of whole steps: at most so many

Libraries = Mapping[str, Mapping[str, Kernel]]  # tables of rows by the library that multiplies in them
Ways = dict[Request, str]  # who makes a product: OWN or a library


def ways_of(request: Request) -> tuple[str, ...]:
    """The ways that a product may take; all but fp32 reaches oneDNN through aten alone."""
    return (OWN, *LIBRARIES) if request.input(0).dtype is DType.FP32 else (OWN, "aten")


def decide(
    counts: Counter[Request],
    alone: Callable[[Request], Mapping[str, float] | None],
    together: Callable[[Mapping[str, Ways]], Mapping[str, float] | None],
    mixed_anyway: bool = False,
) -> Ways:
    """A way for every product of a plan, which has each of them `counts` times; none where times are missing.

    `alone` are the seconds of a product by way, `together` those of the step with all products OWN, with the fastest
    way of each (FASTEST), and with all by one library. They are asked for only where the former promise more than TIE,
    and not of a step that is `mixed_anyway`.
    """
    costs = {request: alone(request) for request in counts}
    known = {request: cost for request, cost in costs.items() if cost is not None}
    if len(known) < len(costs):
        return {}
    fastest = {request: winner(cost, OWN, TIE) for request, cost in known.items()}
    if mixed_anyway:
        return fastest
    shared = [library for library in LIBRARIES if all(library in cost for cost in known.values())]
    rivals = {OWN: dict.fromkeys(counts, OWN), FASTEST: fastest}
    rivals |= {library: ways for library in shared if (ways := dict.fromkeys(counts, library)) != fastest}
    sums = {
        name: sum(count * known[request][ways[request]] for request, count in counts.items())
        for name, ways in rivals.items()
    }
    if winner(sums, OWN, TIE) == OWN:
        return rivals[OWN]
    rivals = {name: ways for name, ways in rivals.items() if name == OWN or sums[OWN] > TIE * sums[name]}
    measured = together(rivals) if sums[OWN] + sums[FASTEST] <= LONGEST else sums
    return {} if measured is None else rivals[winner(measured, OWN, TIE)]


class Compared(Protocol):
    """The compiled rows whose products are compared; see NativeKernels."""

    ways: Ways
    mixed: bool
    sizing: Sizing
    kernels: Mapping[str, Kernel]

    def native(self, request: Request) -> Native | None: ...

    def covers(self, request: Request) -> bool: ...

    def take(self, ways: Ways) -> None: ...

    def prepare(self, nodes: Sequence[NodeLike]) -> None: ...

    def share_threads(self, wanted: bool) -> None: ...


class Choice:
    """Compares the products of plans, one plan after another. What was settled for one holds for those after it."""

    def __init__(self, native: Compared, libraries: Libraries, measures: bool) -> None:
        """Take what is known of this machine already; without `measures` nothing is measured."""
        self.libraries, self._native, self._measures = libraries, native, measures

    def settle(self, nodes: Sequence[NodeLike], trial: Callable[[], Launch]) -> bool:
        """Decides on the products of a plan's nodes; whether it has to be planned anew.

        `trial` plans and binds the step by the ways that are taken then; what it returns runs it, to be timed.
        """
        native = self._native
        counts = Counter(request for node in nodes if (request := self._compared(node)) is not None)
        if not counts:
            return False
        before, mixed, natively = native.ways, native.mixed, [native.native(request) is not None for request in counts]
        anyway = any(way != OWN for way in before.values())
        ready = partial(self._prepare, {**before, **dict.fromkeys(counts, OWN)}, nodes)
        try:
            ways = decide(counts, partial(self._alone, ready), partial(self._together, counts, trial), anyway)
        except UserError:  # there is no compiler, as will be said where the plan is bound
            ways = {}
        native.take({**before, **ways})
        native.mixed = mixed
        native.share_threads(mixed)
        changed = natively != [native.native(request) is not None for request in counts]
        return changed or any(way != OWN for way in ways.values())

    def _compared(self, node: NodeLike) -> Request | None:
        """The request of a product that is not settled; None of others. Small ones are our own: a call costs more."""
        request = Request.of_node(node)
        unsettled = request not in self._native.ways and self._native.covers(request)
        return request if unsettled and node.op.flops(node) >= SMALLEST else None

    def _prepare(self, ways: Ways, nodes: Sequence[NodeLike]) -> None:
        """Compile all by own code, once, and let it run on the threads of libraries, as where both multiply."""
        if self._native.ways != ways:
            self._native.take(ways)
            self._native.prepare(nodes)
        self._native.share_threads(True)

    def _alone(self, ready: Launch, request: Request) -> Mapping[str, float] | None:
        def measured() -> dict[str, float]:
            ready()
            made = [None if spec is None else _ones(spec) for spec in request.inputs], [*map(_ones, request.outputs)]
            launches = warmed([(way, partial(self._launch, request, way, *made)) for way in ways_of(request)])
            return dict.fromkeys(ways_of(request), math.inf) | seconds(launches, _TURNS, _SECONDS)

        return recalled(self._key(str(request)), ways_of(request), measured if self._measures else None)

    def _launch(self, request: Request, way: str, ins: Sequence[Buffer], outs: Sequence[Buffer]) -> Launch:
        """A product one way, on this memory and scratch of its own; the ways that are taken stay as they are."""
        before, kernel, settings = self._native.ways, self._native.kernels[request.op], request.settings
        self._native.take({**before, request: way})
        work = kernel.workspace_specs(request.inputs, request.outputs, settings)
        launch = kernel.bind(ins, outs, settings, [*map(_ones, work)])
        self._native.take(before)
        return launch

    def _together(
        self, counts: Counter[Request], trial: Callable[[], Launch], rivals: Mapping[str, Ways]
    ) -> Mapping[str, float] | None:
        native, before, runs = self._native, self._native.ways, {}

        def measured() -> dict[str, float]:
            for name, ways in rivals.items():
                native.mixed = False
                native.take({**before, **ways})
                run = trial()
                runs[name] = (partial(native.share_threads, native.mixed), run)
            return in_turn(runs)

        products = sorted(f"{request} {way} {counts[request]}" for request, way in rivals[FASTEST].items())
        name = hashlib.sha256("\n".join(products).encode()).hexdigest()[:24]
        return recalled(self._key(f"step {name}"), list(rivals), measured if self._measures else None)

    def _key(self, what: str) -> str:
        return f"{what} code={code_version()} threads={self._native.sizing.threads}"


def _ones(spec: TensorSpec) -> torch.Tensor:
    return torch.ones(spec.shape, dtype=TORCH_DTYPES[spec.dtype])


def in_turn(runs: Mapping[str, tuple[Launch, Launch]]) -> dict[str, float]:
    """Seconds of the fastest run of each, after one that is not timed. The first call of a pair gets ready for both."""
    costs = dict.fromkeys(runs, math.inf)
    end = time.perf_counter() + _STEP_SECONDS
    for turn in range(_STEP_TURNS):
        if turn and time.perf_counter() > end:
            break
        for name, (ready, run) in runs.items():
            ready()
            run()
            start = time.perf_counter()
            run()
            costs[name] = min(costs[name], time.perf_counter() - start)
    return costs
