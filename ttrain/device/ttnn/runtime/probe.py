"""Opens a device in a process of its own and prints what it found as one line of JSON.

    python -m ttrain.device.ttnn.runtime.probe MODE NAME [CHIPS]

A card that hangs then hangs this process, not the one that asked.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from ttrain.core.errors import TtrainError
from ttrain.device.ttnn.settings import TenstorrentConfig


def probe(mode: str, name: str, seconds: float, chips: int = 1) -> dict[str, Any]:
    """`opened` with the facts of the device, or `error` with the reason, within `seconds`. Several chips are opened
    with the fabric that joins them."""
    command = [sys.executable, "-m", "ttrain.device.ttnn.runtime.probe", mode, name, str(chips)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired as error:
        opened = b'"opened"' in (error.stdout or b"")
        return {"error": f"did not {'close' if opened else 'open'} within {seconds:g} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if lines:
        return json.loads(lines[-1])
    last = (done.stderr.strip().splitlines() or [f"ended with exit code {done.returncode}"])[-1]
    return {"error": last[:300]}


def main(mode: str, name: str, together: str = "1") -> None:
    from ttrain.device.ttnn.runtime.mesh import Mesh

    try:
        mesh = Mesh.open(TenstorrentConfig(name=name, mode=mode, mesh=[1, int(together)]))
        chips = mesh.chips if mode == "mock" else int(mesh.tt.get_num_devices())
        result: dict[str, Any] = {"opened": {**mesh.describe(), "chips": chips}}
        mesh.close()
    except TtrainError as error:
        result = {"error": str(error)}
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:4])
