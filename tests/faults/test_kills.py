"""A few SIGKILLs at random moments; `kills.py --kills 100` is the long version, run by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).parents[2]


def test_kills_leave_no_trace(tmp_path: Path) -> None:
    command = [sys.executable, str(REPO / "tests" / "faults" / "kills.py"), "--kills", "5", "--steps", "400"]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    command += ["--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["kills"] >= 2 and result["tensors"] == 27
    print(done.stdout)
