"""Devices that the op tests run on: the CPU always, a GPU where there is one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ttrain.device.base import Device
from ttrain.device.torch.device import TorchDevice

KINDS = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(scope="session", params=KINDS)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    opened = TorchDevice(request.param, threads=1)
    yield opened
    opened.close()
