"""Autotuner of matrix products: the backend of each, own code or a library, by what both take on this machine.

Products of libraries put all kernels of a plan on OpenMP's threads. So a product that a library makes faster by itself
is no gain yet: where such products promise one, whole steps are timed both ways.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from ttrain.core.errors import UserError
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.base import Buffer, Kernel, Launch, chain
from ttrain.device.torch.kernels import product_libraries
from ttrain.device.torch.kernels.common import TORCH_DTYPES, Context
from ttrain.device.torch.kernels.costs import TIE, recalled, seconds, warmed, winner
from ttrain.device.torch.kernels.product import LIBRARIES, SMALLEST
from ttrain.device.torch.native import products
from ttrain.device.torch.native.native import Sizing
from ttrain.device.torch.native.request import Node, Request
from ttrain.device.torch.native.rows import BOTH, OWN, Backends, NativeKernels
from ttrain.device.torch.native.toolchain import Toolchain, code_version

FASTEST = "fastest"
LONGEST = 0.5  # seconds of both steps together by their products; longer ones are compared by these alone
_TURNS, _SECONDS = 2, 0.03  # of a product: at least so many, and until that much time has gone into it
_STEP_TURNS, _STEP_SECONDS = 5, 0.5  # of whole steps: at most so many


def backends_of(request: Request) -> tuple[str, ...]:
    """Return the backends of a product; all but fp32 reaches oneDNN through aten alone."""
    return (OWN, *LIBRARIES) if request.input(0).dtype is DType.FP32 else (OWN, "aten")


def choose_backends(
    counts: Counter[Request],
    alone: Callable[[Request], Mapping[str, float] | None],
    together: Callable[[Mapping[str, Backends]], Mapping[str, float] | None],
    mixed_anyway: bool = False,
) -> Backends:
    """Return a backend for every product of a plan, which has each `counts` times; none where times are missing.

    `alone` gives the seconds of a product by backend, `together` those of a step by candidate: all products OWN, each
    by its fastest backend (FASTEST), or all by one library. A step is timed only where the sums of products promise
    more than TIE, and never where it is `mixed_anyway`.
    """
    costs = {request: alone(request) for request in counts}
    known = {request: cost for request, cost in costs.items() if cost is not None}
    if len(known) < len(costs):
        return {}
    fastest = {request: winner(cost, OWN) for request, cost in known.items()}
    if mixed_anyway:
        return fastest
    shared = [library for library in LIBRARIES if all(library in cost for cost in known.values())]
    candidates = {OWN: dict.fromkeys(counts, OWN), FASTEST: fastest}
    candidates |= {library: backends for library in shared if (backends := dict.fromkeys(counts, library)) != fastest}
    sums = {
        name: sum(count * known[request][backends[request]] for request, count in counts.items())
        for name, backends in candidates.items()
    }
    if winner(sums, OWN) == OWN:
        return candidates[OWN]
    candidates = {name: each for name, each in candidates.items() if name == OWN or sums[OWN] > TIE * sums[name]}
    measured = together(candidates) if sums[OWN] + sums[FASTEST] <= LONGEST else sums
    return {} if measured is None else candidates[winner(measured, OWN)]


class AutotunedKernels(NativeKernels):
    """Compiled rows whose products are tuned, one plan after another. What was chosen for one holds for those after it.

    They are compared with those of the libraries that a device of this `context` has, unless it pins who multiplies, or
    is one of several ranks, which would each choose for themselves. Without `measures` nothing is timed, and products
    are tuned as far as their times are known.
    """

    def __init__(
        self,
        base: Mapping[str, Kernel],
        sizing: Sizing | int,
        context: Context,
        measures: bool,
        toolchain: Toolchain | None = None,
    ) -> None:
        super().__init__(base, sizing, toolchain, context.matmul)
        tuned = context.matmul == "auto" and context.group is None
        self._libraries = product_libraries(context) if tuned else {}
        self._measures = measures

    def library(self, request: Request) -> Kernel | None:
        table = self._libraries.get(self.backends.get(request, OWN))
        return super().library(request) if table is None else table.get(request.op)

    def tune(self, nodes: Sequence[Node], trial: Callable[[], Launch]) -> bool:
        counts = Counter(request for node in nodes if (request := self._request(node)) is not None)
        if not counts:
            return False
        before, mixed, natively = self.backends, self.mixed, [self.native(request) is not None for request in counts]
        anyway = any(backend != OWN for backend in before.values())
        ready = partial(self._compile, {**before, **dict.fromkeys(counts, OWN)}, nodes)
        alone, together = partial(self._alone, ready), partial(self._together, counts, trial)
        try:
            chosen = choose_backends(counts, alone, together, anyway)
        except UserError:  # there is no compiler, as will be said where the plan is bound
            chosen = {}
        self.use({**before, **chosen})
        self.mixed = mixed
        self.share_threads(mixed)
        changed = natively != [self.native(request) is not None for request in counts]
        return changed or any(backend != OWN for backend in chosen.values())

    def _request(self, node: Node) -> Request | None:
        """Return the request of a product to tune; None of others. Small ones are our own: a call costs more."""
        request = Request.of_node(node)
        rule = products.RULES.get(request.op) if self._libraries and request not in self.backends else None
        large = rule is not None and node.op.flops(node) >= SMALLEST
        covered = rule is not None and rule(request, replace(self.sizing, products=BOTH)) is not None
        return request if large and covered else None

    def _compile(self, backends: Backends, nodes: Sequence[Node]) -> None:
        """Compile all by own code, once, and let it run on the threads of libraries, as where both multiply."""
        if self.backends != backends:
            self.use(backends)
            self.prepare(nodes)
        self.share_threads(True)

    def _alone(self, ready: Launch, request: Request) -> Mapping[str, float] | None:
        def measured() -> dict[str, float]:
            ready()
            made = [None if spec is None else _ones(spec) for spec in request.inputs], [*map(_ones, request.outputs)]
            launches = warmed([(name, partial(self._launch, request, name, *made)) for name in backends_of(request)])
            return dict.fromkeys(backends_of(request), math.inf) | seconds(launches, _TURNS, _SECONDS)

        return self._recalled(str(request), backends_of(request), measured)

    def _launch(self, request: Request, backend: str, ins: Sequence[Buffer], outs: Sequence[Buffer]) -> Launch:
        """Return a product by one backend, on this memory and scratch of its own; the chosen ones stay as they are."""
        before, kernel, settings = self.backends, self.kernels[request.op], request.settings
        self.use({**before, request: backend})
        work = kernel.workspace_specs(request.inputs, request.outputs, settings)
        launch = kernel.bind(ins, outs, settings, [*map(_ones, work)])
        self.use(before)
        return launch

    def _together(
        self, counts: Counter[Request], trial: Callable[[], Launch], candidates: Mapping[str, Backends]
    ) -> Mapping[str, float] | None:
        before = self.backends

        def measured() -> dict[str, float]:
            runs: dict[str, Launch] = {}
            warming: dict[str, Launch] = {}
            for name, backends in candidates.items():
                self.mixed = False
                self.use({**before, **backends})
                runs[name] = trial()
                warming[name] = chain(partial(self.share_threads, self.mixed), runs[name])
            return seconds(runs, 1, _STEP_SECONDS, _STEP_TURNS, warming)

        products = sorted(f"{request} {backend} {counts[request]}" for request, backend in candidates[FASTEST].items())
        name = hashlib.sha256("\n".join(products).encode()).hexdigest()[:24]
        return self._recalled(f"step {name}", candidates, measured)

    def _recalled(
        self, what: str, names: Collection[str], measured: Callable[[], Mapping[str, float]]
    ) -> Mapping[str, float] | None:
        key = f"{what} code={code_version()} threads={self.sizing.threads}"
        return recalled(key, names, measured if self._measures else None)


def _ones(spec: TensorSpec) -> torch.Tensor:
    return torch.ones(spec.shape, dtype=TORCH_DTYPES[spec.dtype])
