"""Updates give the same bits wherever tensors lie and however they are cut, rounded or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ops.test_update import PLACED, Update, spaced
from tests.ttnn.runs import adamw, sgd
from ttrain.core.spec import DType
from ttrain.device.torch.device import TorchDevice
from ttrain.optim.base import EXAMPLE

RULES = {
    "adamw": adamw(betas=[0.9, 0.999]).rule(EXAMPLE, True),
    "sgd": sgd(momentum=0.9, nesterov=True, weight_decay=0.1).rule(EXAMPLE, True),
}


def updated(device: TorchDevice, name: str, place: Any, dtypes: list[DType], stochastic: bool) -> list[torch.Tensor]:
    """Return what two updates write, on the same numbers every time."""
    update = Update(device, RULES[name], place, dtypes, True, stochastic)
    launch = update.bind()
    for step in (1, 2):
        update.feed(step, 0.01, 0.5)
        launch()
    return [tensor.cpu() for tensor in update.written]


MIXES = {
    "all fp32": [DType.FP32] * 4,
    "all bf16": [DType.BF16] * 4,
    "bf16 moments": [DType.FP32, DType.BF16, DType.BF16, DType.BF16],
    "bf16 weights": [DType.BF16, DType.BF16, DType.FP32, DType.FP32],
    "fp32 gradients": [DType.BF16, DType.FP32, DType.BF16, DType.BF16],
}


CASES = [(mix, stochastic) for mix in MIXES for stochastic in (True, False) if mix != "all fp32" or not stochastic]


@pytest.mark.parametrize(("mix", "stochastic"), CASES)
@pytest.mark.parametrize("name", RULES)
def test_bits_do_not_hang_on_place_or_blocks(device: TorchDevice, name: str, mix: str, stochastic: bool) -> None:
    plain = TorchDevice("cpu", threads=1)
    expected = updated(plain, name, spaced, MIXES[mix], stochastic)
    for place in PLACED.values():
        found = updated(device, name, place, MIXES[mix], stochastic)
        if device.kind == "cpu" and mix != "all fp32":
            assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))
        else:
            for one, two in zip(found, expected, strict=True):
                near = 2e-6 if mix == "all fp32" else 2**-6
                torch.testing.assert_close(one.float(), two.float(), rtol=near, atol=1e-6)
