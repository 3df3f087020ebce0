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
from ttrain.core.processor import vector_extensions
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.base import Buffer, Delivery, Kernel, Launch, chain
from ttrain.device.torch.kernels import product_libraries
from ttrain.device.torch.kernels.common import TORCH_DTYPES, Context
from ttrain.device.torch.kernels.costs import recalled, seconds, warmed
from ttrain.device.torch.kernels.matmul import SMALLEST
from ttrain.device.torch.native import products, rules, threads, updates
from ttrain.device.torch.native.autotune import FASTEST, OWN, Backends, backends_of, choose_backends
from ttrain.device.torch.native.codegen import Node, Request, function_name, library_sources
from ttrain.device.torch.native.native import Native, Sizing, joined
from ttrain.device.torch.native.toolchain import Toolchain, code_version

_DTYPES = {torch_dtype: dtype for dtype, torch_dtype in TORCH_DTYPES.items()}
RULES = {**rules.RULES, **updates.RULES, **products.RULES}
_INPLACE = ("accumulate", "assign", "update")
BOTH = (DType.FP32, DType.BF16)
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

    fuses = True

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
        tuned = context is not None and context.group is None and matmul == "auto"
        self._libraries = product_libraries(context) if context is not None and tuned else {}
        if not isinstance(sizing, Sizing):
            # Matrix units beat vectors by far. aten is known to reach them; ours have not run on such a processor yet.
            usual = BOTH[:1] if "amx_bf16" in vector_extensions() else BOTH
            sizing = Sizing(sizing, products={"auto": usual, "own": BOTH}.get(matmul, ()))
        self.sizing = sizing
        self.backends: Backends = {}  # of products that were tuned; others have that of their dtype
        self.mixed = False  # whether a plan has products that a library computes
        self._base = base
        self.compilations = 0  # how often the compiler ran; libraries from the cache do not count
        self.built = self.cached = 0  # kernels that were compiled, and that came from the cache
        self.kernels: Mapping[str, Kernel] = {**base, **{name: self._row(name) for name in RULES}}
        self._functions: dict[str, int] = {}  # body -> address
        self._loaded: list[ctypes.CDLL] = []  # what was compiled
        self.native = lru_cache(maxsize=None)(self._make)  # form of a request; None where it takes the base's way

    def prepare(self, nodes: Iterable[Node]) -> None:
        """Compile or load the functions that these nodes need and that are not here yet: one library for all.

        Raises UserError where there is no compiler.
        """
        wanted: dict[str, None] = {}
        for node in nodes:
            native = self.native(Request.of_node(node))
            self.mixed |= native is None and node.op.name in products.RULES
            wanted.update(dict.fromkeys(native.bodies if native is not None else ()))
        missing = [body for body in wanted if body not in self._functions]
        if missing:
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

    def use(self, backends: Backends) -> None:
        """Let tuned products run by these backends, the others by that of their dtype."""
        self.backends = backends
        self.native.cache_clear()

    def join(self, launches: Iterable[Launch]) -> list[Launch]:
        """The launches with neighbouring native ones as one foreign call each."""
        return joined(launches, _address(self._loaded[0], "ttrain_run")) if self._loaded else list(launches)

    def _make(self, request: Request) -> Native | None:
        rule = RULES.get(request.op)
        backend, sizing = self.backends.get(request), self.sizing
        if backend is not None:
            sizing = replace(sizing, products=BOTH if backend == OWN else ())
        return None if rule is None else rule(request, sizing)

    def library(self, request: Request) -> Kernel | None:
        """The row for a request that does not run natively."""
        return self._libraries.get(self.backends.get(request, OWN), self._base).get(request.op)

    def _load(self, bodies: Sequence[str]) -> None:
        before = self._toolchain.compilations
        library = self._toolchain.load(library_sources(bodies, self._toolchain.processes))
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
        self._functions.update({body: _address(library, function_name(body)) for body in bodies})

    def _row(self, name: str) -> Kernel:
        base = self._base.get(name)

        def bind(ins: Sequence[Any], outs: Sequence[Any], attributes: Mapping[str, Any], work: Sequence[Any]) -> Launch:
            specs = ([None if x is None else _spec_of(x) for x in ins], [_spec_of(y) for y in outs])
            request = Request.make(name, *specs, attributes)
            native, base = self.native(request), self.library(request)
            if native is not None and not self._functions.keys() >= set(native.bodies):
                raise PlanError(f"{name} is bound before its kernel was compiled: prepare() must see its node.")
            if native is not None:
                return native.launch([self._functions[body] for body in native.bodies], ins, outs, work)
            if base is None:
                raise PlanError(f"{request}: there is no native kernel, and the device has no other.")
            return base.bind(ins, outs, attributes, work)

        def workspace(
            ins: Sequence[TensorSpec | None], outs: Sequence[TensorSpec], attributes: Mapping[str, Any]
        ) -> list[TensorSpec]:
            request = Request.make(name, ins, outs, attributes)
            native, base = self.native(request), self.library(request)
            if native is not None:
                return list(native.workspace)
            return [] if base is None else base.workspace_specs(ins, outs, attributes)

        def outside(*given: Any) -> int:
            request = Request.make(name, *given)
            tell = getattr(self.library(request), "outside", None)
            return 0 if tell is None or self.native(request) is not None else int(tell(*given))

        def way(*given: Any) -> str:
            request = Request.make(name, *given)
            tell = getattr(self.library(request), "way", None)
            if self.native(request) is not None:
                return OWN
            return self.backends.get(request, "library") if tell is None else str(tell(*given))

        delivery = Delivery.INPLACE if name in _INPLACE else Delivery.OUT
        # Only over its base: a gradient of equal spec is read row by row all the while.
        overwrites = (0,) if name == "add_embedding_grad" else ()
        supports = None if base is None else base.supports
        chosen = way if name in products.RULES else None
        return Kernel(bind, delivery, workspace, overwrites=overwrites, supports=supports, outside=outside, way=chosen)


def _address(library: ctypes.CDLL, symbol: str) -> int:
    return ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value or 0


def _spec_of(tensor: Any) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), _DTYPES[tensor.dtype])


def _ones(spec: TensorSpec) -> torch.Tensor:
    return torch.ones(spec.shape, dtype=TORCH_DTYPES[spec.dtype])
