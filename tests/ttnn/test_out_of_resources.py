"""Scarce resources are named with the keys that help, from ttnn's messages and from runs on mocked boards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from ttrain.core.errors import EXIT_USER, ConfigError
from ttrain.device.info import Failed
from ttrain.device.ttnn.problems import diagnose
from ttrain.device.ttnn.runtime.environment import opening_failure
from ttrain.device.ttnn.settings import TenstorrentConfig
from ttrain.models.settings import GPTConfig, MLPConfig
from ttrain.optim.settings import AdamWConfig, OptimizerConfig, SGDConfig
from ttrain.train.forecast.limits import shrinking_keys
from ttrain.train.settings import TrainConfig

DRAM = (
    "Out of Memory: Not enough space to allocate 134217728 B DRAM buffer across 12 banks, where each bank needs to "
    "store 11186176 B, but bank size is 1071292352 B (allocated: 1 B, free: {free} B, largest free block: 2 B)."
)
NEARLY, FAR = DRAM.format(free=8605632), DRAM.format(free=605632)  # 29 MiB and 121 MiB are lacking
L1 = "Statically allocated dataflow buffers on core range grow to 4300128 B which is beyond max L1 size of 1499136 B"
NORM = "LayerNorm streaming circular buffers require 118784 bytes, but only 59006 bytes of the allocator's L1 span are"
TRACE = "Creating trace buffers of size 237371392B on MeshDevice 0, but only 235929600B is allocated for trace region."
GRID = "WorkUnitSpec 'x' targets node (0,7), which is out of bounds. The compute worker grid on this device is 8x7."
CHIPS = "Requested mesh shape MeshShape([1, 2]) requires 2 devices, but only 1 devices are available in the system"


def fatal(text: str) -> RuntimeError:
    return RuntimeError(f"TT_FATAL @ /x.cpp:1: cond\ninfo:\n{text}\nbacktrace:\n --- a")


def a_run(
    engine: str = "static", precision: str = "bf16", sizes: dict[str, int] | None = None,
    optimizer: OptimizerConfig | None = None, model: Any = None, **device: Any,
) -> tuple[TenstorrentConfig, Failed]:  # fmt: skip
    board, train, model = TenstorrentConfig(name="n300", **device), TrainConfig(batch_size=8), model or GPTConfig()
    keys = shrinking_keys(train, model, precision, engine, optimizer or AdamWConfig())
    has = hasattr(model, "vocabulary")
    return board, Failed(precision, engine, train.batch_size, keys, has, **(sizes or {}))


STATE_ALONE = {"state": 20 << 30, "memory": 12 << 30}
MOMENTS = "optimizer.state_dtype=bf16"


@pytest.mark.parametrize(
    ("said", "run", "cause", "keys", "absent"),
    [
        (NEARLY, a_run(), "DRAM", ["device.trace_region_mb=0", "train.gradient_accumulation=2", "model.recompute=block",
                                   "precision=bf16_true", "device.host_resident=", "device.mesh=[1,2]", MOMENTS], []),
        (FAR, a_run("dynamic"), "DRAM", ["engine=static"], ["device.trace_region_mb"]),
        (FAR, a_run(precision="fp32", sizes=STATE_ALONE), "DRAM", ["precision=bf16"],
         ["train.gradient_accumulation", "device.trace_region_mb", "model.recompute"]),
        (FAR, a_run(model=MLPConfig()), "DRAM", [], ["device.host_resident"]),
        (FAR, a_run(optimizer=AdamWConfig(state_dtype="bf16")), "DRAM", [], [MOMENTS]),
        (FAR, a_run(optimizer=SGDConfig()), "DRAM", [], [MOMENTS]),
        (FAR, a_run(optimizer=SGDConfig(momentum=0.9)), "DRAM", [MOMENTS], []),
        (L1, a_run(l1_small_kb=64, core_grid=[2, 2]), "L1", ["device.l1_small_kb=0", "device.core_grid=null"], []),
        (NORM, a_run(), "L1", ["device.fused_kernels=false", "train.gradient_accumulation=2"], []),
        (TRACE, a_run("traced"), "trace region", ["device.trace_region_mb=227", "engine=static"], []),
        (GRID, a_run(dispatch="eth"), "dispatch", ["device.dispatch=worker"], []),
        (GRID, a_run(core_grid=[8, 8]), "core grid", ["device.core_grid=null"], []),
        (CHIPS, a_run(mesh=[1, 2]), "chips", ["device.mesh=[1,1]"], []),
    ],
)  # fmt: skip
def test_every_cause_has_its_keys(said: str, run: Any, cause: str, keys: list[str], absent: list[str]) -> None:
    board, failed = run
    found = diagnose(board, fatal(said), failed)
    assert found is not None
    assert (found.cause, found.exit_code) == (cause, EXIT_USER)
    assert [key for key in keys if not any(given.startswith(key) for given in found.keys)] == []
    assert [key for key in absent if any(given.startswith(key) for given in found.keys)] == []
    assert "backtrace" not in str(found) and "\n" not in str(found)


def test_other_errors_are_not_out_of_resources() -> None:
    board, failed = a_run()
    assert diagnose(board, fatal("Inputs to matmul must be tilized"), failed) is None
    assert "device.l1_small_kb=0" in opening_failure(fatal("Reserved size must be less than bank size"))
    assert "device.mesh=[1,1]" in opening_failure(fatal(CHIPS))


def test_what_this_chip_lacks_is_told_when_it_is_opened() -> None:
    pytest.importorskip("ttnn", reason="the package ttnn is not installed")
    from tests.ttnn.doubles.golden import GoldenMesh

    with pytest.raises(ConfigError, match=r"device.core_grid=\[9,8\]: the chip has 8 rows and 8 columns"):
        GoldenMesh(config=TenstorrentConfig(core_grid=[9, 8]))


REAL: dict[str, tuple[list[str], str, str]] = {
    "DRAM": (["model.width=40000", "model.layers=2"], "does not fit: DRAM", "precision=bf16"),
    "L1": (["model=nano-gpt", "model.layers=1", "model.context=32", "precision=bf16", "device.l1_small_kb=1350"],
           "does not fit: L1", "device.l1_small_kb=0"),
    "dispatch": (["device=n300", "device.dispatch=eth"], "is refused by a fault of ttnn", "device.dispatch=worker"),
}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_on_a_mocked_board(name: str, kernels: str, tmp_path: Path) -> None:
    pytest.importorskip("ttnn", reason="the package ttnn is not installed")
    overrides, said, key = REAL[name]
    run = tmp_path / "run"
    given = ["device=n150", "model=mlp", "device.mode=mock", f"run.dir={run}", *overrides]
    done = forked.run("ttrain", *given, TTRAIN_CACHE=kernels, OMP_NUM_THREADS="1")
    text = done.stdout + done.stderr
    assert done.returncode == EXIT_USER, text
    assert said in text and key in text and "Traceback" not in text
    summary = json.loads((run / "summary.json").read_text("utf-8"))
    assert (summary["accepted"], summary["out_of"]) == (False, name)
    assert any(given.startswith(key) for given in summary["keys"])
