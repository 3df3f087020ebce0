"""task=plan of many ranks, for which no process starts: memory, bytes and time of one of them, by plain formulas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ttrain.cli import main

WIDTH, LAYERS = 64, 2
PARAMETERS = LAYERS * (WIDTH * WIDTH + WIDTH)
MLP = ["task=plan", "model=mlp", f"model.width={WIDTH}", f"model.layers={LAYERS}", "train.batch_size=64", "device=cpu"]
MLP += ["optimizer=adamw", "optimizer.decay_rule=all", "plan.time=false", "plan.limits=false"]


def planned(folder: Path, *overrides: str) -> dict[str, Any]:
    assert main([*MLP, *overrides, f"plan.json={folder / 'plan.json'}"]) == 0
    found: dict[str, Any] = json.loads((folder / "plan.json").read_text())
    return found


@pytest.mark.parametrize("count", [2, 8])
def test_a_rank_of_zero1_keeps_its_share_and_sends_the_rest(count: int, tmp_path: Path) -> None:
    one = planned(tmp_path)
    share = planned(tmp_path, "parallel=zero1", f"parallel.world={count}")
    assert one["memory"]["optimizer"] == 2 * 4 * PARAMETERS
    assert share["memory"]["optimizer"] == pytest.approx(2 * 4 * PARAMETERS / count, rel=0.15)
    assert share["memory"]["parameter"] == one["memory"]["parameter"]
    assert share["checkpoint_bytes"] == one["checkpoint_bytes"]
    sent = share["communication"]
    for name in ("reduce_scatter", "all_gather"):
        assert sent[name]["nbytes"] == pytest.approx(4 * PARAMETERS * (count - 1) / count, rel=0.15)


def test_ranks_of_ddp_send_every_gradient_twice(tmp_path: Path) -> None:
    found = planned(tmp_path, "parallel=ddp", "parallel.world=4", "parallel.slices=8", "train.accumulation=2")
    assert found["communication"]["all_reduce"]["nbytes"] == pytest.approx(2 * 4 * PARAMETERS * 3 / 4, rel=0.01)
    assert found["runs_per_step"] == {
        "accumulate_first": 2, "accumulate_next": 2, "keep0": 1, "merge0": 1, "update": 1,
    }  # fmt: skip
    rows = 64 // 8 // 2
    products = 2 * rows * WIDTH * WIDTH * LAYERS  # of one micro-batch forward; a rank computes four of them
    assert found["flops_per_step"]["forward"] == pytest.approx(4 * products, rel=0.05)


def test_communication_is_part_of_the_expected_time(tmp_path: Path) -> None:
    given = ["parallel=ddp", "parallel.world=2", "plan.time=true", "plan.seconds=0"]
    found = planned(tmp_path, *given, "parallel.link_gbps=0.001")
    expected = 8 * found["communication"]["all_reduce"]["nbytes"] / 1e6
    assert found["expected"]["parts_ms"]["communication"] == pytest.approx(1e3 * expected)
    assert found["expected"]["bottleneck"] == "communication"
    assert found["expected"]["step_ms"] > 1e3 * expected


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["parallel=ddp", "parallel.world=3"], "parallel.world=3: must be a power of two, such as 2 or 4"),
        (["parallel.world=2"], "parallel.world=2: parallel=none is one process"),
        (["task=train", "parallel=ddp", "parallel.world=2"], "parallel.world=2: is for task=plan"),
        (["parallel=ddp", "parallel.world=128"], "Give train.batch_size=128"),
    ],
)
def test_what_can_not_be_divided_is_told(overrides: list[str], told: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*MLP, *overrides]) == 2
    assert told in capfd.readouterr().err
