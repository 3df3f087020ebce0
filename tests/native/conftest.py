"""A CPU whose kernels are the generated ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.hurry import QUICKLY
from tests.ops.harness import most_cases
from ttrain.core.errors import UserError
from ttrain.device.base import Kernel
from ttrain.device.torch.device import TorchDevice
from ttrain.device.torch.native import toolchain
from ttrain.device.torch.native.native import Sizing
from ttrain.device.torch.native.rows import RULES, NativeKernels
from ttrain.device.torch.native.toolchain import Toolchain, find_compiler
from ttrain.graph import Composite, Op

# Small cases are cut as large ones would be: across two threads, into several parts and blocks.
SMALL = Sizing(threads=2, thread_cost=1, part=16, block=48, logits=650)


def has_kernel(op: Op) -> bool:
    """Not an optimizer's rule, nor a composite that runs by its body."""
    return op.family != "rule" and (op.name in RULES or not isinstance(op, Composite))


def every_case(where: Callable[[Op], bool] = has_kernel) -> list[Any]:
    """(op, case, dtype) of all ops with a kernel, those of passes too."""
    return most_cases(where)


class NativeDevice(TorchDevice):
    """The CPU with generated rows in its table."""

    def __init__(self, native: NativeKernels, threads: int) -> None:
        super().__init__("cpu", threads=threads)
        self.native = native

    @property
    def kernels(self) -> Mapping[str, Kernel]:
        return self.native.kernels


def open_device(sizing: Sizing, folder: Path) -> NativeDevice:
    base = TorchDevice("cpu", threads=sizing.threads)
    return NativeDevice(NativeKernels(base.kernels, sizing, Toolchain(folder)), sizing.threads)


def require_compiler() -> None:
    try:
        find_compiler()
    except UserError as error:
        pytest.skip(f"no C++ compiler: {error}")


@pytest.fixture(scope="session")
def folder() -> Path:
    """Libraries are kept from one run of the tests to the next: their keys hold all that the code depends on."""
    require_compiler()
    return Toolchain().folder


@pytest.fixture
def compiled_as_for_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "FLAGS", toolchain.FLAGS[: -len(QUICKLY)])


@pytest.fixture(scope="session")
def device(folder: Path) -> Iterator[NativeDevice]:
    """Two threads even for the smallest tensor. Nothing is compiled yet."""
    opened = open_device(SMALL, folder)
    yield opened
    opened.close()
