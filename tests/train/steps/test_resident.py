"""Examples that lie on the device: the same numbers as of batches that are handed over, to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ttrain.cli import main
from ttrain.config import build
from ttrain.core.errors import UserError
from ttrain.core.spec import DType, TensorSpec
from ttrain.data.batches import Sizes
from ttrain.data.regression import open_regression
from ttrain.data.settings import RegressionConfig
from ttrain.device.settings import DeviceConfig
from ttrain.models.base import prepare_plain
from ttrain.models.mlp import MLP
from ttrain.models.settings import MLPConfig
from ttrain.train.steps.resident import Resident, choose_resident

SIZES = Sizes(inputs=8, outputs=8)
SMALL = ["model=mlp", "model.width=8", "data=regression", "data.examples=100", "train.batch_size=6", "device=cpu"]


def losses(folder: Path, *overrides: str) -> list[dict[str, Any]]:
    steps = ["train.steps=4", "train.log_every=1", "train.eval_every=2", f"run.dir={folder}"]
    assert main([*SMALL, *steps, *overrides]) == 0
    lines = map(json.loads, (folder / "metrics.jsonl").read_text("utf-8").splitlines())
    return [{key: value for key, value in line.items() if "loss" in key or key == "grad_norm"} for line in lines]


@pytest.mark.parametrize("more", [["train.gradient_accumulation=2"], ["precision=bf16", "data.order=epoch"]])
def test_a_run_is_the_same_to_the_bit(more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handed = losses(tmp_path / "host", *more, "data.resident=host")
    written: list[Any] = []
    write = Resident.write
    monkeypatch.setattr(Resident, "write", lambda self, *given: (written.append(self), write(self, *given)))
    assert losses(tmp_path / "device", *more, "data.resident=device") == handed
    shapes = [{name: spec.shape for name, spec in resident.arrays.items()} for resident in written]
    assert len(handed) > 4 and shapes == [{"inputs": (90, 8), "targets": (90, 8)}]


def test_fp32_lies_in_parts_on_a_device_that_looks_up_bf16(tmp_path: Path) -> None:
    arrays = {"inputs": TensorSpec((64, 32), DType.BF16), "targets": TensorSpec((64, 32))}
    resident = Resident(arrays, in_parts=True)
    assert {spec.dtype for spec in resident.specs.values()} == {DType.BF16} and len(resident.specs) == 1 + 3
    written: dict[str, np.ndarray] = {}

    class State:
        def write_rows(self, name: str, start: int, array: np.ndarray) -> None:
            assert start == 0
            written[name] = array

    random = np.random.default_rng(0)
    whole = (random.standard_normal((64, 32)) * 10.0 ** random.integers(-20, 20, (64, 32))).astype(np.float32)
    resident_state: Any = State()
    resident.write(resident_state, lambda start, stop: {"inputs": whole[start:stop], "targets": whole[start:stop]})
    parts = [written[f"data/targets/{part}"] for part in range(3)]
    assert not any((part.view(np.uint32) & 0xFFFF).any() for part in parts)  # each is a bf16 number
    assert np.array_equal(parts[0] + parts[1] + parts[2], whole)


def test_where_the_data_lies() -> None:
    model = MLP(MLPConfig(layers=2, width=8))

    def found(device: str, **data: Any) -> Resident | None:
        config, planned = RegressionConfig(**data), build.planned_device(DeviceConfig(name=device))
        return choose_resident(config, 6, model, planned, open_regression(config, SIZES))

    assert found("cuda") == Resident(dict.fromkeys(("inputs", "targets"), TensorSpec((7373, 8))))
    assert found("cpu") is None and found("null") is None and found("cuda", resident="host") is None
    assert (
        found("cuda", examples=5_000_000) is None and found("cuda", examples=5_000_000, resident="device") is not None
    )
    assert found("cpu", resident="device") is not None


def test_what_can_t_lie_there_is_refused() -> None:
    config, model = RegressionConfig(resident="device"), MLP(MLPConfig(width=8))
    data = open_regression(config, SIZES)
    mesh: Any = type("Mesh", (), {"name": "t3000", "chips": 8, "narrow_lookups": True})()
    with pytest.raises(UserError, match="chips of a mesh share every batch"):
        choose_resident(config, 1, model, mesh, data)
    device = build.planned_device(DeviceConfig(name="cpu"))
    with pytest.raises(UserError, match="data=regression has no arrays that indices could go into"):
        choose_resident(config, 1, model, device, object())
    preparing: Any = model
    preparing.prepare = lambda batch: prepare_plain(batch)
    with pytest.raises(UserError, match="data.resident=device: model=mlp prepares every batch.* Give auto or host"):
        choose_resident(config, 1, preparing, device, data)
