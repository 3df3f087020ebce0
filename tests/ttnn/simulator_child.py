"""Trains on the CPU and on a simulated chip, and writes both outcomes into a file.

python -m tests.ttnn.simulator_child OUT '{"model": "gpt", "optimizer": "adamw", ...}'
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.ttnn.runs import Outcome, adamw, cpu, gpt, llama, mlp, run, sgd, side_by_side, turns
from ttrain.core.spec import DType
from ttrain.device.ttnn.device import open_device
from ttrain.device.ttnn.settings import TenstorrentConfig


def model_of(order: dict[str, Any], compute: DType) -> Any:
    sizes = order.get("sizes", {})
    if order["model"] == "mlp":
        return mlp(compute, **{"width": 32, "inputs": None, "outputs": None, **sizes})
    if order["model"] == "llama":
        return llama(compute, **sizes)
    return gpt(compute, **{"layers": 1, "heads": 2, "width": 32, "context": 32, "vocabulary": 65, **sizes})


def arrays(outcome: Outcome) -> dict[str, np.ndarray]:
    found = {"losses": np.asarray(outcome.losses), "norms": np.asarray(outcome.norms)}
    return found | outcome.state | {f"gradient of {name}": value for name, value in outcome.gradients.items()}


def main(out: str, text: str) -> None:
    order = json.loads(text)
    replicas, first = order.get("replicas", 1), order.get("weights", 7)
    common = {"rows": order.get("rows", 2), "steps": order.get("steps", 5)}
    make = sgd if order.get("optimizer") == "sgd" else adamw
    config = TenstorrentConfig(
        mode="simulator", simulator=os.environ["TT_METAL_SIMULATOR"], trace_region_mb=8,
        command_queues=order.get("queues", replicas), subdevices=replicas, core_grid=order.get("core_grid"),
        host_resident=order.get("host_resident", []),
    )  # fmt: skip
    device = open_device(config)
    compute = DType.BF16 if not order.get("fp32") else DType.FP32
    how = {**common, "engine": order.get("engine", "static"), "prefetch": order.get("prefetch", False)}
    try:
        runs = [
            turns(model_of(order, compute), make(), part, weights=first + index, **how)
            for index, part in enumerate(device.replicas())
        ]
        outcomes = []
        for index, there in enumerate(side_by_side(runs)):
            here = run(model_of(order, DType.FP32), make(), cpu(), weights=first + index, **common)
            outcomes.append((arrays(here), arrays(there)))
        Path(out).write_bytes(pickle.dumps(outcomes))
    finally:
        device.close()


if __name__ == "__main__":
    main(*sys.argv[1:3])
