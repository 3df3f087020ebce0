"""The result type of rules of native rows, choices that rules share, and compiled functions as launches.

The argument block of a launch is built once; a launch is one foreign call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from math import prod
from typing import Any

from ttrain.core.spec import DType, TensorSpec
from ttrain.device.base import Launch, flat_launches
from ttrain.device.torch.kernels.common import CHUNK_LOGITS
from ttrain.device.torch.native.codegen import STORED, Request, addresses, call, template

_SIGNATURE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_RUN = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)


class NativeLaunch(partial):
    """A call without arguments, whose parts `joined` can read."""

    function: int
    kept: Any


def launch(function: int, arguments: Sequence[int], keep: Any = None) -> NativeLaunch:
    """A launch of the function at an address on these addresses and numbers; `keep` lives as long as it does."""
    block = (ctypes.c_int64 * max(len(arguments), 1))(*arguments)
    made = NativeLaunch(_SIGNATURE(function), ctypes.addressof(block))
    made.function, made.kept = function, (block, keep)
    return made


def joined(launches: Iterable[Launch], run: int) -> list[Launch]:
    """The launches with neighbouring native ones as one foreign call; `run` is the address of ttrain_run."""
    result: list[Launch] = []
    for native, group in groupby(flat_launches(launches), lambda item: isinstance(item, NativeLaunch)):
        found = list(group)
        result += _together(found, run) if native else found
    return result


def _together(group: list[Any], run: int) -> list[Launch]:
    if len(group) < 2:
        return group
    calls = (ctypes.c_int64 * (2 * len(group)))(*(part for item in group for part in (item.function, *item.args)))
    made = partial(_RUN(run), ctypes.addressof(calls), len(group))
    made.kept = (calls, group)  # type: ignore[attr-defined]
    return [made]


Bind = Callable[[int, Sequence[Any], Sequence[Any], Sequence[Any]], Launch]  # address; inputs, outputs, workspace


@dataclass(frozen=True)
class Sizing:
    """Sizes by which work is cut. All but `threads` change rounding, never meaning; tests set small values."""

    threads: int
    thread_cost: int = 2**15  # additions: less than this is not worth waking another thread for
    part: int = 2**13  # elements in one range of a sum over rows
    most_parts: int = 32
    products: bool = True  # whether matrix products run here too; else they go the way of the base
    block: int = 2**14  # elements in one block of a list of tensors: all slots fit a second-level cache
    logits: int = CHUNK_LOGITS  # of how many logits the cross-entropy of a head forms at a time
    batch_invariant: bool = False  # whether the bits of a row are the same among any number of rows

    def threads_for(self, cost: float, most: int | None = None) -> int:
        """Return how many threads a piece of work is worth, up to `most`; `cost` is in additions of one element."""
        count = min(self.threads, int(cost // self.thread_cost))
        return max(1, count if most is None else min(count, most))

    def parts_for(self, rows: int, width: int) -> int:
        """Into how many ranges the rows of a sum are cut: the same for any number of threads, and so is the sum."""
        return max(1, min(rows, self.most_parts, rows * width // self.part))


@dataclass(frozen=True)
class Native:
    """Native form of one request: the body of its C++ function, its scratch memory, and the binding of a launch."""

    body: str
    workspace: Sequence[TensorSpec] = ()
    bind: Bind | None = None  # None: on all addresses in order

    def launch(self, function: int, ins: Sequence[Any], outs: Sequence[Any], work: Sequence[Any]) -> Launch:
        if self.bind is not None:
            return self.bind(function, ins, outs, work)
        tensors = (*ins, *outs, *work)
        return launch(function, [address(tensor) for tensor in tensors], tensors)


Rule = Callable[[Request, Sizing], Native | None]  # None: the op runs another way


def address(tensor: Any) -> int:
    """The address of a tensor's first element; 0 for an absent one."""
    return 0 if tensor is None else tensor.data_ptr()


def fp32(*shape: int) -> TensorSpec:
    """Return the spec of an fp32 tensor."""
    return TensorSpec(shape, DType.FP32)


def readable(request: Request) -> bool:
    """Return whether kernels can read and write all of a request: FP64 and tensors without elements are left out."""
    known = (*STORED, DType.INT64, DType.INT8, DType.UINT8)
    return all(spec is None or (spec.dtype in known and spec.size > 0) for spec in (*request.inputs, *request.outputs))


def one_call(
    request: Request,
    name: str,
    arguments: Sequence[Any],
    *more: str,
    pointers: Sequence[str] | None = None,
    work: Sequence[TensorSpec] = (),
) -> Native:
    """Return a call of a template on inputs, outputs and workspace in order, or other `pointers`, and on `more`."""
    given = addresses((*request.inputs, *request.outputs, *work), len(request.inputs))
    return Native(call(template(name, *arguments), *(given if pointers is None else pointers), *more), work)


def up_to(number: int, step: int) -> int:
    """Return the next multiple of a step."""
    return -(-number // step) * step


def rows_and_width(shape: Sequence[int]) -> tuple[int, int]:
    """[..., C] as (rows, C)."""
    return prod(shape[:-1]), shape[-1]
