"""Training on a simulated Wormhole: values are computed by ttnn's own kernels.

Needs TT_METAL_SIMULATOR with the path of a simulator library, and what else that one needs in the environment, such as
a runtime root with a compiler. Slow: minutes a test on a cold kernel cache. In the end, a table of what was measured is
printed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
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


ROWS: list[tuple[str, str]] = []


@pytest.fixture(scope="module", autouse=True)
def table(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    lines = ["", "| run | measured |", "|---|---|", *(f"| {run} | {measured} |" for run, measured in ROWS), ""]
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print("\n".join(lines))


def simulated(folder: Path, fast: bool = True, **order: Any) -> Arrays:
    """Outcomes of the CPU (`here:`) and of the simulated chip (`there:`)."""
    environment = dict(os.environ)
    environment.pop("TT_METAL_SLOW_DISPATCH_MODE", None)
    if not fast:
        environment["TT_METAL_SLOW_DISPATCH_MODE"] = "1"
    out = folder / "outcome.npz"
    command = [sys.executable, "-m", "tests.ttnn.simulator_child", str(out), json.dumps(order)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    with np.load(out) as arrays:
        return dict(arrays)


def loss_error(arrays: Arrays, number: str = "") -> float:
    """The largest relative one of all steps, against the CPU."""
    here, there = arrays[f"here{number}:losses"], arrays[f"there{number}:losses"]
    return float(np.max(np.abs(there - here) / np.abs(here)))


def gradient_errors(arrays: Arrays, number: str = "") -> dict[str, float]:
    here, there = (named(arrays, f"{side}{number}:gradient:") for side in ("here", "there"))
    return {name: distance(here[name], there[name]) for name in here}


def distance(one: np.ndarray, two: np.ndarray) -> float:
    """Relative to the first, in the 2-norm."""
    return float(np.linalg.norm(one - two) / max(np.linalg.norm(one), 1e-12))


def named(arrays: Arrays, prefix: str) -> Arrays:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def name_of(order: dict[str, Any]) -> str:
    names = {"mlp": "mlp, fp32", "gpt": "one block of nano-gpt, bf16", "llama": "two blocks of llama, bf16"}
    return names[order["model"]] + (", dropout" if order.get("sizes", {}).get("dropout") else "")


def unequal(one: Arrays, two: Arrays) -> list[str]:
    assert one.keys() == two.keys() and one
    return [name for name in one if not np.array_equal(one[name], two[name])]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_mlp_trains_five_steps(tmp_path: Path, optimizer: str) -> None:
    arrays = simulated(tmp_path, fast=False, model="mlp", optimizer=optimizer, rows=32)
    ROWS.append((f"mlp, bf16, 5 steps of {optimizer}, against the CPU", f"every loss within {loss_error(arrays):.2%}"))
    assert loss_error(arrays) < 0.01


@pytest.mark.parametrize(
    "order",
    [{"model": "gpt"}, {"model": "gpt", "sizes": {"width": 48, "vocabulary": 97}}, {"model": "llama"}],
    ids=["nano-gpt, heads of 16", "nano-gpt, heads of 24", "llama, grouped heads of 16"],
)
def test_gradients_of_a_decoder(tmp_path: Path, order: dict[str, Any]) -> None:
    arrays = simulated(tmp_path, fast=False, **order, steps=1)
    errors = gradient_errors(arrays)
    ROWS.append((
        f"{name_of(order)}, {order.get('sizes', 'usual sizes')}, against the CPU",
        f"loss within {loss_error(arrays):.2%}, every gradient within {max(errors.values()):.1%}",
    ))  # fmt: skip
    assert loss_error(arrays) < 0.01
    assert len(errors) > 10
    assert {name: off for name, off in errors.items() if off > 0.05} == {}


@pytest.mark.parametrize(
    "order",
    [{"model": "mlp", "fp32": True, "rows": 32}, {"model": "gpt", "sizes": {"dropout": 0.1}}, {"model": "llama"}],
    ids=["mlp", "nano-gpt with dropout", "llama"],
)
def test_replays_equal_launches_bit_for_bit(tmp_path: Path, order: dict[str, Any]) -> None:
    """While learning rate, step number and dropout seed move."""
    outcomes = [simulated(tmp_path, **order, engine=engine) for engine in ("static", "traced")]
    assert unequal(*(named(outcome, "there:") for outcome in outcomes)) == []
    off = loss_error(outcomes[0])
    ROWS.append((f"{name_of(order)}, 5 steps, traced against static", f"bit-equal, losses within {off:.2%} of the CPU"))
    assert off < 0.01


@pytest.mark.parametrize("engine", ["static", "traced"])
def test_two_queues_give_the_numbers_of_one(tmp_path: Path, engine: str) -> None:
    """The next batch, learning rate, step number and dropout seed are written while a step computes."""
    order: dict[str, Any] = {"model": "gpt", "sizes": {"dropout": 0.1}, "steps": 3}
    one = simulated(tmp_path, **order)
    two = simulated(tmp_path, **order, queues=2, prefetch=True, engine=engine)
    assert unequal(named(one, "there:"), named(two, "there:")) == []
    ROWS.append((f"{name_of(order)}, 3 steps, inputs prefetched on a second queue, {engine}", "bit-equal to one queue"))


def test_a_core_grid_changes_no_number(tmp_path: Path) -> None:
    wide = {**MLP, "rows": 96, "sizes": {"width": 96}, "steps": 2}  # nine tiles, more than the grid has cores
    whole, grid = (simulated(tmp_path, **wide, core_grid=size) for size in (None, [2, 2]))
    one, two = named(whole, "there:"), named(grid, "there:")
    off = max(distance(one[name], two[name]) for name in one)
    ROWS.append(
        (f"{name_of(MLP)}, 96 wide, 2 steps, core grid of 2 x 2 against all cores", f"every tensor within {off:.0e}")
    )
    assert off < 1e-5


@pytest.fixture(scope="module")
def two_replicas(tmp_path_factory: pytest.TempPathFactory) -> Arrays:
    return simulated(tmp_path_factory.mktemp("replicas"), **MLP, replicas=2)


@pytest.mark.parametrize("index", [0, 1])
def test_a_replica_gives_the_numbers_of_the_plain_run(two_replicas: Arrays, tmp_path: Path, index: int) -> None:
    """On half of the cores, beside another with other weights, against a run by itself on the whole chip."""
    plain = named(simulated(tmp_path, **MLP, weights=7 + index), "there:")
    beside = named(two_replicas, f"there{index or ''}:")
    off = max(distance(plain[name], beside[name]) for name in plain)
    ROWS.append((f"{name_of(MLP)}, 5 steps, replica {index} against a plain run", f"every tensor within {off:.0e}"))
    assert off < 1e-5


def test_captured_replicas_equal_launched_ones_bit_for_bit(two_replicas: Arrays, tmp_path: Path) -> None:
    captured = simulated(tmp_path, **MLP, replicas=2, engine="traced")
    assert unequal(named(captured, "there"), named(two_replicas, "there")) == []
    ROWS.append((f"{name_of(MLP)}, 5 steps, two replicas, traced against static", "bit-equal"))


def test_replicas_of_nano_gpt(tmp_path: Path) -> None:
    """One block with dropout in bf16, an odd vocabulary and heads that do not fill a tile."""
    arrays = simulated(tmp_path, model="gpt", steps=1, sizes={"dropout": 0.1}, replicas=2)
    for number in ("", "1"):
        errors = gradient_errors(arrays, number)
        ROWS.append((
            f"one block of nano-gpt, bf16, dropout, replica {number or 0} against the CPU",
            f"loss within {loss_error(arrays, number):.2%}, every gradient within {max(errors.values()):.1%}",
        ))  # fmt: skip
        assert loss_error(arrays, number) < 0.01
        assert {name: off for name, off in errors.items() if off > 0.05} == {}
    assert not np.array_equal(arrays["there:losses"], arrays["there1:losses"])
