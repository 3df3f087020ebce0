"""Contenders that do the same work agree; one that does any other work is found out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.bench.pretend import ONE_THREAD, SMALL, case, small_sizes  # noqa: F401 - a fixture
from ttrain.bench import workload
from ttrain.bench.baselines import PyTorchContender
from ttrain.bench.child import make_contender
from ttrain.bench.contender import STEPS, Contender, loss_difference, problem
from ttrain.bench.workload import NAMED, Case, work_of
from ttrain.device.torch.device import TorchDevice
from ttrain.engine.settings import EngineConfig
from ttrain.graph import Kind

pytestmark = pytest.mark.usefixtures("small_sizes")


def losses_of(contender: Contender) -> list[float]:
    contender.build()
    return [contender.loss(contender._next()) for _ in range(STEPS)]


def compared(given: Case, contender: Contender, folder: Path) -> tuple[float, str | None]:
    """The difference of losses from eager PyTorch, and the problem if there is one."""
    reference = PyTorchContender("eager", given, ONE_THREAD)
    expected, losses = losses_of(reference), losses_of(contender)
    reference.write_weights(str(folder / "weights"))
    loss, way = loss_difference(losses, expected), contender.weight_difference(str(folder / "weights"))
    return loss, problem(given.precision, loss, way, "eager")


@pytest.mark.parametrize(
    ("size", "engine", "precision", "resident"),
    [
        ("gpt", "dynamic", "fp32", False), ("gpt", "static", "bf16", True), ("4x8", "static", "fp32", True),
        ("4x8", "dynamic", "bf16", False), ("gpt-bias", "static", "bf16_true", False),
    ],
)  # fmt: skip
def test_our_engines_do_what_plain_pytorch_does(
    size: str, engine: str, precision: str, resident: bool, tmp_path: Path
) -> None:
    given = case(size, precision, resident=resident)
    loss, wrong = compared(given, make_contender(engine, given, ONE_THREAD, EngineConfig()), tmp_path)
    assert wrong is None and loss < {"fp32": 1e-6, "bf16": 2e-3, "bf16_true": 1e-2}[precision]


@pytest.mark.parametrize("size", ["llama", "llama-lora"])
def test_our_llama_does_what_that_of_transformers_does(size: str, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="the package peft is not installed")
    given = case(size, "bf16")
    loss, wrong = compared(given, make_contender("static", given, ONE_THREAD, EngineConfig()), tmp_path)
    assert wrong is None and loss < 2e-3
    assert [path for path, _ in given.first_weights(True)][-1].endswith("lora.b.weight") == (size == "llama-lora")


def test_weights_kept_in_bf16_have_no_other_copy() -> None:
    """So precision=bf16_true trains; weights in fp32 would take twice the bytes."""
    ours: Any
    theirs: Any
    ours, theirs = (make_contender(name, case("4x8", "bf16_true"), ONE_THREAD, EngineConfig()) for name in
                    ("static", "eager"))  # fmt: skip
    ours.build(), theirs.build()
    numbers = 2 * (8 * 8 + 8)
    assert (ours.state.nbytes(Kind.PARAMETER), ours.state.nbytes(Kind.COPY)) == (2 * numbers, 0)
    assert sum(parameter.nbytes for parameter in theirs._parameters.values()) == 2 * numbers


def test_a_batch_that_stays_is_uploaded_once_and_is_the_same_for_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, upload, uploads = {}, TorchDevice.upload, []
    monkeypatch.setattr(TorchDevice, "upload", lambda *of: uploads.append(of[1]) or upload(*of))
    for resident in (False, True):
        contender: Any = make_contender("static", case("4x8", resident=resident), ONE_THREAD, EngineConfig())
        contender.build()
        uploads.clear()
        losses = [contender.loss(contender._next()) for _ in range(STEPS)]
        counts[resident] = len(uploads) / len(losses)
    assert losses == sorted(losses, reverse=True)  # plain SGD on one batch falls at every step
    for name, values in case("4x8").batches[0].items():
        assert np.array_equal(contender.state.read(f"data/{name}"), values)
    assert counts[False] - counts[True] == 2  # inputs and targets


_ADAM = SMALL["gpt"].optimizer
OTHER: dict[str, Any] = {
    "no clipping": replace(_ADAM, clip_norm=None),
    "no decay": replace(_ADAM, weight_decay=0.0),
    "lr": replace(_ADAM, lr=1.01e-3),
    "betas": replace(_ADAM, betas=[0.9, 0.95]),
}


@pytest.mark.parametrize("other", [*OTHER, "batches"])
def test_other_work_is_found_out(other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(workload.NAMED, "other", replace(SMALL["gpt"], optimizer=OTHER.get(other, _ADAM)))
    changed = Case("other", "fp32", 4 if other == "batches" else 3)
    assert compared(case(), PyTorchContender("eager", changed, ONE_THREAD), tmp_path)[1] is not None


def test_problems_are_differences_beyond_their_bounds() -> None:
    assert problem("fp32", 0.0, 0.0, "eager") is None
    assert "losses" in str(problem("fp32", 0.1, 0.0, "eager"))
    assert "weight updates" in str(problem("fp32", 0.0, 0.5, "eager"))
    assert problem("bf16", loss_difference([float("nan")], [1.0]), 0.0, "eager") is not None
    assert problem("bf16", 0.0, float("nan"), "eager") is not None


def test_sizes_are_those_that_are_named() -> None:
    parameters = {size: Case(size, "fp32", 0).model.parameter_count for size in NAMED}
    assert parameters["char"] == 65 * 128 + 64 * 128 + 4 * (12 * 128**2 + 2 * 128) + 128
    assert parameters["gpt2"] == 124_439_808 - (1024 - 256) * 768  # GPT-2's own count, with 256 positions
    assert parameters["smollm2"] == 134_515_008
    adapters = 30 * 8 * sum(sides for sides in (2 * 1152, 2 * 768, 3 * 2112))  # q and o, k and v, gate, up and down
    assert parameters["smollm2-lora"] == 134_515_008 + adapters
    shapes = [work_of(size) for size in ("tiny", "256x128", "1024x512x7")]
    assert [(work.rows, work.model.width, work.model.layers) for work in shapes] == [  # type: ignore[union-attr]
        (32, 64, 2), (256, 128, 2), (1024, 512, 7),
    ]  # fmt: skip
