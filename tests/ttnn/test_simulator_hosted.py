"""Layers in host memory beside a simulated Wormhole: transfers arrive, and a split trace repeats the plain step.

Needs what tests/ttnn/test_simulator.py needs.
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


def simulated(folder: Path, **order: Any) -> dict[str, np.ndarray]:
    """Outcomes of the CPU (`here:`) and of the simulated chip with its embedding in host memory (`there:`)."""
    environment = {key: value for key, value in os.environ.items() if key != "TT_METAL_SLOW_DISPATCH_MODE"}
    out = folder / "outcome.npz"
    text = json.dumps({"model": "gpt", "host_resident": ["embedding"], **order})
    command = [sys.executable, "-m", "tests.ttnn.simulator_child", str(out), text]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    with np.load(out) as arrays:
        return dict(arrays)


def test_a_step_equals_the_cpu(tmp_path: Path) -> None:
    arrays = simulated(tmp_path, steps=1)
    np.testing.assert_allclose(arrays["there:losses"], arrays["here:losses"], rtol=0.01)
    names = [name for name in arrays if name.startswith("here:gradient:")]
    assert len(names) > 10
    for name in names:
        here, there = arrays[name], arrays[name.replace("here", "there", 1)]
        assert np.linalg.norm(here - there) < 0.05 * max(np.linalg.norm(here), 1e-12), name


def test_three_captures_equal_launches_bit_for_bit(tmp_path: Path) -> None:
    outcomes = [simulated(tmp_path, steps=3, engine=engine) for engine in ("static", "traced")]
    names = [name for name in outcomes[0] if name.startswith("there:")]
    assert len(names) > 10
    assert [name for name in names if not np.array_equal(outcomes[0][name], outcomes[1][name])] == []
