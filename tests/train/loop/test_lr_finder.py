"""task=lr_finder: what a range test finds in losses with known answers, and the task on whole configs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ttrain
from tests.conftest import Told
from ttrain.cli import main
from ttrain.config import build
from ttrain.config.schema import LrFinderConfig
from ttrain.tasks.training.lr_finder import find, has_diverged, rate_of

MLP = ["task=lr_finder", "model=mlp", "data=regression", "device=cpu", "device.threads=1", "lr_finder.out=out"]


def losses_of(rates: Any, steep: float, end: float, noise: float) -> Any:
    """A fall from 4 to 2 whose middle is at `steep`, and a rise without end from `end` on."""
    log = np.log10(rates)
    fall = 4 - 2 / (1 + np.exp(-4 * (log - math.log10(steep))))
    rise = np.where(log > math.log10(end), np.expm1(np.minimum(4 * (log - math.log10(end)), 80)), 0)
    return fall + rise + noise * np.random.default_rng(0).standard_normal(len(log))


@pytest.mark.parametrize(("steep", "end"), [(1e-4, 1e-2), (1e-2, 1.0)])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_rates_of_a_curve_with_known_answers(steep: float, end: float, noise: float) -> None:
    settings = LrFinderConfig(low=1e-6, high=10.0, steps=200)
    rates = [rate_of(settings, step) for step in range(1, 201)]
    assert (rates[0], rates[-1]) == pytest.approx((1e-6, 10.0))
    losses = losses_of(rates, steep, end, noise)
    stopped = next(n for n in range(1, 201) if has_diverged(losses[:n].tolist(), settings))
    assert end < rates[stopped - 1] < 6 * end
    found = find(rates[:stopped], losses[:stopped].tolist())
    assert found["steepest"] == pytest.approx(steep, rel=1.0 if noise else 0.1)
    assert steep < found["lowest"] <= found["last"] and end / 1.5 < found["last"] < 3 * end
    assert found["suggested"] == pytest.approx(math.sqrt(found["steepest"] * found["lowest"]))


def test_noise_alone_is_no_fall_and_no_divergence() -> None:
    settings = LrFinderConfig(steps=200)
    rates = [rate_of(settings, step) for step in range(1, 201)]
    for seed in range(20):
        losses = (1 + 0.2 * np.random.default_rng(seed).standard_normal(200)).tolist()
        assert not any(has_diverged(losses[:n], settings) for n in range(1, 201))
        assert find(rates, losses)["steepest"] is None


@pytest.mark.parametrize(
    "more", [[], ["engine=traced", "optimizer=sgd", "train.gradient_accumulation=2", "parallel.slices=4"]]
)
def test_the_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, more: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    ramp = ["lr_finder.steps=120", "lr_finder.low=1e-5", "lr_finder.high=1e4"]
    assert main([*MLP, *ramp, "train.batch_size=64", *more]) == 0
    results = json.loads(Path("out/results.json").read_text())
    assert results["diverged"] and 5 < len(results["rates"]) == len(results["losses"]) < 120
    assert 1e-5 < results["steepest"] <= results["suggested"] <= results["lowest"] <= results["last"] < 1e4
    assert Path("out/plot.png").read_bytes().startswith(b"\x89PNG")
    given = " ".join(["model=mlp", "data=regression", "device=cpu", "device.threads=1", "train.batch_size=64", *more])
    assert results["command"] == f"python -m ttrain {given} optimizer.lr={results['suggested']:.1e}"
    assert results["command"] in capsys.readouterr().out
    assert [path.name for path in Path().iterdir()] == ["out"], "nothing else is written"
    first = np.array(results["losses"][:10])
    trained = ttrain.load_config(*given.split(), "optimizer.lr=1e-5", "schedule=constant")
    with ttrain.Training(trained) as training:  # the same steps by hand, with the test's rates
        data = build.build_dataset(trained.data, trained.model, [])
        by_hand = [
            training.step(data.batch("train", trained.run.seed, 64 * step, 64), lr=rate).loss
            for step, rate in enumerate(results["rates"][:10])
        ]
    np.testing.assert_allclose(first, by_hand, rtol=1e-6)


def test_what_it_refuses(inside: Path, refused: Told) -> None:
    for overrides, said in (
        (["device=null"], "device=null: computes no values."),
        (["lr_finder.low=1", "lr_finder.high=0.1"], "lr_finder.low=1: must be less than lr_finder.high=0.1."),
        (["optimizer.lr=0"], "optimizer.lr=0: task=lr_finder tries rates in proportion to it."),
    ):
        refused(said, *MLP, *overrides)
    Path("out").mkdir()
    Path("out/results.json").touch()
    refused("lr_finder.out=out: holds results already", *MLP)
