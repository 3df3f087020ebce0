"""Planned and measured memory of one step, in a process of its own.

    python -m tests.plan.peak_memory '{"model": "llama", "sizes": {"context": 4096}, "engine": "static"}'

Prints one line of JSON: `planned` and `measured`, bytes. Measured is by how much the process has grown at its largest.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

import psutil

from tests.models.session import ENGINES, open_cpu
from ttrain.core.spec import DType
from ttrain.engine.base import examples, traced_graph
from ttrain.engine.state import State
from ttrain.engine.static import StaticEngine
from ttrain.graph import Kind
from ttrain.models.agillm import AGILLM
from ttrain.models.gpt import GPT
from ttrain.models.llama import Llama
from ttrain.models.settings import AGILLMConfig, GPTConfig, LlamaConfig
from ttrain.nn.initialize import initial_values
from ttrain.optim.adamw import AdamW
from ttrain.optim.settings import AdamWConfig
from ttrain.train.sampling.decode import cache_tensors, extend_trace
from ttrain.train.steps.step_graph import StepGraph

MODELS: dict[str, Any] = {"gpt": (GPT, GPTConfig), "llama": (Llama, LlamaConfig), "agillm": (AGILLM, AGILLMConfig)}
SIZES = {"layers": 1, "heads": 2, "width": 32, "context": 4096, "vocabulary": 16}
DOCUMENT = 1000  # tokens of each, where they are packed


def found(
    model: str, engine: str, dtype: str = "fp32", step: str = "train", packed: bool = False, mask: str = "causal",
    sizes: dict[str, Any] | None = None,
) -> dict[str, int]:  # fmt: skip
    """Bytes of a step: `train`, `evaluate`, or `read`, which reads the end of a text with caches."""
    make, config = MODELS[model]
    built = make(config(**(SIZES | (sizes or {}))), DType.parse(dtype))
    graph = StepGraph(built.packing_documents() if packed else built, AdamW(AdamWConfig()), rows=1)
    traces = {"train": graph.trace_train, "evaluate": graph.trace_evaluate, "read": extend_trace(built, 64, 1, mask)}
    trace, values = traces[step], initial_values(built, 7)
    caches = cache_tensors([trace]) if step == "read" else []
    inputs = examples(traced_graph(trace))
    if packed:
        inputs["positions"] = inputs["positions"] % DOCUMENT
    process = psutil.Process()
    before = process.memory_info().rss
    state = State(open_cpu(), [*graph.state_tensors(step == "train"), *caches])
    for name, value in values.items():
        state.write(name, value)
    made = ENGINES[engine](state.device, state)
    ready = made.build(step, trace)
    ready(inputs)
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    plan = ready.plan or StaticEngine(state.device, state).build(step, trace).plan
    assert plan is not None
    placed = sum(state.nbytes(kind) for kind in Kind if kind.is_state)
    return {"planned": placed + plan.arena_bytes + plan.outside_bytes, "measured": largest - before}


if __name__ == "__main__":
    print(json.dumps(found(**json.loads(sys.argv[1]))))
