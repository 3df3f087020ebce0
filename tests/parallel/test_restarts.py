"""A run that ranks are killed of and that goes on with other numbers of them is the undisturbed one; `kills.py --kills
50` is the long version, run by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ttrain.core.errors import CheckpointError
from ttrain.core.spec import stored_part, stored_part_name
from ttrain.parallel.ranks import Ranks
from ttrain.train.checkpoint.shards import lazy_tensors
from ttrain.train.checkpoint.share import shared_out

REPO = Path(__file__).parents[2]


def test_a_run_keeps_its_bits_through_kills_and_other_numbers_of_ranks(tmp_path: Path) -> None:
    script = str(REPO / "tests" / "parallel" / "kills.py")
    command = [sys.executable, script, "--kills", "4", "--steps", "150", "--folder", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["kills"] == 4 and result["tensors"] == 27 and result["codes"] == {"-9": 4, "1": 4}
    checkpoint = max((tmp_path / "killed" / "checkpoints").glob("step_*"))  # by two ranks that divide the optimizer
    sizes = [sum(file.stat().st_size for file in checkpoint.glob(f"*-rank{rank}-*")) for rank in range(2)]
    assert 0.4 < sizes[0] / sum(sizes) < 0.6
    assert {file.name.partition("-0")[0] for file in checkpoint.glob("*.safetensors")} == {
        f"{stem}-rank{rank}" for stem in ("parameters", "optimizer") for rank in range(2)
    }


def test_parts_are_joined_by_their_names(tmp_path: Path) -> None:
    whole = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    files = [tmp_path / f"{number}.safetensors" for number in range(3)]
    for file, part in zip(files, [(16, 24), (0, 5), (5, 16)], strict=True):
        assert stored_part(stored_part_name("a/first_moment", part, (2, 3, 4))) == ("a/first_moment", part, (2, 3, 4))
        save_file({stored_part_name("a/first_moment", part, (2, 3, 4)): whole.reshape(-1)[slice(*part)]}, file)
    found = lazy_tensors(files)
    assert list(found) == ["a/first_moment"] and np.array_equal(found["a/first_moment"], whole)
    for missing in files:
        with pytest.raises(CheckpointError, match="lack parts of a/first_moment"):
            lazy_tensors([file for file in files if file != missing])


@pytest.mark.parametrize("count", [1, 2, 4])
def test_ranks_share_whole_tensors_out(count: int) -> None:
    sizes = {f"{number}": 1 + 37 * number % 101 for number in range(60)}
    shares = [shared_out(sizes, Ranks(rank, count)) for rank in range(count)]
    assert sorted(name for share in shares for name in share) == sorted(sizes)
    loads = [sum(sizes[name] for name in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes.values()) / 10
