"""A CUDA device without a GPU: every launch runs on fake tensors, which have shape, dtype and device and no values.

A kernel that mixes devices or dtypes, reads a value, or takes a host tensor raises. Streams, graphs and fused
optimizers have no fakes: stand-ins take their place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.ops.harness import Interpreter
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.torch import device as module
from ttrain.device.torch import transfers
from ttrain.device.torch.device import TorchDevice
from ttrain.device.torch.kernels.common import TORCH_DTYPES
from ttrain.device.torch.triton.installed import has_triton
from ttrain.engine.base import examples
from ttrain.graph import Case, Op
from ttrain.testing.cases import record

INDEX = 7  # a GPU that no machine of ours has, so that nothing that is cached by device is taken for real
FUSED = ("_fused_adamw_", "_fused_sgd_")


class OnDevice(TorchDispatchMode):
    """Refuses tensors that lie elsewhere than on the GPU, and notes the calls of aten."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    @property
    def launches(self) -> int:
        """Count the calls that a GPU runs: not those that look at a tensor, view or allocate it."""
        others = ("prim.", "aten.view", "aten.alias", "aten.transpose", "aten.empty")
        return sum(not name.startswith(others) for name in self.calls)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(str(func).removesuffix(".default"))
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves((args, kwargs, result)):
            if isinstance(each, torch.Tensor):
                assert each.device == torch.device("cuda", INDEX), f"{func}: a tensor on {each.device}"
        return result


class Unfilled(Interpreter):
    """Nothing is read, so memory is neither poisoned nor filled: those calls would be most of all."""

    def allocate(self, spec: TensorSpec) -> torch.Tensor:
        return torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device=self.device.device)

    def upload(self, buffer: torch.Tensor, array: np.ndarray) -> None: ...


class FakeCuda(TorchDevice):
    """Memory of fake tensors. `watched` has what each capture saw, in which the launches of a step run once more.

    All captures share a memory pool.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.watched: list[OnDevice] = []

    @contextmanager
    def captured(self, pool: tuple[int, int]) -> Iterator[None]:
        assert pool == (0, 1)
        with OnDevice() as watched:
            yield
        self.watched.append(watched)

    def takes(self, op: Op, case: Case, dtype: DType) -> None:
        """Run a case of an op, and check where its outputs lie and their shapes."""
        graph, _, outputs = record(op, case, dtype)
        interpreter = Unfilled(self)
        interpreter.run(graph, examples(graph))
        for output in outputs:
            found = interpreter.buffers[output]
            assert found.device == self.device and tuple(found.shape) == output.spec.shape

    def _allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def upload(self, buffer: torch.Tensor, array: np.ndarray) -> None:
        assert array.shape == tuple(buffer.shape)
        super().upload(buffer, array)

    def download(self, buffer: torch.Tensor) -> np.ndarray:
        return np.zeros(tuple(buffer.shape), np.float32)

    def memory(self) -> dict[str, int]:
        return {}


class _Graph:
    def replay(self) -> None: ...

    def reset(self) -> None: ...


class _Stream:
    """Also an event."""

    def __init__(self, *given: Any) -> None: ...

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self) -> _Stream:
        return self

    def wait(self, stream: Any) -> None: ...

    def record(self, stream: Any) -> None: ...

    def synchronize(self) -> None: ...


def _fused(*groups: Any, lr: Any, **settings: Any) -> None:
    """Check what aten's fused optimizers ask of their tensors."""
    tensors = [each for each in tree_leaves((groups, lr)) if isinstance(each, torch.Tensor)]
    assert {each.device for each in tensors} == {torch.device("cuda", INDEX)}
    parameters, *others = (group for group in groups if group)
    for group in others:
        assert len(group) == len(parameters)


@contextmanager
def fake_cuda(capability: tuple[int, int] = (9, 0)) -> Iterator[FakeCuda]:
    """Open the device in a mode of fake tensors."""
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode(allow_non_fake_inputs=True):
        patch.setattr(module, "require_gpu", lambda *given: None)
        patch.setattr(module, "lacking_triton", lambda capability: None if has_triton() else "Triton is not installed")
        for name in ("set_device", "synchronize", "empty_cache"):
            patch.setattr(torch.cuda, name, lambda *given: None)
        for name, stand_in in (
            ("CUDAGraph", _Graph),
            ("Stream", _Stream),
            ("Event", _Stream),
            ("current_stream", _Stream),
        ):
            patch.setattr(torch.cuda, name, stand_in)
        patch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        patch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        patch.setattr(transfers, "as_arrays", lambda views: [np.zeros(tuple(x.shape), np.float32) for x in views])
        patch.setattr(transfers, "pinned", lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
        for name in FUSED:
            patch.setattr(torch, name, _fused)
        device = FakeCuda("cuda", threads=torch.get_num_threads(), index=INDEX)
        device.context = replace(device.context, attention="planned")  # nothing can be timed
        patch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
        patch.setattr(torch.cuda, "graph", lambda graph, pool, stream: device.captured(pool))
        yield device
        device.close()
