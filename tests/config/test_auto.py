"""engine=auto and precision=auto: what they stand for, what a run records of it, and what a resume keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ttrain.cli import main
from ttrain.config.compose import load
from ttrain.core import processor
from ttrain.device.torch import info as torch_info
from ttrain.device.torch.info import Torch
from ttrain.device.ttnn.info import Tenstorrent
from ttrain.tasks.training.notices import notices
from ttrain.train.runs.run_directory import read_config

SMALL = [
    "model=mlp", "model.width=8", "model.layers=1", "data=regression", "device=cpu", "train.steps=2",
    "train.eval_every=null", "train.log_every=1",
]  # fmt: skip
NO_COMPILER = "no-such-compiler"


@pytest.fixture(autouse=True)
def real_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests take the static engine, which needs no compiler."""
    for info in (Torch, Tenstorrent):
        choose: Any = info.best_engine
        monkeypatch.setattr(info, "best_engine", choose.__wrapped__)


@pytest.mark.parametrize(
    ("device", "compiler", "gpu", "engine"),
    [
        ("cpu", True, False, "traced"),
        ("cpu", False, False, "static"),
        ("auto", True, False, "traced"),
        ("auto", False, False, "static"),
        ("auto", False, True, "traced"),
        ("cuda", False, True, "traced"),
        ("n150", False, False, "traced"),
        ("null", True, False, "static"),
    ],
)
def test_the_engine_is_traced_where_the_device_compiles_or_captures(
    monkeypatch: pytest.MonkeyPatch, device: str, compiler: bool, gpu: bool, engine: str
) -> None:
    if not compiler:
        monkeypatch.setenv("CXX", NO_COMPILER)
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    assert load([f"device={device}"]).engine.name == engine
    assert load([f"device={device}", "engine=dynamic"]).engine.name == "dynamic"


@pytest.mark.parametrize(
    ("device", "extensions", "precision"),
    [
        ("cpu", ["avx2", "avx512f"], "fp32"),
        ("cpu", ["avx2", "avx512f", "avx512_bf16"], "bf16"),
        ("cpu", ["amx_tile", "amx_bf16"], "bf16"),
        ("cpu", ["asimd", "bf16"], "bf16"),
        ("n150", ["avx2"], "bf16"),
        ("null", ["avx512_bf16"], "fp32"),
    ],
)
def test_the_precision_is_bf16_where_the_device_multiplies_in_it(
    monkeypatch: pytest.MonkeyPatch, device: str, extensions: list[str], precision: str
) -> None:
    monkeypatch.setattr(torch_info, "vector_extensions", lambda: extensions)
    assert load([f"device={device}", "precision=auto"]).precision.name == precision
    assert load([f"device={device}"]).precision.name == "fp32"


def test_a_run_records_what_was_taken_and_a_resume_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    monkeypatch.setattr(processor, "_flags", lambda: {"avx2"})
    with monkeypatch.context() as patch:
        patch.setenv("CXX", NO_COMPILER)
        assert main([*SMALL, "precision=auto", f"run.dir={run}"]) == 0
    said = capsys.readouterr().err
    assert "engine static (auto: there is no C++ compiler" in said
    assert "fp32 (auto: the processor has no bf16 instructions" in said
    assert "WARNING: precision" not in said
    monkeypatch.setattr(processor, "_flags", lambda: {"avx512_bf16"})
    assert main(["resume=auto", f"run.dir={run}", "train.steps=3"]) == 0
    said = capsys.readouterr().err
    assert "engine static, fp32." in said and "WARNING: precision" not in said
    assert [read_config(run)[part]["name"] for part in ("engine", "precision")] == ["static", "fp32"]


def test_a_resume_without_the_compiler_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main([*SMALL, f"run.dir={run}"]) == 0
    monkeypatch.setenv("CXX", NO_COMPILER)
    assert main(["resume=auto", f"run.dir={run}", "train.steps=3"]) == 2
    assert "use engine=static" in capsys.readouterr().err
    assert main(["resume=auto", f"run.dir={run}", "train.steps=3", "engine=auto"]) == 0
    assert "engine.name: traced -> static" in capsys.readouterr().err


def test_a_precision_that_does_not_pay_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_info, "vector_extensions", lambda: ["avx2"])
    told = {name: list(notices(load(["device=cpu", f"precision={name}"]))) for name in ("bf16", "fp32", "auto")}
    found = [name for name in told if any("precision=auto takes what is faster" in each for each in told[name])]
    assert found == ["bf16"]
