"""Dropout masks: the hash bit for bit, on any size, and what training needs of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import ttrain.ops  # noqa: F401 - fills the registry
from tests.ops.harness import bind_node, launch_row, node_of
from ttrain.core.random_bits import keep_threshold, stream_key
from ttrain.core.spec import DType
from ttrain.device.torch.device import TorchDevice
from ttrain.device.torch.kernels.common import TORCH_DTYPES, Call, Context
from ttrain.device.torch.kernels.random import Dropout, Rows


def expected_mask(elements: int | np.ndarray, seed: int, stream: int, p: float) -> np.ndarray:
    """The mask, of the elements with these numbers or of so many, in numpy's unsigned arithmetic, which wraps."""
    x = np.asarray(np.arange(elements) if isinstance(elements, int) else elements).astype(np.uint32)
    x += np.uint32(stream_key(seed, stream))
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    return x >= np.uint32(keep_threshold(p))


def dropped(
    device: TorchDevice, size: int, seed: int, stream: int, p: float, dtype: DType = DType.FP32, times: int = 1
) -> np.ndarray:
    """A vector of ones after dropout, launched `times` times."""
    given = [torch.ones(size, dtype=TORCH_DTYPES[dtype]).to(device.device), torch.tensor(seed).to(device.device)]
    launch, (y,) = bind_node(device, node_of("dropout", given, {"p": p, "stream": stream}), given)
    for _ in range(times):
        launch()
    return device.download(y)


SEEDS = [0, 1, 2**31, 2**32 - 1, 2**32, 2**62 - 1, 2**63 - 1, -1, -(2**63)]


@pytest.mark.parametrize("seed", SEEDS)
def test_mask_is_the_hash_bit_for_bit(device: TorchDevice, seed: int) -> None:
    for stream, p in ((0, 0.5), (7, 0.1), (2**31 + 5, 0.999), (3, 0.001), (0, 0.0)):
        got = dropped(device, 1009, seed, stream, p, times=2)
        assert np.array_equal(got != 0, expected_mask(1009, seed, stream, p))


@pytest.mark.parametrize("block", [1, 40, 1000])
def test_rows_of_a_whole_that_nobody_holds_have_its_mask(block: int) -> None:
    context = Context(torch.device("cpu"), block)
    count, rows, width, at = 5, 4, 7, Rows(60_001, 50_003, 70_000)  # of more elements than 32 bits count
    x = torch.ones(count, rows, width)

    def dropped(call: Call) -> None:
        x, seed = call.ins
        Dropout(call, seed, x.numel(), x.dtype, (rows, at.time)).mask_rows(x, x, at)

    launch_row(dropped, context, [x, torch.tensor(77)], {"p": 0.4, "stream": 3})
    head, row, column = np.indices(x.shape)
    elements = (head * at.time + at.row + row) * at.time + at.column + column
    assert np.array_equal(x.numpy() != 0, expected_mask(elements, 77, 3, 0.4))


@pytest.mark.parametrize("dtype", [DType.FP64, DType.FP32, DType.BF16])
def test_kept_elements_are_scaled_once(device: TorchDevice, dtype: DType) -> None:
    got = dropped(device, 999, seed=5, stream=1, p=0.1, dtype=dtype)
    scale = torch.tensor(1 / 0.9, dtype=torch.float64).to(TORCH_DTYPES[dtype])
    assert set(np.unique(got.astype(np.float64))) == {0.0, float(scale)}


def test_rate_is_p_and_neighbours_are_independent() -> None:
    mask = expected_mask(1_000_000, seed=9, stream=4, p=0.2)
    device = TorchDevice("cpu", threads=1)
    assert np.array_equal(dropped(device, 1_000_000, 9, 4, 0.2) != 0, mask)
    # Four standard deviations of a binomial share, and of a correlation of independent signs.
    assert abs(mask.mean() - 0.8) < 4 * np.sqrt(0.2 * 0.8 / mask.size)
    signs = (mask - mask.mean()) / mask.std()
    for lag in (1, 2, 64, 1024):
        assert abs((signs[:-lag] * signs[lag:]).mean()) < 4 / np.sqrt(mask.size - lag)
