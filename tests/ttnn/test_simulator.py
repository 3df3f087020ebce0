"""Training on a simulated Wormhole: values are computed by ttnn's own kernels.

Needs TT_METAL_SIMULATOR with the path of a simulator library, and what else that one needs in the environment, such as
a runtime root with a compiler. Slow: minutes a test on a cold kernel cache.
"""

from __future__ import annotations

import json
import os
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


def error(arrays: Arrays, name: str) -> float:
    """Relative to the reference, in the 2-norm."""
    here, there = arrays[f"here:{name}"], arrays[f"there:{name}"]
    return float(np.linalg.norm(here - there) / max(np.linalg.norm(here), 1e-12))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_mlp_trains_five_steps(tmp_path: Path, optimizer: str) -> None:
    arrays = simulated(tmp_path, fast=False, model="mlp", optimizer=optimizer, rows=32)
    np.testing.assert_allclose(arrays["there:losses"], arrays["here:losses"], rtol=0.01)


@pytest.mark.parametrize("sizes", [{}, {"width": 48, "vocabulary": 97}], ids=["head of 16", "head of 24"])
def test_a_block_of_nano_gpt(tmp_path: Path, sizes: dict[str, int]) -> None:
    arrays = simulated(tmp_path, fast=False, model="gpt", steps=1, sizes=sizes)
    np.testing.assert_allclose(arrays["there:losses"], arrays["here:losses"], rtol=0.01)
    names = [name.removeprefix("here:") for name in arrays if name.startswith("here:gradient:")]
    assert len(names) > 10
    assert {name: error(arrays, name) for name in names if error(arrays, name) > 0.05} == {}


@pytest.mark.parametrize(
    "order",
    [{"model": "mlp", "fp32": True, "rows": 32}, {"model": "gpt", "sizes": {"dropout": 0.1}}],
    ids=["mlp", "nano-gpt with dropout"],
)
def test_replays_equal_launches_bit_for_bit(tmp_path: Path, order: dict[str, Any]) -> None:
    """While learning rate, step number and dropout seed move."""
    outcomes = [simulated(tmp_path, **order, engine=engine) for engine in ("static", "traced")]
    names = [name for name in outcomes[0] if name.startswith("there:")]
    assert [name for name in names if not np.array_equal(outcomes[0][name], outcomes[1][name])] == []


def test_two_queues_give_the_numbers_of_one(tmp_path: Path) -> None:
    outcomes = [simulated(tmp_path, model="mlp", fp32=True, rows=32, queues=queues) for queues in (1, 2)]
    names = [name for name in outcomes[0] if name.startswith("there:")]
    assert [name for name in names if not np.array_equal(outcomes[0][name], outcomes[1][name])] == []
