"""Transfers between the host and a GPU: the inputs of a step go there in one copy, its outputs come back in one.

Both pass through pinned host memory and a tensor of bytes on the GPU. One launch for each dtype copies between that
tensor and the buffers of the step. Only the read of outputs waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch

from ttrain.core.spec import flat_offsets
from ttrain.device.base import Launch
from ttrain.device.torch.kernels.common import NARROW

Tensor = torch.Tensor


def pinned(nbytes: int) -> Tensor:
    """Return bytes of host memory that a GPU can copy from and to on its own."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def as_arrays(views: Sequence[Tensor]) -> list[np.ndarray]:
    """Return copies of tensors in host memory; bf16 and fp16 as fp32."""
    return [(view.float() if view.dtype in NARROW else view.clone()).numpy() for view in views]


class _Staging:
    """A tensor of bytes with a typed view for each buffer, on a GPU, or without a `device` in pinned host memory."""

    def __init__(self, buffers: Sequence[Tensor], device: torch.device | None) -> None:
        starts, nbytes = flat_offsets([buffer.nbytes for buffer in buffers])  # elements here are bytes
        self.whole = pinned(nbytes) if device is None else torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.views = [
            self.whole[start : start + buffer.nbytes].view(buffer.dtype).view(buffer.shape)
            for start, buffer in zip(starts, buffers, strict=True)
        ]


def _copy_all(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy tensors on the GPU, with one launch for each dtype."""
    for dtype in dict.fromkeys(target.dtype for target in targets):
        own = [place for place, target in enumerate(targets) if target.dtype is dtype]
        torch._foreach_copy_([targets[place] for place in own], [sources[place] for place in own])


class Inputs:
    """Copies the inputs of a step to the GPU, on another stream than the one that computes."""

    def __init__(self, buffers: Mapping[str, Tensor]) -> None:
        self._buffers, self._names = list(buffers.values()), list(buffers)
        self._device = self._buffers[0].device
        self._on_host = [_Staging(self._buffers, None) for _ in range(2)]
        self._on_gpu = _Staging(self._buffers, self._device)
        self._stream = torch.cuda.Stream(self._device)
        self._copied = [torch.cuda.Event() for _ in self._on_host]
        self._taken, self._turn = torch.cuda.Event(), 0

    def write(self, arrays: Mapping[str, np.ndarray]) -> Launch:
        """Start the copy of some inputs. The returned launch writes them into the step's buffers."""
        self._turn = 1 - self._turn
        host, copied = self._on_host[self._turn], self._copied[self._turn]
        places = [self._names.index(name) for name in arrays]
        copied.synchronize()  # the copy of two turns ago has read this host memory
        for place, array in zip(places, arrays.values(), strict=True):
            host.views[place].copy_(torch.from_numpy(np.array(array)))
        with torch.cuda.stream(self._stream):
            self._taken.wait(self._stream)  # the run before has its inputs in its buffers
            self._on_gpu.whole.copy_(host.whole, non_blocking=True)
            copied.record(self._stream)
        return partial(self._take, places, copied)

    def _take(self, places: Sequence[int], copied: torch.cuda.Event) -> None:
        stream = torch.cuda.current_stream(self._device)
        copied.wait(stream)
        _copy_all([self._on_gpu.views[place] for place in places], [self._buffers[place] for place in places])
        self._taken.record(stream)


class Outputs:
    """Copies the outputs of a step to the host."""

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        self._buffers = buffers
        self._on_gpu, self._on_host = _Staging(buffers, buffers[0].device), _Staging(buffers, None)

    def read(self) -> list[np.ndarray]:
        """Wait for the step, and return copies of all outputs; bf16 as fp32."""
        _copy_all(self._buffers, self._on_gpu.views)
        self._on_host.whole.copy_(self._on_gpu.whole, non_blocking=True)
        torch.cuda.current_stream(self._on_gpu.whole.device).synchronize()
        return as_arrays(self._on_host.views)
