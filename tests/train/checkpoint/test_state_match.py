"""Checkpoints of bf16 state, and of parameters that are frozen on one side only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.models.session import open_cpu
from ttrain.core.errors import CheckpointError
from ttrain.core.spec import DType, TensorSpec
from ttrain.engine.state import State, StateTensor
from ttrain.graph import Kind
from ttrain.train.checkpoint.checkpoint import match, read_checkpoint
from ttrain.train.checkpoint.save import CheckpointContent, host_copy, save_checkpoint

SHAPES = {"up.weight": (7, 3), "up.bias": (7,)}
KINDS = {"": Kind.PARAMETER, "/gradient": Kind.GRADIENT, "/moment": Kind.OPTIMIZER}


def state(weights: DType, moments: DType, frozen: tuple[str, ...] = ()) -> State:
    dtypes = {"": weights, "/gradient": weights, "/moment": moments}
    named = [(path, slot) for slot in KINDS for path in SHAPES if not (slot and path in frozen)]
    specs = {f"{path}{slot}": (TensorSpec(SHAPES[path], dtypes[slot]), KINDS[slot]) for path, slot in named}
    return State(open_cpu(), [StateTensor(name, *spec) for name, spec in specs.items()])


def filled(made: State, seed: int = 0) -> State:
    generator = np.random.default_rng(seed)
    for name in made.names():
        made.write(name, generator.standard_normal(made.spec(name).shape).astype(np.float32))
    return made


def bf16(array: np.ndarray) -> np.ndarray:
    return torch.from_numpy(array).bfloat16().float().numpy()


def values(made: State) -> dict[str, np.ndarray]:
    return {name: made.read(name) for name in made.names(Kind.PARAMETER, Kind.OPTIMIZER)}


@pytest.mark.parametrize("copied", [False, True], ids=["at once", "from a host copy"])
@pytest.mark.parametrize("weights", [DType.FP32, DType.BF16])
def test_a_checkpoint_holds_the_dtypes_of_the_state(tmp_path: Path, weights: DType, copied: bool) -> None:
    from safetensors import safe_open

    source = filled(state(weights, DType.BF16))
    saved = save_checkpoint(tmp_path, host_copy(source) if copied else source, CheckpointContent(3, {}))
    stored, size = {}, 0
    for file in saved.path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as shard:
            stored |= {name: shard.get_slice(name).get_dtype() for name in shard.keys()}  # noqa: SIM118
        size += file.stat().st_size
    expected = {"": "F32" if weights is DType.FP32 else "BF16", "/moment": "BF16"}
    assert stored == {f"{path}{slot}": dtype for slot, dtype in expected.items() for path in SHAPES}
    tensors = sum(source.spec(name).nbytes for name in values(source))
    assert tensors < size < tensors + 2000
    again = state(weights, DType.BF16)
    assert read_checkpoint(saved.path).load(again) == ()
    assert all(np.array_equal(array, values(again)[name]) for name, array in values(source).items())
    assert all(np.array_equal(array, source.read(name)) for name, array in saved.weights().items())


def test_numbers_stay_in_a_wider_dtype_and_are_rounded_to_nearest_in_a_narrower_one(tmp_path: Path) -> None:
    narrow, wide = filled(state(DType.BF16, DType.BF16), 1), filled(state(DType.FP32, DType.FP32), 2)
    files = [
        save_checkpoint(tmp_path / str(i), made, CheckpointContent(1, {})) for i, made in enumerate((narrow, wide))
    ]
    into_wide, into_narrow = state(DType.FP32, DType.FP32), state(DType.BF16, DType.BF16)
    files[0].load(into_wide)
    files[1].load(into_narrow)
    for name, array in values(narrow).items():
        assert np.array_equal(into_wide.read(name), array)
        assert np.array_equal(into_narrow.read(name), bf16(wide.read(name)))


def config(**optimizer: Any) -> dict[str, Any]:
    return {"optimizer": optimizer}


def test_state_of_parameters_that_were_frozen_starts_at_zero_also_over_old_values(tmp_path: Path) -> None:
    source = filled(state(DType.FP32, DType.FP32, frozen=("up.bias",)))
    saved = save_checkpoint(tmp_path, source, CheckpointContent(1, config(freeze=["up.bias"])))
    target = filled(state(DType.FP32, DType.FP32), 5)
    (note,) = saved.load(target)
    assert note.startswith("Frozen until now, so their optimizer state starts from zero: up.bias.")
    assert not target.read("up.bias/moment").any()
    assert np.array_equal(target.read("up.weight/moment"), source.read("up.weight/moment"))


@pytest.mark.parametrize(
    "stored",
    [{}, config(), config(freeze=["up.weight"]), config(freeze="up"), {"optimizer": ["x"]}, config(freeze=[3])],
)
def test_what_is_missing_for_no_known_reason_is_refused(tmp_path: Path, stored: dict[str, Any]) -> None:
    """Whatever a stranger's config holds."""
    source = filled(state(DType.FP32, DType.FP32, frozen=("up.bias",)))
    saved = save_checkpoint(tmp_path, source, CheckpointContent(1, stored))
    target = filled(state(DType.FP32, DType.FP32), 5)
    before = values(target)
    with pytest.raises(CheckpointError, match="it lacks up.bias/moment"):
        saved.load(target)
    assert all(np.array_equal(array, before[name]) for name, array in values(target).items())


def test_tensors_of_another_optimizer_are_refused() -> None:
    """Not frozen, only unknown: state of parameters that are trained."""
    made = state(DType.FP32, DType.FP32)
    wanted = {name: made.spec(name).shape for name in values(made)}
    for name, frozen in (("up.bias/second", []), ("down.bias", ["down"])):
        with pytest.raises(CheckpointError, match=f"^it also holds {name}.$"):
            match({**wanted, name: (7,)}, wanted, made, config(freeze=frozen))
