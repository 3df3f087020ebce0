"""The native rows as a kernel table, and the library of functions behind them.

The order of use: plan with `kernels`, `prepare` the plan's nodes, bind the rows. Planning needs no compiler; binding
needs the functions of `prepare`, which compiles or loads one library for all nodes together.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from ttrain.core.errors import PlanError
from ttrain.core.processor import vector_extensions
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.base import Delivery, Kernel, Launch
from ttrain.device.torch.kernels.common import TORCH_DTYPES
from ttrain.device.torch.native import attention, products, rules, threads, updates
from ttrain.device.torch.native.codegen import function_name, library_sources
from ttrain.device.torch.native.native import Native, Sizing, joined
from ttrain.device.torch.native.request import Node, Request
from ttrain.device.torch.native.toolchain import Toolchain

_DTYPES = {torch_dtype: dtype for dtype, torch_dtype in TORCH_DTYPES.items()}
RULES = {**rules.RULES, **updates.RULES, **attention.RULES, **products.RULES}
_INPLACE = ("accumulate", "assign", "update")
BOTH = (DType.FP32, DType.BF16)
OWN = "own"  # the backend of a product that compiled code makes
Backends = dict[Request, str]  # of products: OWN or the name of a library


class NativeKernels:
    """The StepCompiler of the CPU: functions compiled for the requests of a plan.

    `base` are the rows for everything that no rule covers, such as fp64. `sizing` alone may be a number of threads.
    """

    fuses = True

    def __init__(
        self,
        base: Mapping[str, Kernel],
        sizing: Sizing | int,
        toolchain: Toolchain | None = None,
        matmul: str = "auto",
    ) -> None:
        self._toolchain = Toolchain() if toolchain is None else toolchain
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
        return False

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
        return self._base.get(request.op)

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
