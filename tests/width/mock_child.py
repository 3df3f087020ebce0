"""Takes steps with what test modules declare on a mocked board. A process opens one board.

python -m tests.width.mock_child tests.width.test_whole_rules ...
"""

from __future__ import annotations

import importlib
import json
import sys

import numpy as np

from tests.ttnn.runs import run
from tests.width.tools import ROWS, STEPS, names_of
from ttrain.device.ttnn.device import open_device
from ttrain.device.ttnn.settings import TenstorrentConfig


def main(names: list[str]) -> None:
    device = open_device(TenstorrentConfig(name="n150", mode="mock"))
    try:
        for name in names:
            model, optimizer = names_of(importlib.import_module(name))
            outcome = run(model, optimizer, device, rows=ROWS, steps=STEPS)
            zero = not np.any(outcome.losses)
            print(json.dumps({"computes": device.computes, "zero": zero, "steps": len(outcome.losses)}), flush=True)
    finally:
        device.close()


if __name__ == "__main__":
    main(sys.argv[1:])
