"""The CPU's memory with the references of the ops as kernels: an engine runs on it without any other kernel of ours.

Its kernels are as unkind as the contract allows: outputs and workspace are overwritten with garbage before an input is
read, but for elementwise ops.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tests.plan.interpreter import GARBAGE
from tests.plan.random_graphs import workspace
from ttrain.device.base import Buffer, Delivery, Kernel, Launch
from ttrain.device.torch.device import TorchDevice
from ttrain.graph import REGISTRY, Op


class ReferenceDevice(TorchDevice):
    """Every op but those in `without`; those in `fresh` return new tensors instead of writing into given ones."""

    def __init__(self, without: Sequence[str] = (), fresh: Sequence[str] = ()) -> None:
        super().__init__("cpu", 1)
        self.live_bytes = self.peak_bytes = 0
        self._kernels = {op.name: self._row(op, op.name in fresh) for op in REGISTRY.values() if op.name not in without}

    @property
    def kernels(self) -> Mapping[str, Kernel]:
        return self._kernels

    def _row(self, op: Op, fresh: bool) -> Kernel:
        def bind(
            ins: Sequence[Buffer | None], outs: Sequence[Buffer], attributes: Mapping[str, Any], work: Sequence[Buffer]
        ) -> Launch:
            overwrites = op.elementwise or bool(op.mutates) or op.name == "update"

            def launch() -> list[torch.Tensor] | None:
                for buffer in (*work, *([] if fresh or overwrites else outs)):
                    buffer.view(-1).view(torch.uint8).fill_(GARBAGE)
                wide = [x.double() if x is not None and x.is_floating_point() else x for x in ins]
                results = op.reference(*wide, **attributes)
                results = [results] if isinstance(results, torch.Tensor) else list(results)
                if fresh:
                    return [result.reshape(out.shape).to(out.dtype) for result, out in zip(results, outs, strict=True)]
                for result, out in zip(results, outs, strict=True):
                    out.copy_(result.reshape(out.shape))
                return None

            return launch

        return Kernel(bind, Delivery.RETURNS if fresh else Delivery.OUT, workspace=workspace)

    def _allocate(self, nbytes: int) -> torch.Tensor:
        arena = super()._allocate(nbytes)
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(arena, self._freed, nbytes)
        return arena

    def _freed(self, nbytes: int) -> None:
        self.live_bytes -= nbytes
