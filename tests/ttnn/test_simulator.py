"""Training on a simulated Wormhole: values are computed by ttnn's own kernels.

Needs TT_METAL_SIMULATOR with the path of a simulator library, and what else that one needs in the environment, such as
a runtime root with a compiler. Slow: minutes a test on a cold kernel cache. What was measured is printed.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

LIBRARY = os.environ.get("TT_METAL_SIMULATOR", "")
ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.simulator,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not Path(LIBRARY).is_file(), reason="no simulator library: TT_METAL_SIMULATOR names none"),
]
Arrays = dict[str, np.ndarray]
MLP: dict[str, Any] = {"model": "mlp", "fp32": True, "rows": 32}
DROPOUT: dict[str, Any] = {"model": "gpt", "sizes": {"dropout": 0.1}}
EXPERTS = {"layers": 1, "experts": 4, "experts_per_token": 2, "expert_width": 32}
# A first step of AdamW goes by the sign of the smallest gradients too, and then tokens choose other experts.
MIXTURE: dict[str, Any] = {"model": "llama", "sizes": EXPERTS, "steps": 2, "optimizer": "sgd"}
HOSTED: dict[str, Any] = {"model": "gpt", "host_resident": ["embedding"]}


def simulated(folder: Path, fast: bool = True, **order: Any) -> list[tuple[Arrays, Arrays]]:
    """Outcomes of the CPU and of the simulated chip, by replica."""
    environment = {key: value for key, value in os.environ.items() if key != "TT_METAL_SLOW_DISPATCH_MODE"}
    environment |= {} if fast else {"TT_METAL_SLOW_DISPATCH_MODE": "1"}
    out = folder / "outcomes.pickle"
    command = [sys.executable, "-m", "tests.ttnn.simulator_child", str(out), json.dumps(order)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return pickle.loads(out.read_bytes())


def distance(one: np.ndarray, two: np.ndarray) -> float:
    """Relative to the first, in the 2-norm."""
    return float(np.linalg.norm(one - two) / max(np.linalg.norm(one), 1e-12))


def check_losses(here: Arrays, there: Arrays) -> None:
    """Against the CPU, of all steps."""
    off = float(np.max(np.abs(there["losses"] - here["losses"]) / np.abs(here["losses"])))
    print(f"losses within {off:.2%}")
    assert off < 0.01


def check_gradients(here: Arrays, there: Arrays) -> None:
    errors = {name: distance(here[name], there[name]) for name in here if name.startswith("gradient of ")}
    print(f"every gradient within {max(errors.values()):.1%}")
    assert len(errors) > 10
    assert {name: off for name, off in errors.items() if off > 0.05} == {}


def check_equal(one: Arrays, two: Arrays, within: float = 0.0) -> None:
    """To the bit, or each tensor within a share of its norm."""
    assert one.keys() == two.keys() and one
    assert [
        name for name in one if not np.array_equal(one[name], two[name]) and distance(one[name], two[name]) >= within
    ] == []


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_mlp_trains_five_steps(tmp_path: Path, optimizer: str) -> None:
    check_losses(*simulated(tmp_path, fast=False, model="mlp", optimizer=optimizer, rows=32)[0])


@pytest.mark.parametrize(
    "order",
    [
        {"model": "gpt"},
        {"model": "gpt", "sizes": {"width": 48, "vocabulary": 97}},
        {"model": "llama"},
        MIXTURE,
        {**HOSTED, "fast": True},
    ],
    ids=["nano-gpt, heads of 16", "nano-gpt, heads of 24", "llama, grouped heads of 16", "mixture", "hosted embedding"],
)
def test_gradients_of_a_decoder(tmp_path: Path, order: dict[str, Any]) -> None:
    (sides,) = simulated(tmp_path, **{"fast": False, "steps": 1, **order})
    check_losses(*sides)
    check_gradients(*sides)


@pytest.mark.parametrize(
    "order",
    [MLP, DROPOUT, {"model": "llama"}, MIXTURE, {**HOSTED, "steps": 3}],
    ids=["mlp", "dropout", "llama", "mixture", "hosted"],
)
def test_replays_equal_launches_bit_for_bit(tmp_path: Path, order: dict[str, Any]) -> None:
    """While learning rate, step number and dropout seed move."""
    (here, static), (_, traced) = (simulated(tmp_path, **order, engine=each)[0] for each in ("static", "traced"))
    check_equal(static, traced)
    check_losses(here, static)


@pytest.mark.parametrize("engine", ["static", "traced"])
def test_two_queues_give_the_numbers_of_one(tmp_path: Path, engine: str) -> None:
    """The next batch, learning rate, step number and dropout seed are written while a step computes."""
    _, one = simulated(tmp_path, **DROPOUT, steps=3)[0]
    _, two = simulated(tmp_path, **DROPOUT, steps=3, queues=2, prefetch=True, engine=engine)[0]
    check_equal(one, two)


def test_a_core_grid_changes_no_number(tmp_path: Path) -> None:
    wide = {**MLP, "rows": 96, "sizes": {"width": 96}, "steps": 2}  # nine tiles, more than the grid has cores
    (_, whole), (_, grid) = (simulated(tmp_path, **wide, core_grid=size)[0] for size in (None, [2, 2]))
    check_equal(whole, grid, within=1e-5)


def test_replicas_give_the_numbers_of_plain_runs(tmp_path: Path) -> None:
    """On half of the cores each, with weights of their own, against runs by themselves on the whole chip."""
    static, traced = (simulated(tmp_path, **MLP, replicas=2, engine=engine) for engine in ("static", "traced"))
    for index, ((_, beside), (_, captured)) in enumerate(zip(static, traced, strict=True)):
        check_equal(simulated(tmp_path, **MLP, weights=7 + index)[0][1], beside, within=1e-5)
        check_equal(captured, beside)


def test_replicas_of_nano_gpt(tmp_path: Path) -> None:
    """One block with dropout in bf16, an odd vocabulary and heads that do not fill a tile."""
    both = simulated(tmp_path, **DROPOUT, steps=1, replicas=2)
    for sides in both:
        check_losses(*sides)
        check_gradients(*sides)
    assert not np.array_equal(both[0][1]["losses"], both[1][1]["losses"])
