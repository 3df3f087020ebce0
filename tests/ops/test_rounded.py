"""Rounded updates: the same bits wherever tensors lie and however they are cut, and one of two neighbours each."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ops.test_update import PLACED, SHAPES, Update, spaced
from ttrain.core.spec import DType
from ttrain.device.torch.device import TorchDevice
from ttrain.optim.adamw import AdamW
from ttrain.optim.base import EXAMPLE
from ttrain.optim.settings import AdamWConfig, SGDConfig
from ttrain.optim.sgd import SGD

RULES = {
    "adamw": AdamW(AdamWConfig(betas=[0.9, 0.999])).rule(EXAMPLE, True),
    "sgd": SGD(SGDConfig(momentum=0.9, nesterov=True, weight_decay=0.1)).rule(EXAMPLE, True),
}


def updated(
    device: TorchDevice, name: str, place: Any, dtypes: list[DType], stochastic: bool, steps: int = 2
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(what is written after some updates, the same before the last), on the same numbers every time."""
    update = Update(device, RULES[name], place, dtypes, True, stochastic)
    launch, before = update.bind(), list[torch.Tensor]()
    for step in range(1, steps + 1):
        update.feed(step, 0.01, 0.5)
        before = [tensor.cpu().clone() for tensor in update.written]
        launch()
    return [tensor.cpu() for tensor in update.written], before


MIXES = {
    "all bf16": [DType.BF16] * 4,
    "bf16 moments": [DType.FP32, DType.BF16, DType.BF16, DType.BF16],
    "bf16 weights": [DType.BF16, DType.BF16, DType.FP32, DType.FP32],
    "fp32 gradients": [DType.BF16, DType.FP32, DType.BF16, DType.BF16],
}


@pytest.mark.parametrize("stochastic", [True, False], ids=["stochastic", "nearest"])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("name", RULES)
def test_bits_do_not_hang_on_place_or_blocks(device: TorchDevice, name: str, mix: str, stochastic: bool) -> None:
    plain = TorchDevice("cpu", threads=1)
    expected, _ = updated(plain, name, spaced, MIXES[mix], stochastic)
    for place in PLACED.values():
        found, _ = updated(device, name, place, MIXES[mix], stochastic)
        if device.kind == "cpu":
            assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))
        else:
            for one, two in zip(found, expected, strict=True):
                torch.testing.assert_close(one.float(), two.float(), rtol=2**-6, atol=1e-6)


@pytest.mark.parametrize("name", RULES)
def test_bf16_results_are_neighbours_of_the_fp32_result(device: TorchDevice, name: str) -> None:
    """From one state: all in fp32, and all in bf16 rounded stochastically. Some go up and some down."""
    wide, _ = updated(device, name, spaced, [DType.FP32, DType.BF16, DType.FP32, DType.FP32], False, steps=1)
    narrow, before = updated(device, name, spaced, MIXES["bf16 moments"], True, steps=1)
    assert not any(tensor.any() for tensor in before[len(SHAPES) :])
    up = down = 0
    for one, two in zip(wide[len(SHAPES) :], narrow[len(SHAPES) :], strict=True):
        spacing = torch.exp2(torch.floor(torch.log2(one.abs())) - 7)
        difference = two.float() - one
        assert bool((difference.abs() <= spacing * 1.001).all())
        up, down = up + int((difference > 0).sum()), down + int((difference < 0).sum())
    assert min(up, down) > 100
