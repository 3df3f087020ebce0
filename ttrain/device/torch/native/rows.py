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
from ttrain.device.torch.native import attention, pool, products, rules, updates
from ttrain.device.torch.native.choice import OWN, Choice, Libraries, Ways
from ttrain.device.torch.native.codegen import function_name, library_sources
from ttrain.device.torch.native.launch import joined
from ttrain.device.torch.native.native import Native, Sizing
from ttrain.device.torch.native.request import NodeLike, Request
from ttrain.device.torch.native.toolchain import Toolchain

RULES = {**rules.RULES, **updates.RULES, **attention.RULES, **products.RULES}
_INPLACE = ("accumulate", "assign", "update")
_BOTH = (DType.FP32, DType.BF16)


class NativeKernels:
    """The StepCompiler of the CPU: functions compiled for the requests of a plan.

    `base` are the rows for everything that no rule covers, such as fp64. `sizing` alone may be a number of threads.
    `libraries` are what our products are compared with, where `measures` by timing them; see choice.py.
    """

    fuses = True

    def __init__(
        self,
        base: Mapping[str, Kernel],
        sizing: Sizing | int,
        toolchain: Toolchain | None = None,
        matmul: str = "auto",
        libraries: Libraries | None = None,
        measures: bool = False,
    ) -> None:
        self._toolchain = Toolchain() if toolchain is None else toolchain
        if not isinstance(sizing, Sizing):
            # Matrix units beat vectors by far. aten is known to reach them; ours have not run on such a processor yet.
            usual = _BOTH[:1] if "amx_bf16" in vector_extensions() else _BOTH
            sizing = Sizing(sizing, products={"auto": usual, "own": _BOTH}.get(matmul, ()))
        self.sizing = sizing
        self.ways: Ways = {}  # of products that were compared; others go the way of their dtype
        self.mixed = False  # whether a plan has products that a library computes
        self._base = base
        self._choice = Choice(self, libraries, measures) if libraries and matmul == "auto" else None
        self.compilations = 0  # how often the compiler ran; libraries from the cache do not count
        self.built = self.cached = 0  # kernels that were compiled, and that came from the cache
        self.kernels: Mapping[str, Kernel] = {**base, **{name: self._row(name) for name in RULES}}
        self._functions: dict[str, int] = {}  # body -> address
        self._loaded: list[ctypes.CDLL] = []  # what was compiled
        self._native = lru_cache(maxsize=None)(self._make)

    def prepare(self, nodes: Iterable[NodeLike]) -> None:
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
            pool.use_openmp(library, wanted)

    def settle(self, nodes: Sequence[NodeLike], trial: Callable[[], Launch]) -> bool:
        return self._choice is not None and self._choice.settle(nodes, trial)

    def take(self, ways: Ways) -> None:
        """Let compared products go these ways, the others those of their dtype."""
        self.ways = ways
        self._native.cache_clear()

    def covers(self, request: Request) -> bool:
        """Return whether the request is a product that our own code can make."""
        rule = products.RULES.get(request.op)
        return rule is not None and rule(request, replace(self.sizing, products=_BOTH)) is not None

    def join(self, launches: Iterable[Launch]) -> list[Launch]:
        """The launches with neighbouring native ones as one foreign call each."""
        return joined(launches, _address(self._loaded[0], "ttrain_run")) if self._loaded else list(launches)

    def native(self, request: Request) -> Native | None:
        """Return the native form of a request; None where it takes the base's way."""
        return self._native(request)

    def _make(self, request: Request) -> Native | None:
        rule = RULES.get(request.op)
        way, sizing = self.ways.get(request), self.sizing
        if way is not None:
            sizing = replace(sizing, products=_BOTH if way == OWN else ())
        return None if rule is None else rule(request, sizing)

    def _library(self, request: Request) -> Kernel | None:
        """The row for a request that does not run natively."""
        table = None if self._choice is None else self._choice.libraries.get(self.ways.get(request, OWN))
        return (self._base if table is None else table).get(request.op)

    def _load(self, bodies: Sequence[str]) -> None:
        before = self._toolchain.compilations
        library = self._toolchain.load(library_sources(bodies, self._toolchain.processes))
        if self._toolchain.compilations > before:
            self.built += len(bodies)
        else:
            self.cached += len(bodies)
        self.compilations = self._toolchain.compilations
        found = pool.join(library, self.sizing.threads)
        if found < self.sizing.threads:
            logging.getLogger(__name__).warning(
                "the system grants %d threads of %d to the compiled kernels", found, self.sizing.threads
            )
        self._loaded.append(library)
        self._functions.update({body: _address(library, function_name(body)) for body in bodies})

    def _function(self, body: str, op: str) -> int:
        if body not in self._functions:
            raise PlanError(f"{op} is bound before its kernel was compiled: prepare() must see every node of a plan.")
        return self._functions[body]

    def _row(self, name: str) -> Kernel:
        base = self._base.get(name)

        def bind(ins: Sequence[Any], outs: Sequence[Any], attributes: Mapping[str, Any], work: Sequence[Any]) -> Launch:
            request = Request.make(name, map(_spec, ins), [_spec_of(out) for out in outs], attributes)
            native = self.native(request)
            if native is None:
                return _base_launch(name, self._library(request), ins, outs, attributes, work)
            return native.launch([self._function(body, name) for body in native.bodies], ins, outs, work)

        def workspace(
            ins: Sequence[TensorSpec | None], outs: Sequence[TensorSpec], attributes: Mapping[str, Any]
        ) -> list[TensorSpec]:
            request = Request.make(name, ins, outs, attributes)
            native, base = self.native(request), self._library(request)
            if native is not None:
                return list(native.workspace)
            return [] if base is None else base.workspace_specs(ins, outs, attributes)

        def outside(*given: Any) -> int:
            request = Request.make(name, *given)
            tell = getattr(self._library(request), "outside", None)
            return 0 if tell is None or self.native(request) is not None else int(tell(*given))

        def way(*given: Any) -> str:
            request = Request.make(name, *given)
            tell = getattr(self._library(request), "way", None)
            if self.native(request) is not None:
                return OWN
            return self.ways.get(request, "library") if tell is None else str(tell(*given))

        delivery = Delivery.INPLACE if name in _INPLACE else Delivery.OUT
        # Only over its base: a gradient of equal spec is read row by row all the while.
        overwrites = (0,) if name == "add_embedding_grad" else ()
        supports = None if base is None else base.supports
        chosen = way if name in products.RULES else None
        return Kernel(bind, delivery, workspace, overwrites=overwrites, supports=supports, outside=outside, way=chosen)


def _base_launch(
    name: str,
    base: Kernel | None,
    ins: Sequence[Any],
    outs: Sequence[Any],
    attributes: Mapping[str, Any],
    work: Sequence[Any],
) -> Launch:
    if base is None:
        given = ", ".join("-" if tensor is None else str(_spec_of(tensor)) for tensor in ins)
        raise PlanError(f"{name} of {given} has no native kernel, and the device has no other.")
    launch = base.bind(ins, outs, attributes, work)
    if base.delivery is not Delivery.RETURNS:
        return launch

    def run() -> None:
        for result, out in zip(launch(), outs, strict=True):
            out.copy_(result)

    return run


def _address(library: ctypes.CDLL, symbol: str) -> int:
    return ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value or 0


def _spec(tensor: Any) -> TensorSpec | None:
    return None if tensor is None else _spec_of(tensor)


def _spec_of(tensor: Any) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), _dtypes()[tensor.dtype])


@lru_cache(maxsize=1)
def _dtypes() -> dict[Any, DType]:
    import torch

    return {
        torch.float64: DType.FP64,
        torch.float32: DType.FP32,
        torch.bfloat16: DType.BF16,
        torch.int64: DType.INT64,
        torch.int32: DType.INT32,
        torch.int16: DType.INT16,
        torch.bool: DType.BOOL,
    }
