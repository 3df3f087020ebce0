"""Optimizers on rounded state, on ttnn's reference functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("ttnn", reason="the package ttnn is not installed")
import torch

from tests.ttnn.runs import adamw, golden, gpt, mlp, run, same, sgd
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.ttnn.kernels import update as rows
from ttrain.device.ttnn.kernels.elementwise import key_of
from ttrain.device.ttnn.tensors.store import Store, TileLayout
from ttrain.engine.state import State
from ttrain.graph import Kind
from ttrain.train.steps.step_graph import StepGraph

OPTIMIZERS: dict[str, Any] = {"adamw": adamw, "sgd": lambda **given: sgd(momentum=0.9, nesterov=True, **given)}
SMALL = {"layers": 1, "heads": 1, "width": 32}
MODELS: dict[str, Any] = {
    "stacks": lambda: gpt(**SMALL),
    "no stacks": lambda: gpt(vocabulary=50, width=40, context=20, layers=1),
}


def pure(model: Any) -> Any:
    for parameter in model.parameters().values():
        parameter.master = DType.BF16
    return model


def is_bf16(array: np.ndarray) -> bool:
    return not (array.view(np.uint32) & 0xFFFF).any()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_engines_are_bit_equal_and_state_is_bf16(model: str, optimizer: str) -> None:
    make = OPTIMIZERS[optimizer]
    outcomes = [
        run(MODELS[model](), make(state_dtype="bf16"), golden(), engine=engine, steps=2)
        for engine in ("dynamic", "static", "traced")
    ]
    assert same(outcomes[0], outcomes[1]) and same(outcomes[0], outcomes[2])
    slots = {name: array for name, array in outcomes[0].state.items() if "/" in name}
    assert slots and all(is_bf16(array) and array.any() for array in slots.values())
    weights = [array for name, array in outcomes[0].state.items() if "/" not in name and "weight" in name]
    assert not any(is_bf16(array) for array in weights)


@pytest.mark.parametrize(("optimizer", "stochastic"), [("adamw", True), ("sgd", True), ("adamw", False)])
def test_pure_bf16_trains_alike(optimizer: str, stochastic: bool) -> None:
    """A fused update takes its rates as numbers, so a captured step that rounds to nearest computes it otherwise."""
    make = OPTIMIZERS[optimizer]
    master = run(gpt(DType.BF16, **SMALL), make(), golden())
    static, traced = (
        run(pure(gpt(DType.BF16, **SMALL)), make(stochastic_rounding=stochastic), golden(), engine=engine)
        for engine in ("static", "traced")
    )
    np.testing.assert_allclose([static.losses, traced.losses], [master.losses] * 2, rtol=2e-2)
    assert same(static, traced) or not stochastic
    assert all(is_bf16(array) for array in traced.state.values())


def test_pieces_of_stacks_are_rounded_like_whole_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Piece by piece each number goes to one of its two neighbours, as it does in one go."""
    model = {"width": 128, "layers": 3}
    whole = run(mlp(**model), adamw(state_dtype="bf16"), golden(), steps=1)
    monkeypatch.setattr(rows, "PIECE", 12 * 32 * 32)
    pieces = run(mlp(**model), adamw(state_dtype="bf16"), golden(), steps=1)
    for name, array in whole.state.items():
        if "/" in name:
            assert is_bf16(pieces.state[name])
            np.testing.assert_allclose(pieces.state[name], array, rtol=2**-7)
        else:
            np.testing.assert_array_equal(pieces.state[name], array)


@pytest.mark.parametrize("shape", [(12 * 4 * 32, 32), (25, 7), (3, 33, 5)])
def test_rounding_is_unbiased(shape: tuple[int, ...]) -> None:
    """The right share of many equal elements is rounded up."""
    c = golden().context
    seed = golden().place(golden().allocate_arena(8, "x"), 0, TensorSpec((), DType.INT64))
    ups, count = 0, 0
    layout = TileLayout(shape)
    for number in range(1, 1 + max(30000 // int(np.prod(shape)), 1)):
        seed.upload(np.asarray(number, np.int64))
        rounding = rows.rounding_of(c, (0,), number, seed)
        value = 1 + 0.3 * 2**-7
        slot = type("Slot", (), {"t": c.tt.from_torch(torch.full(shape, value), c.tt.float32, c.tt.TILE_LAYOUT)})()
        rounding(layout, 0)(0, slot)
        result = c.tt.to_torch(slot.t)
        assert set(result.unique().tolist()) <= {1.0, 1 + 2**-7}
        ups, count = ups + int((result > 1).sum()), count + result.numel()
    assert abs(ups / count - 0.3) < 5 * np.sqrt(0.21 / count)


def test_chips_of_a_mesh_round_alike_drop_otherwise_and_take_one_number_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas stay equal. An input may have one number for each chip, such as an id."""
    device: Any = golden()
    seed = device.place(device.allocate_arena(8, "x"), 0, TensorSpec((), DType.INT64))
    seed.upload(np.asarray(5, np.int64))
    written: list[np.ndarray] = []
    monkeypatch.setattr(Store, "filled", lambda self, layout, values: written.append(values().ravel()))
    device.store.chips = 2
    for stream, per_chip in ((1, True), (2, False)):
        key_of(device.context, seed, stream, per_chip)
    mask, rounding = written
    assert len(mask) == len(rounding) == 2
    assert mask[0] != mask[1] and rounding[0] == rounding[1]
    ids = device.place(device.allocate_arena(8, "x"), 0, TensorSpec((1, 1), DType.INT64))
    ids.upload(np.asarray([[3], [4]]))
    ids.in_layout(TileLayout((1, 1), "int32"))
    assert written[-1].tolist() == [3, 4]


def test_a_run_holds_the_matrices_of_its_copies_in_block_floats() -> None:
    device = golden(weights="bf8")
    state = State(device, StepGraph(gpt(DType.BF16), adamw(), 2).state_tensors())
    for name in state.names(Kind.COPY, Kind.PARAMETER):
        block = state.tensor(name).kind is Kind.COPY and state.spec(name).rank == 2
        assert (state.placed(name)[2].layout.dtype == "bfloat8_b") is block, name
    assert any(state.spec(name).rank == 2 for name in state.names(Kind.COPY))
