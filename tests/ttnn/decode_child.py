"""Reads texts with caches on a mocked board and prints what a token costs, one line of JSON a case.

python -m tests.ttnn.decode_child
"""

from __future__ import annotations

import json
from typing import Any

from tests.ttnn.runs import ENGINES, adamw, gpt, llama
from ttrain.core.attention_mask import CAUSAL, PAIRS
from ttrain.core.spec import DType
from ttrain.device.ttnn.device import open_device
from ttrain.device.ttnn.settings import TenstorrentConfig
from ttrain.engine.state import State
from ttrain.models.agillm import AGILLM
from ttrain.models.settings import AGILLMConfig
from ttrain.train.sampling.decode import Reader, cache_tensors, reading_traces
from ttrain.train.steps.step_graph import StepGraph

GPT = {"layers": 6, "heads": 6, "width": 384, "context": 256, "vocabulary": 96}
LLAMA = {"layers": 2, "heads": 6, "kv_heads": 2, "width": 384, "hidden": 1024, "context": 256, "qk_norm": True}
READS = {CAUSAL: (1, 1), PAIRS: (4, 2)}


def agillm(compute: DType, **settings: Any) -> AGILLM:
    return AGILLM(AGILLMConfig(**{"vocabulary": 97, "context": 70, **settings}), compute)


CASES: dict[str, tuple[Any, str, str]] = {
    "nano-gpt": (lambda: gpt(DType.BF16, **GPT), CAUSAL, "static"),
    "nano-gpt fp32 traced": (lambda: gpt(DType.FP32, **{**GPT, "layers": 1, "context": 33}), CAUSAL, "traced"),
    "llama": (lambda: llama(DType.BF16, **LLAMA), CAUSAL, "static"),
    "agillm": (lambda: agillm(DType.BF16, preset="nano_1x"), CAUSAL, "static"),
    "agillm pairs": (lambda: agillm(DType.BF16, preset="nano_3x"), PAIRS, "traced"),
    "agillm pairs, standard bias": (lambda: agillm(DType.FP32, preset="nano_3x", alibi="standard"), PAIRS, "static"),
}


def measure(device: Any, model: Any, mask: str, engine: str) -> dict[str, Any]:
    """Device ops of the last token. Programs are built by the third token; new ones are forbidden after that."""
    model.follow_compute()
    new, rows = READS[mask]
    traces = reading_traces(model, mask, new, rows)
    graph = StepGraph(model, adamw(), rows=1)
    state = State(device, [*graph.state_tensors(training=False), *cache_tensors(list(traces.values()))])
    runner = ENGINES[engine](device, state)
    reader = Reader([runner.build(name, trace) for name, trace in traces.items()], model.context, mask)
    ops = []
    for length in range(8, 16):
        device.mesh.handle.set_program_cache_misses_allowed(length < 11)
        reader.read([length] * 4 + list(range(4, length)), rows)
        ops.append(device.step_facts()["device_ops"])
        reader.read([length] * 4 + list(range(4, length)) + [5], rows)
        ops.append(device.step_facts()["device_ops"])
    device.mesh.handle.set_program_cache_misses_allowed(True)
    runner.close()
    return {"ops": ops[-1] - ops[-2], "captures": runner.counters.captures}


def main() -> None:
    device = open_device(TenstorrentConfig(name="n150", mode="mock"))
    try:
        for name, (make, mask, engine) in CASES.items():
            print(json.dumps({"name": name, **measure(device, make(), mask, engine)}), flush=True)
    finally:
        device.close()


if __name__ == "__main__":
    main()
