"""The native rows as a kernel table, and the library of functions behind them.

The order of use: plan with `kernels`, `prepare` the plan's nodes, bind the rows. Planning needs no compiler; binding
needs the functions of `prepare`, which compiles or loads one library for all nodes together.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch

from ttrain.core.errors import PlanError, UserError
from ttrain.core.spec import TensorSpec
from ttrain.device.base import Delivery, Kernel, Launch, chain
from ttrain.device.torch.kernels import kernel_table
from ttrain.device.torch.kernels.common import TORCH_DTYPES, Context, spec_of
from ttrain.device.torch.kernels.costs import Costs, recalled, seconds, warmed
from ttrain.device.torch.kernels.matmul import LIBRARIES, OWN, SMALLEST
from ttrain.device.torch.native import experts, products, rules, threads, updates
from ttrain.device.torch.native.autotune import FASTEST, Backends, backends_of, choose_backends
from ttrain.device.torch.native.codegen import Node, Request, function_name, library_sources
from ttrain.device.torch.native.native import Native, Sizing, joined, readable
from ttrain.device.torch.native.toolchain import Toolchain, code_version

RULES = {**rules.RULES, **updates.RULES, **products.RULES, **experts.RULES, **products.QUANTIZED}
_INPLACE = ("accumulate", "assign", "cache_write", "update")
# Ops that add within a row, or turn it by its place: their kernels here add in one order whatever the number of rows.
SUMS = frozenset({
    "matmul", "linear", *products.QUANTIZED, "attention", "cached_attention", "head_cross_entropy", "head_log_probs",
    "cross_entropy", "softmax", "log_sum_exp", "layer_norm", "add_layer_norm", "rms_norm", "add_rms_norm", "rotary",
    "grouped_matmul", "combine",
})  # fmt: skip
_TURNS, _SECONDS = 2, 0.03  # of a product: at least so many, and until that much time has gone into it
_STEP_TURNS, _STEP_SECONDS = 5, 0.5  # of whole steps: at most so many


class NativeKernels:
    """The StepCompiler of the CPU: functions compiled for the requests of a plan.

    `base` are the rows for everything that no rule covers, such as fp64. `sizing` alone may be a number of threads.

    Products are tuned, one plan after another; what was chosen for one holds for those after it. They are compared with
    those of the libraries that a device of this `context` has, unless it pins who multiplies, or is one of several
    ranks, which would each choose for themselves. Without `measures` nothing is timed, and products are tuned as far as
    their times are known.
    """

    def __init__(
        self,
        base: Mapping[str, Kernel],
        sizing: Sizing | int,
        toolchain: Toolchain | None = None,
        context: Context | None = None,
        measures: bool = False,
    ) -> None:
        self._toolchain, self._measures = Toolchain() if toolchain is None else toolchain, measures
        matmul = "auto" if context is None else context.matmul
        self._libraries: dict[str, dict[str, Kernel]] = {}
        if context is not None and context.group is None and matmul == "auto":
            self._libraries = {name: kernel_table(replace(context, matmul=name)) for name in LIBRARIES}
        if not isinstance(sizing, Sizing):
            invariant = context is not None and context.batch_invariant
            products = matmul in ("auto", "own")
            sizing = Sizing(sizing, products=products, batch_invariant=invariant)
        self.sizing = sizing
        self.backends: Backends = {}  # of products that were tuned; `sizing.products` decides for others
        self._prepared: set[Request] = set()  # products
        self._base = base
        self.compilations = 0  # how often the compiler ran; libraries from the cache do not count
        self.built = self.cached = 0  # kernels that were compiled, and that came from the cache
        self.kernels: Mapping[str, Kernel] = {**base, **{name: self._row(name) for name in RULES}}
        self._functions: dict[str, int] = {}  # body -> address
        self._loaded: list[ctypes.CDLL] = []  # what was compiled
        self._made = lru_cache(maxsize=None)(self._make)

    def native(self, request: Request) -> Native | None:
        """Return the form of a request; None where it takes the base's way, or a library's."""
        return self._made(request, self.backends.get(request))

    @property
    def mixed(self) -> bool:
        """True if a plan has products that a library computes."""
        return any(self.native(request) is None for request in self._prepared)

    def prepare(self, nodes: Iterable[Node]) -> None:
        """Compile or load the functions that these nodes need and that are not here yet: one library for all.

        Raises UserError where there is no compiler, or for a batch-invariant step with an op that has no such kernel.
        """
        nodes = list(nodes)
        requests = [Request.of_node(node) for node in nodes]
        for node, request in zip(nodes, requests, strict=True) if self.sizing.batch_invariant else ():
            if node.stage.value == "forward" and request.op in SUMS and self.native(request) is None:
                raise UserError(
                    f"device.batch_invariant=true: op {request.op} at {node.scope or 'the top'} has no such kernel for "
                    f"{request}. Leave the key out, or change the model."
                )
        self._prepared.update(request for request in requests if request.op in products.RULES)
        wanted = dict.fromkeys(form.body for request in requests if (form := self.native(request)) is not None)
        if missing := [body for body in wanted if body not in self._functions]:
            self._load(missing)
        self.share_threads(self.mixed)

    def share_threads(self, wanted: bool) -> None:
        """Run kernels on the threads of other libraries where it is `wanted`, else on our own."""
        for library in self._loaded:
            threads.use_openmp(library, wanted)

    def tune(self, nodes: Sequence[Node], trial: Callable[[], Launch]) -> bool:
        """Choose backends for the products of a plan's nodes; return True if it has to be planned anew.

        `trial` plans and binds the step with the backends of that moment, and returns what runs it, to be timed.
        """
        counts = Counter(request for node in nodes if (request := self._request(node)) is not None)
        if not counts:
            return False
        before, natively = self.backends, [self.native(request) is not None for request in counts]
        anyway = any(backend != OWN for backend in before.values())
        ready = partial(self._compile, {**before, **dict.fromkeys(counts, OWN)}, nodes)
        alone, together = partial(self._alone, ready), partial(self._together, counts, trial)
        try:
            chosen = choose_backends(counts, alone, together, anyway)
        except UserError:  # there is no compiler, as will be said where the plan is bound
            chosen = {}
        self.backends = {**before, **chosen}
        self.share_threads(self.mixed)
        changed = natively != [self.native(request) is not None for request in counts]
        return changed or any(backend != OWN for backend in chosen.values())

    def _request(self, node: Node) -> Request | None:
        """Return the request of a product to tune; None of others. Small ones are our own: a call costs more."""
        request = Request.of_node(node)
        product = self._libraries and request.op in products.RULES and request not in self.backends
        large = product and node.op.flops(node) >= SMALLEST
        return request if large and self._made(request, OWN) is not None else None

    def _compile(self, backends: Backends, nodes: Sequence[Node]) -> None:
        """Compile all by own code, once, and let it run on the threads of libraries, as where both multiply."""
        if self.backends != backends:
            self.backends = backends
            self.prepare(nodes)
        self.share_threads(True)

    def _alone(self, ready: Launch, request: Request) -> Costs | None:
        def measured() -> dict[str, float]:
            ready()
            ins, outs = [None if x is None else _ones(x) for x in request.inputs], [*map(_ones, request.outputs)]
            node, ways = (request.inputs, request.outputs, request.settings), dict[str, Launch]()
            for backend in backends_of(request):
                kernel = self._kernel(request, backend)
                ways[backend] = kernel.bind(ins, outs, node[2], [*map(_ones, kernel.workspace(*node))])
            return dict.fromkeys(ways, math.inf) | seconds(warmed(ways), _TURNS, _SECONDS)

        return self._recalled(str(request), backends_of(request), measured)

    def _together(
        self, counts: Counter[Request], trial: Callable[[], Launch], candidates: Mapping[str, Backends]
    ) -> Costs | None:
        before = self.backends

        def measured() -> dict[str, float]:
            runs: dict[str, Launch] = {}
            warming: dict[str, Launch] = {}
            for name, backends in candidates.items():
                self.backends = {**before, **backends}
                runs[name] = trial()
                warming[name] = chain(partial(self.share_threads, self.mixed), runs[name])
            return seconds(runs, 1, _STEP_SECONDS, _STEP_TURNS, warming)

        products = sorted(f"{request} {backend} {counts[request]}" for request, backend in candidates[FASTEST].items())
        name = hashlib.sha256("\n".join(products).encode()).hexdigest()[:24]
        return self._recalled(f"step {name}", candidates, measured)

    def _recalled(self, what: str, names: Collection[str], measured: Callable[[], Costs]) -> Costs | None:
        key = f"{what} code={code_version()} threads={self.sizing.threads}"
        return recalled(key, names, measured if self._measures else None)

    def join(self, launches: Iterable[Launch]) -> list[Launch]:
        """The launches with neighbouring native ones as one foreign call each."""
        return joined(launches, threads.address_of(self._loaded[0], "ttrain_run")) if self._loaded else list(launches)

    def _make(self, request: Request, backend: str | None) -> Native | None:
        rule, sizing = RULES.get(request.op), self.sizing
        if backend is not None:
            sizing = replace(sizing, products=backend == OWN)
        return rule(request, sizing) if rule is not None and (request.op == "update" or readable(request)) else None

    def _kernel(self, request: Request, backend: str | None) -> Kernel:
        """Return the row of a request: our own, a library's or the base's. Raises PlanError where there is none."""
        native = self._made(request, backend)
        if native is None:
            found = self._libraries.get(backend or OWN, self._base).get(request.op)
            if found is None:
                raise PlanError(f"{request}: there is no native kernel, and the device has no other.")
            return found

        def bind(ins: Sequence[Any], outs: Sequence[Any], _: Mapping[str, Any], work: Sequence[Any]) -> Launch:
            if native.body not in self._functions:
                raise PlanError(f"{request.op} is bound before its kernel was compiled: prepare() must see its node.")
            return native.launch(self._functions[native.body], ins, outs, work)

        return Kernel(bind, workspace=lambda *_: list(native.workspace), way=lambda *_: OWN)

    def _load(self, bodies: Sequence[str]) -> None:
        before = self._toolchain.compilations
        # Matrix units add in another order than vectors, which products of few rows take.
        opening = "#define VECTORS_ONLY\n" if self.sizing.batch_invariant else ""
        library = self._toolchain.load(library_sources(bodies, self._toolchain.processes, opening))
        if self._toolchain.compilations > before:
            self.built += len(bodies)
        else:
            self.cached += len(bodies)
        self.compilations = self._toolchain.compilations
        found = threads.join_pool(library, self.sizing.threads)
        if found < self.sizing.threads:
            logging.getLogger(__name__).warning(
                "the system grants %d threads of %d to the compiled kernels", found, self.sizing.threads
            )
        self._loaded.append(library)
        self._functions.update({body: threads.address_of(library, function_name(body)) for body in bodies})

    def _row(self, name: str) -> Kernel:
        def chosen(*node: Any) -> Kernel:
            request = Request.make(name, *node)
            return self._kernel(request, self.backends.get(request))

        def bind(ins: Sequence[Any], outs: Sequence[Any], attributes: Mapping[str, Any], work: Sequence[Any]) -> Launch:
            specs = [None if x is None else spec_of(x) for x in ins], [*map(spec_of, outs)]
            return chosen(*specs, attributes).bind(ins, outs, attributes, work)

        def way(*node: Any) -> str:
            tell, backend = chosen(*node).way, self.backends.get(Request.make(name, *node), "library")
            return backend if tell is None else tell(*node)

        return Kernel(
            bind,
            Delivery.INPLACE if name in _INPLACE else Delivery.OUT,
            lambda *node: chosen(*node).workspace(*node),
            # Only over its base: a gradient of equal spec is read row by row all the while.
            overwrites=(0,) if name == "add_embedding_grad" else (),
            supports=None if name not in self._base else self._base[name].supports,
            outside=lambda *node: chosen(*node).outside(*node),
            way=way if name in products.RULES else None,
        )


def _ones(spec: TensorSpec) -> torch.Tensor:
    return torch.ones(spec.shape, dtype=TORCH_DTYPES[spec.dtype])
