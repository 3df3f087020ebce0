"""Trains, or reads texts with caches, on a mocked board and prints the costs, one line of JSON a case.

A process opens one board: python -m tests.ttnn.mock_child '{"board": "n150", "cases": [{"model": "mlp", ...}]}'
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from typing import Any

import numpy as np

from tests.models.centred import Centred
from tests.models.session import Session
from tests.ttnn.runs import ENGINES, adamw, agillm, batch, gpt, llama, mlp, run, sgd
from ttrain.core.attention_mask import CAUSAL, PAIRS
from ttrain.core.spec import DType
from ttrain.device.ttnn.device import TenstorrentDevice, open_device
from ttrain.device.ttnn.settings import TenstorrentConfig
from ttrain.device.ttnn.tensors.store import TileLayout
from ttrain.engine.state import State
from ttrain.models.base import loss_weights, preparation
from ttrain.train.sampling.decode import Reader, cache_tensors, reading_traces
from ttrain.train.steps.step_graph import StepGraph

SIZES = {
    "nano-gpt": {"layers": 2, "heads": 2, "width": 64, "context": 64, "vocabulary": 96},
    "many ids": {"layers": 1, "heads": 2, "width": 64, "context": 64, "vocabulary": 2081},
    "llama": {"layers": 1, "heads": 2, "kv_heads": 1, "width": 64, "hidden": 96, "context": 64, "qk_norm": True},
    "experts": {"layers": 1, "context": 64, "experts": 8, "experts_per_token": 2, "expert_width": 32},
    "odd": {"layers": 1, "heads": 2, "width": 96, "context": 33, "vocabulary": 97},
}
READS = {CAUSAL: (1, 1), PAIRS: (4, 2)}
STEPS = 3


def model_of(case: dict[str, Any]) -> Any:
    precision = case.get("precision", "fp32")
    compute = DType.FP32 if precision == "fp32" else DType.BF16
    if case["model"] == "mlp":
        return mlp(compute, inputs=None, outputs=None)
    if case["model"] == "centred":
        return Centred(compute)
    model: Any
    if case["model"] in ("llama", "experts"):
        model = llama(compute, **SIZES[case["model"]])
    elif case["model"] == "agillm":
        model = agillm(compute, **case["config"])
    else:
        model = gpt(compute, **{**SIZES[case["model"]], "dropout": case.get("dropout", 0.0)})
    for parameter in model.parameters().values():
        parameter.master = DType.BF16 if precision == "bf16_true" else DType.FP32
    return model


def measure(device: TenstorrentDevice, case: dict[str, Any]) -> dict[str, Any]:
    """Costs of a step once programs are built."""
    model, rows = model_of(case), case.get("rows", 4)
    optimizer = sgd(clip_norm=None) if case["model"] == "mlp" else adamw()
    opened = Session(model, optimizer, rows, engine=case.get("engine", "static"), device=device, values={})
    engine, step = opened.engine, opened.steps["train"]
    given, counts = preparation(model)(batch(model, rows * device.chips, 1))
    facts = []
    for number in range(1, case.get("steps", STEPS) + 1):
        inputs = {**given, **loss_weights(counts), "seed": number, "lr": 0.1, "step": number}
        device.mesh.handle.set_program_cache_misses_allowed(number < 3)
        read = step.start(inputs)
        step.prefetch({**inputs, "step": number + 1})
        result = read()
        facts.append({**device.step_facts(), "allocations": device.counters.allocations})
    device.mesh.handle.set_program_cache_misses_allowed(True)
    cores = columns(device, step.launches()) if case.get("columns") else []
    engine.close()
    return {
        "columns": cores,
        "ops": facts[-1]["device_ops"] - facts[-2]["device_ops"],
        "later_allocations": facts[-1]["allocations"] - facts[1]["allocations"],
        "later_dram": facts[-1]["dram_bytes"] - facts[1]["dram_bytes"],
        "dram": facts[-1]["dram_bytes"],
        "host": facts[-1].get("host_bytes", 0),
        "captures": engine.counters.captures,
        "parameters": sum(parameter.count for parameter in model.parameters().values()),
        "zero": all(not np.any(value) for value in result.values()),
    }


def read(device: TenstorrentDevice, case: dict[str, Any]) -> dict[str, Any]:
    """Device ops of the last token. Programs are built by the third token; new ones are forbidden after that."""
    model, mask = model_of(case), case["reads"]
    model.follow_compute()
    new, rows = READS[mask]
    traces = reading_traces(model, mask, new, rows)
    graph = StepGraph(model, adamw(), rows=1)
    state = State(device, [*graph.state_tensors(training=False), *cache_tensors(list(traces.values()))])
    engine = ENGINES[case.get("engine", "static")](device, state)
    reader = Reader([engine.build(name, trace) for name, trace in traces.items()], model.context, mask)
    ops = []
    for length in range(8, 12):
        device.mesh.handle.set_program_cache_misses_allowed(length < 11)
        for text in ([length] * 4 + list(range(4, length)), [length] * 4 + list(range(4, length)) + [5]):
            reader.read(text, rows)
            ops.append(device.step_facts()["device_ops"])
    device.mesh.handle.set_program_cache_misses_allowed(True)
    engine.close()
    return {"ops": ops[-1] - ops[-2], "captures": engine.counters.captures}


def declared(device: TenstorrentDevice, name: str) -> dict[str, Any]:
    """Take steps with the model and the optimizer that a test module declares."""
    module = importlib.import_module(name)
    module.declare()
    losses = run(module.model(), module.optimizer(), device, rows=2, steps=3).losses
    return {"computes": device.computes, "zero": not np.any(losses), "steps": len(losses)}


def columns(device: TenstorrentDevice, launches: list[Any]) -> list[list[int]]:
    """First and last column of cores that programs of the launches run on, each pair once; ends the step's life."""
    found = set()
    for node in device.mesh._captured(launches, device.mesh.tt.graph.RunMode.NO_DISPATCH):
        ranges = re.findall(r"(\d+)-\d+ - (\d+)-\d+", (node["params"] or {}).get("core_range_set", ""))
        found |= {(int(first), int(last)) for first, last in ranges}
    return sorted(map(list, found))


def product(device: TenstorrentDevice, size: int) -> Any:
    """A launch that multiplies square matrices the way the rows of the kernel table do."""
    tt = device.mesh.tt
    a = device.store.blank(TileLayout((size, size), "bfloat16"))
    return lambda: tt.matmul(a, a, **device.context.product)


def main(text: str) -> None:
    order = json.loads(text)
    keys = ("mesh", "command_queues", "dispatch", "subdevices", "core_grid", "host_resident")
    settings = {key: order[key] for key in keys if key in order}
    device = open_device(TenstorrentConfig(name=order["board"], mode="mock", **settings))
    print(json.dumps({"cores": device.mesh.cores, "computes": device.computes}), flush=True)
    try:
        if "product" in order:
            print(json.dumps({"columns": columns(device, [product(device, order["product"])])}), flush=True)
        for name in order.get("modules", []):
            print(json.dumps(declared(device, name)), flush=True)
        for case in order.get("cases", []):
            part: Any = device.replicas()[case.get("part", 0)]
            print(json.dumps((read if "reads" in case else measure)(part, case)), flush=True)
    finally:
        device.close()


if __name__ == "__main__":
    main(sys.argv[1])
