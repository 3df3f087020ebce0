"""Result of every rule of a native row, and the choices that rules share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ttrain.core.spec import DType, TensorSpec
from ttrain.device.base import Launch
from ttrain.device.torch.chunks import CHUNK_LOGITS
from ttrain.device.torch.native.launch import launch
from ttrain.device.torch.native.request import Request

# Functions by address, in the order of `bodies`; then inputs, outputs and workspace.
Bind = Callable[[Sequence[int], Sequence[Any], Sequence[Any], Sequence[Any]], Launch]


@dataclass(frozen=True)
class Sizing:
    """Sizes by which work is cut. All but `threads` change rounding, never meaning; tests set small values."""

    threads: int
    thread_cost: int = 2**15  # additions: less than this is not worth waking another thread for
    part: int = 2**13  # elements in one range of a sum over rows
    most_parts: int = 32
    products: tuple[DType, ...] = (DType.FP32, DType.BF16)  # of which dtypes run here too, or else the way of the base
    block: int = 2**14  # elements in one block of a list of tensors: all slots fit a second-level cache
    logits: int = CHUNK_LOGITS  # of how many logits the cross-entropy of a head forms at a time

    def threads_for(self, cost: float, most: int | None = None) -> int:
        """Return how many threads a piece of work is worth, up to `most`; `cost` is in additions of one element."""
        count = min(self.threads, int(cost // self.thread_cost))
        return max(1, count if most is None else min(count, most))

    def parts_for(self, rows: int, width: int) -> int:
        """Into how many ranges the rows of a sum are cut: the same for any number of threads, and so is the sum."""
        return max(1, min(rows, self.most_parts, rows * width // self.part))


@dataclass(frozen=True)
class Native:
    """Native form of one request: the C++ functions it needs, its scratch memory, and the binding of a launch."""

    bodies: tuple[str, ...]
    workspace: tuple[TensorSpec, ...] = ()
    bind: Bind | None = None  # None: one function on all addresses in order

    def launch(self, functions: Sequence[int], ins: Sequence[Any], outs: Sequence[Any], work: Sequence[Any]) -> Launch:
        if self.bind is not None:
            return self.bind(functions, ins, outs, work)
        tensors = (*ins, *outs, *work)
        return launch(functions[0], [address(tensor) for tensor in tensors], tensors)


Rule = Callable[[Request, Sizing], Native | None]  # None: the op runs another way


def address(tensor: Any) -> int:
    """The address of a tensor's first element; 0 for an absent one."""
    return 0 if tensor is None else tensor.data_ptr()


def fp32(*shape: int) -> TensorSpec:
    return TensorSpec(shape, DType.FP32)


def int32(*shape: int) -> TensorSpec:
    return TensorSpec(shape, DType.INT32)
