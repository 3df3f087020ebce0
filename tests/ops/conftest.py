"""Devices that the op tests run on: the CPU always, a GPU where there is one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ttrain.device.base import Device
from ttrain.device.torch.device import TorchDevice
from ttrain.device.torch.kernels.common import Context

# "other ways": the same kernels with sizes that send small cases down the paths of large ones.
KINDS = [
    "cpu",
    "cpu, other ways",
    "cpu, blocks",
    *(["cuda", "cuda, other ways", "cuda, blocks"] if torch.cuda.is_available() else []),
]


@pytest.fixture(scope="session", params=KINDS)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    kind, _, other = request.param.partition(", ")
    opened = TorchDevice(kind, threads=1)
    if other == "other ways":
        opened.context = Context(opened.device, block=40, norm_row=16, explicit_up_to=0)
    elif other == "blocks":
        opened.context = Context(opened.device, block=40, query_rows=3)
    yield opened
    opened.close()
