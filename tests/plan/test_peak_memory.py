"""Planned against measured memory of steps on long texts, where anything that is quadratic in their length shows.

Each step runs in a process of its own, which prints `planned` and `measured`, bytes, as JSON. Measured is by how much
the process has grown at its largest.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

import psutil
import pytest

from tests.forked import run
from tests.models.session import ENGINES, initial_values, open_cpu
from tests.ttnn.runs import adamw, agillm, gpt, llama
from ttrain.core.spec import DType
from ttrain.engine.base import examples, traced_graph
from ttrain.engine.state import State
from ttrain.engine.static import StaticEngine
from ttrain.graph import Kind
from ttrain.train.sampling.decode import cache_tensors, extend_trace
from ttrain.train.steps.step_graph import StepGraph

MODELS: dict[str, Any] = {"gpt": gpt, "llama": llama, "agillm": agillm}
SIZES = {"layers": 1, "heads": 2, "width": 32, "context": 4096, "vocabulary": 16}
DOCUMENT = 1000  # tokens of each, where they are packed


def found(
    model: str, engine: str, dtype: str = "fp32", step: str = "train", packed: bool = False, mask: str = "causal",
    sizes: dict[str, Any] | None = None,
) -> dict[str, int]:  # fmt: skip
    """Bytes of a step: `train`, `evaluate`, or `read`, which reads the end of a text with caches."""
    built = MODELS[model](DType.parse(dtype), **(SIZES | (sizes or {})))
    graph = StepGraph(built.packing_documents() if packed else built, adamw(), rows=1)
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


CONTEXT = 10240
BOUND = {"fp32": 96, "bf16": 160}  # MiB beside the plan; a bool for every query and key takes 100, a bf16 number 200
SHARED = {"kv_heads": 1, "hidden": 32}
NARROW = {"heads": 1, "width": 16}  # where all of a long attention takes seconds
CASES: list[dict[str, Any]] = [
    {"model": "llama", "engine": "static", "sizes": SHARED},
    {"model": "llama", "engine": "static", "dtype": "bf16", "sizes": {**SHARED, "dropout": 0.1}},
    {"model": "llama", "engine": "static", "sizes": {**SHARED, "window": 700}, "packed": True},
    {"model": "gpt", "engine": "traced", "dtype": "bf16", "sizes": {**NARROW, "dropout": 0.1}},
    {"model": "agillm", "engine": "dynamic", "sizes": {**NARROW, "rank": 8, "alibi": "standard"}},
    {"model": "agillm", "engine": "traced", "sizes": {**NARROW, "rank": 8}, "step": "evaluate"},
    {"model": "agillm", "engine": "static", "sizes": {"rank": 8}, "step": "read", "mask": "pairs"},
]


@pytest.mark.slow  # all of them together
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the largest resident set as Linux tells it")
@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case.values())))
def test_a_step_takes_what_its_plan_says(case: dict[str, Any]) -> None:
    done = run("tests.plan.test_peak_memory", json.dumps({**case, "sizes": {**case["sizes"], "context": CONTEXT}}))
    assert done.returncode == 0, done.stderr
    sizes = json.loads(done.stdout)
    beside = (sizes["measured"] - sizes["planned"]) / 2**20
    assert 0 < beside < BOUND[case.get("dtype", "fp32")], sizes


if __name__ == "__main__":
    print(json.dumps(found(**json.loads(sys.argv[1]))))
