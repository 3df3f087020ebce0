"""Devices that the op tests run on: the CPU always, a GPU where there is one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ttrain.device.base import Device
from ttrain.device.torch.device import TorchDevice

GPU = torch.cuda.is_available()
# The same kernels with sizes that send small cases down the paths of large ones, and those of CUDA on the CPU.
WAYS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "other ways": {"block": 40, "norm_row": 16, "explicit_up_to": 0, "logits": 600},
    "blocks": {"logits": 15, "block": 40, "query_rows": 3, "explicit_up_to": 10**6},
}
CUDA_ON_CPU = {"block": 10**6, "kind": "cuda", "explicit_up_to": 10**6}
KINDS = [(kind, WAYS[way], f"{kind}, {way}") for kind in ("cpu", *(["cuda"] if GPU else [])) for way in WAYS]
KINDS.append(("cpu", CUDA_ON_CPU, "cpu, as on cuda"))


def parameter(kind: str, changed: dict[str, Any], name: str) -> Any:
    """The first kind is in the fast tier, see tests/conftest.py."""
    marks = [] if (kind, changed, name) == KINDS[0] else [pytest.mark.another_way]
    marks += [pytest.mark.cuda] if kind == "cuda" else []
    return pytest.param((kind, changed, name), id=name, marks=marks)


@pytest.fixture(scope="session", params=[parameter(*row) for row in KINDS])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    kind, changed, _ = request.param
    opened = TorchDevice(kind, threads=1)
    opened.context = dataclasses.replace(opened.context, **changed)
    yield opened
    opened.close()
