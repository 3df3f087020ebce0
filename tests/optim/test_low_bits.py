"""fp32 weights as what their bf16 copies lack: the same weights and moments, and the nearest copies."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.native.conftest import require_compiler
from tests.optim.updates import Updates, Vector
from ttrain.config.build import build_optimizer, build_session
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.settings import DeviceConfig
from ttrain.device.torch.device import TorchDevice
from ttrain.device.torch.planned import planned
from ttrain.engine.settings import EngineConfig
from ttrain.engine.state import State, StateTensor
from ttrain.graph import Kind
from ttrain.models.gpt import GPT
from ttrain.models.settings import GPTConfig
from ttrain.optim.settings import AdamWConfig, LionConfig, SGDConfig
from ttrain.train.settings import GuardConfig, TrainConfig

EDGES = (0x3F800000, 0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0xBF808000, 0x7F7FFFFF, 0x7F800000, 0xFF800000,
         0x7FC00000, 0xFFFFFFFF, 0x00000001, 0x00008000, 0x807FFFFF, 0x00000000, 0x80000000)  # fmt: skip


def numbers(count: int) -> np.ndarray:
    """Of random bits, and with those at which rounding turns."""
    drawn = np.random.default_rng(3).integers(0, 2**32, count, dtype=np.uint32)
    drawn[: len(EDGES)] = EDGES
    return drawn.view(np.float32)


def nearest(weights: np.ndarray) -> np.ndarray:
    """The nearest bf16 numbers, of two as near the one of greater magnitude."""
    return np.where(np.isnan(weights), np.nan, ((weights.view(np.uint32) + 0x8000) & 0xFFFF0000).view(np.float32))


def test_every_number_is_read_as_it_was_written() -> None:
    spec = TensorSpec((64, 65))
    tensors = [
        StateTensor("w", spec.with_dtype(DType.INT16), Kind.PARAMETER, padding=3),
        StateTensor("w/compute", spec.with_dtype(DType.BF16), Kind.COPY, padding=3),
    ]
    state, values = State(TorchDevice("cpu", 1), tensors), numbers(61 * 65).reshape(61, 65)
    state.write("w", values)
    assert state.spec("w") == TensorSpec((61, 65)) and state.nbytes(Kind.PARAMETER) == 2 * spec.size
    quiet = np.where(np.isnan(values), np.float32(np.nan), values)
    assert np.array_equal(state.read("w").view(np.uint32), quiet.view(np.uint32))
    np.testing.assert_array_equal(state.read("w/compute"), nearest(values))


OPTIMIZERS = {
    "adamw": AdamWConfig(weight_decay=0.1),
    "lion": LionConfig(weight_decay=0.1),
    "sgd": SGDConfig(momentum=0.9),
}


def updated(optimizer: str, engine: str, low_bits: bool, lr: float) -> State:
    """The state after three updates."""
    config = replace(OPTIMIZERS[optimizer], clip_norm=None)
    run = Updates(Vector(1000, DType.BF16), build_optimizer(config), engine, low_bits=low_bits)
    run.state.write("weight", numbers(1000))
    for step in (1, 2, 3):
        run.advance(step, lr=lr)
    return run.state


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_compiled_update_keeps_every_bit_of_weights_and_moments(optimizer: str) -> None:
    require_compiler()
    whole, split = (updated(optimizer, "traced", low_bits, 0.01) for low_bits in (False, True))
    assert split.tensor("weight").low_bits and not np.array_equal(whole.read("weight"), numbers(1000))
    for name in whole.names(Kind.PARAMETER, Kind.OPTIMIZER):
        np.testing.assert_array_equal(split.read(name), whole.read(name), err_msg=name)
    np.testing.assert_array_equal(split.read("weight/compute"), nearest(whole.read("weight")))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("engine", ["static", "traced"])
def test_weights_that_stay_are_put_together_and_taken_apart_again(engine: str, optimizer: str) -> None:
    """Also by rows of torch, for rules that have no C++."""
    state = updated(optimizer, engine, True, 0.0)
    np.testing.assert_array_equal(state.read("weight"), numbers(1000))
    np.testing.assert_array_equal(state.read("weight/compute"), nearest(numbers(1000)))


def test_a_compiled_step_takes_them_where_only_updates_read_weights() -> None:
    for name, ema, width in (("traced", None, 2), ("static", None, 4), ("traced", 0.9, 4)):
        model = GPT(GPTConfig(layers=1, heads=2, width=16, context=8, vocabulary=11), DType.BF16)
        device, train = planned(DeviceConfig(name="cpu", threads=1)), TrainConfig(batch_size=2, ema=ema)
        session = build_session(model, device, train, AdamWConfig(), GuardConfig(), EngineConfig(name=name))
        tensor = session.state.tensor("blocks.0.attention.qkv.weight")
        assert tensor.spec.dtype.itemsize == width and tensor.host_spec.dtype is DType.FP32
