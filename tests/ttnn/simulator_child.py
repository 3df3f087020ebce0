"""Trains on the CPU and on a simulated chip, and writes both outcomes into a file.

python -m tests.ttnn.simulator_child OUT '{"model": "gpt", "optimizer": "adamw", ...}'
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.ttnn.runs import Outcome, adamw, cpu, gpt, mlp, run, sgd
from ttrain.core.spec import DType
from ttrain.device.ttnn.device import open_device
from ttrain.device.ttnn.settings import TenstorrentConfig


def model_of(order: dict[str, Any], compute: DType) -> Any:
    sizes = order.get("sizes", {})
    if order["model"] == "mlp":
        return mlp(compute, **{"width": 32, "inputs": None, "outputs": None, **sizes})
    return gpt(compute, **{"layers": 1, "heads": 2, "width": 32, "context": 32, "vocabulary": 65, **sizes})


def packed(prefix: str, outcome: Outcome) -> dict[str, np.ndarray]:
    arrays = {"losses": np.asarray(outcome.losses), "norms": np.asarray(outcome.norms)}
    arrays |= {f"gradient:{name}": value for name, value in outcome.gradients.items()}
    arrays |= {f"state:{name.replace('/', '|')}": value for name, value in outcome.state.items()}
    return {f"{prefix}:{name}": value for name, value in arrays.items()}


def main(out: str, text: str) -> None:
    order = json.loads(text)
    common = {"rows": order.get("rows", 2), "steps": order.get("steps", 5)}
    make = sgd if order.get("optimizer") == "sgd" else adamw
    config = TenstorrentConfig(
        mode="simulator", simulator=os.environ["TT_METAL_SIMULATOR"], trace_region_mb=8,
        command_queues=order.get("queues", 1),
    )  # fmt: skip
    device = open_device(config)
    try:
        compute = DType.FP32 if order.get("fp32") else DType.BF16
        there = run(model_of(order, compute), make(), device, engine=order.get("engine", "static"), **common)
        here = run(model_of(order, DType.FP32), make(), cpu(), **common)
        np.savez(Path(out), **packed("there", there), **packed("here", here))
    finally:
        device.close()


if __name__ == "__main__":
    main(*sys.argv[1:3])
