"""The backend of products by given measurements: own code, unless libraries win on whole steps too."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pytest import MonkeyPatch

from tests.native.conftest import require_compiler
from tests.native.test_steps import Device, losses, session
from tests.ttnn.runs import adamw, agillm, gpt, llama, mlp
from ttrain.core.errors import ConfigError
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.base import Launch
from ttrain.device.torch.native import rows
from ttrain.device.torch.native.autotune import FASTEST, OWN, choose_backends
from ttrain.device.torch.native.codegen import Request
from ttrain.device.torch.native.rows import NativeKernels
from ttrain.device.torch.native.threads import entry_points
from ttrain.engine.base import Trace, examples
from ttrain.engine.state import State
from ttrain.engine.static import StaticEngine
from ttrain.engine.traced import TracedEngine
from ttrain.train.forecast.show import product_ways
from ttrain.train.sampling.decode import cache_tensors
from ttrain.train.sampling.source import check_sampling, sampling_traces
from ttrain.train.steps.step_graph import StepGraph
from ttrain.train.task_settings import SampleConfig

A, B = (
    Request.make("matmul", [TensorSpec((8, width)), TensorSpec((width, 8))], [TensorSpec((8, 8))], {})
    for width in (16, 32)
)
Seconds = Mapping[str, float] | None

DECISIONS: list[tuple[Seconds, Seconds, Seconds, str]] = [
    # seconds of A, which the plan has three times, and of B; of steps by the candidates; who makes A and B
    ({"own": 1, "aten": 2}, {"own": 5, "aten": 9}, None, "own own"),
    ({"own": 2, "aten": 1}, {"own": 5, "aten": 9}, {"own": 20, "fastest": 15}, "aten own"),
    ({"own": 2, "aten": 1}, {"own": 5, "aten": 9}, {"own": 20, "fastest": 19.5}, "own own"),  # the threads cost it
    ({"own": 1, "aten": 0.98}, {"own": 5, "aten": 4.9}, None, "own own"),
    ({"own": 1, "aten": 0.9}, {"own": 97, "aten": 99}, None, "own own"),  # not worth a trial
    ({"own": 3, "aten": 2, "onednn": 1}, {"own": 5, "aten": 4}, {"own": 9, "fastest": 7, "aten": 8}, "onednn aten"),
    ({"own": 3, "aten": 2, "onednn": 1}, {"own": 5, "aten": 4}, {"own": 9, "fastest": 8, "aten": 7}, "aten aten"),
    ({"own": 2, "aten": 1}, {"own": 5, "aten": 4}, {"own": 20, "fastest": 15}, "aten aten"),
    ({"own": 3, "aten": float("inf")}, {"own": 5, "aten": 1}, {"own": 9, "fastest": 8}, "own aten"),
    ({"own": 2, "aten": 1}, None, {"own": 20, "fastest": 15}, ""),
    ({"own": 2, "aten": 1}, {"own": 5, "aten": 9}, None, ""),  # nobody has timed the step
]


def decided(a: Seconds, b: Seconds, step: Seconds, unit: float, anyway: bool = False) -> tuple[str, int]:
    """Return the backends of A and B, and how often whole steps were timed, for measurements in these seconds."""
    asked = []

    def together(candidates: Mapping[str, dict[Request, str]]) -> Seconds:
        asked.append(candidates)
        assert step is None or candidates.keys() == step.keys()
        return None if step is None else {name: unit * seconds for name, seconds in step.items()}

    def alone(request: Request) -> Seconds:
        given = {A: a, B: b}[request]
        return None if given is None else {name: unit * seconds for name, seconds in given.items()}

    ways = choose_backends(Counter({A: 3, B: 1}), alone, together, anyway)
    return " ".join(ways[request] for request in (A, B) if ways), len(asked)


@pytest.mark.parametrize(("a", "b", "step", "expected"), DECISIONS)
def test_a_library_multiplies_where_it_wins_by_itself_and_in_the_step(
    a: Seconds, b: Seconds, step: Seconds, expected: str
) -> None:
    ways, asked = decided(a, b, step, 1e-3)
    assert ways == expected
    assert asked == ((step is not None and b is not None) or (expected == "" and b is not None))


def test_long_steps_are_compared_by_their_products_and_mixed_ones_need_no_comparison() -> None:
    fewer, more = {"own": 2.0, "aten": 1.0}, {"own": 5.0, "aten": 9.0}
    assert decided(fewer, more, None, 1.0) == ("aten own", 0)
    assert decided({"own": 1.0, "aten": 0.9}, {"own": 97.0, "aten": 99.0}, None, 1e-3, True) == ("aten own", 0)


Compared = partial(Device, compares=True)


def compiler_of(engine: StaticEngine) -> NativeKernels:
    assert isinstance(engine, TracedEngine) and isinstance(engine.compiler, NativeKernels)
    return engine.compiler


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: MonkeyPatch) -> list[str]:
    """All products are compared, and a mix of own code and aten wins. What was run for it: products and steps."""
    require_compiler()
    monkeypatch.setenv("TTRAIN_CACHE", str(tmp_path))
    monkeypatch.setattr(rows, "SMALLEST", 1)
    found: list[str] = []

    def seconds(launches: Mapping[str, Launch], *given: Any) -> dict[str, float]:
        before = given[-1] if isinstance(given[-1], dict) else None
        for name, launch in launches.items():
            if before is not None:
                before[name]()
            launch()
        found.append("product" if before is None else "step")
        if before is not None:
            return {name: 2e-3 if name == FASTEST else 3e-3 for name in launches}
        return {name: 1e-3 if name == "aten" and len(found) % 2 else 2e-3 for name in launches}

    monkeypatch.setattr(rows, "seconds", seconds)
    return found


SIZES: dict[str, Any] = {"layers": 1, "heads": 2, "width": 16, "context": 8, "vocabulary": 12}
MODELS: dict[str, Callable[[], Any]] = {
    "gpt": lambda: gpt(DType.BF16, **SIZES, activation="relu_squared", qk_norm=True),
    "packed": lambda: llama(DType.BF16, **SIZES, hidden=16, kv_heads=1, window=3).packing_documents(),
    "agillm": lambda: agillm(DType.BF16, **SIZES, rank=4),
    "alibi": lambda: agillm(DType.BF16, **SIZES, rank=4, alibi="standard", objective="ar_only"),
    "mlp": lambda: mlp(DType.BF16, layers=2, width=16, inputs=None, outputs=None),
}


def every_trace(model: Any) -> dict[str, tuple[StepGraph, Trace]]:
    """All steps that a run, a sample in any mode, a chat or an evaluation builds of a model."""
    whole, parts = (StepGraph(model, adamw(), rows=2, gradient_accumulation=count) for count in (1, 2))
    found = {name: (parts, trace) for name, trace in parts.train_steps().items()}
    found |= {name: (whole, trace) for name, trace in {**whole.train_steps(), **whole.further_steps()}.items()}
    if hasattr(model, "logits"):
        found["scores"] = whole, lambda graph: graph.output("logits", model.logits(graph, 2, 5))
    for mode in ("ar", "sat", "sat_variable", "speculative"):
        config = SampleConfig(mode=mode)
        with suppress(ConfigError):  # of a model without
            check_sampling(model, config)
            for traces in sampling_traces(model, config).values():
                found |= {f"{mode} {name}": (whole, trace) for name, trace in traces.items()}
    return found


def built(engine: type[StaticEngine], device: Device, graph: StepGraph, trace: Trace) -> Any:
    return engine(device, State(device, [*graph.state_tensors(), *cache_tensors([trace])])).build("step", trace)


@pytest.mark.parametrize("name", MODELS)
def test_every_step_runs_on_its_example_inputs(name: str, folder: Path) -> None:
    for step, (graph, trace) in every_trace(MODELS[name]()).items():
        ready = built(StaticEngine, Device(folder, 1), graph, trace)
        for output, values in ready(examples(ready.plan.graph)).items():
            assert np.isfinite(values).all(), (step, output)


@pytest.mark.parametrize("name", ["gpt", "packed"])
def test_products_of_a_step_that_reads_a_text_are_compared_before_there_is_one(
    name: str, folder: Path, measured: list[str]
) -> None:
    graph, trace = every_trace(MODELS[name]())["ar read_causal_8"]
    built(TracedEngine, Compared(folder, 2), graph, trace)
    assert measured[-1] == "step"


@pytest.mark.parametrize("compute", [DType.FP32, DType.BF16])
def test_a_step_with_products_of_a_library_trains_alike_and_its_trials_change_nothing(
    compute: DType, folder: Path, tmp_path: Path, measured: list[str], monkeypatch: MonkeyPatch
) -> None:
    run = session("traced", folder, compute, 0.0, Compared)
    engine = run.engine
    written = [name for name in engine.state.names() if not name.endswith("/gradient")]
    plain = session("static", folder, compute, 0.0)
    for name in written:
        np.testing.assert_array_equal(engine.state.read(name), plain.state.read(name))
    native = compiler_of(engine)
    assert measured[-1] == "step" and measured.count("product") == len(native.backends)
    assert set(native.backends.values()) == {OWN, "aten"} and set(product_ways(engine).values()) == {OWN, "aten"}
    np.testing.assert_allclose(losses(run, 6), losses(plain, 6), rtol=2e-5 if compute is DType.FP32 else 2e-2)
    fork = ctypes.c_void_p.in_dll(native._loaded[-1], "ttrain_openmp_fork").value
    assert (fork is not None) == bool(entry_points())

    planned = partial(Device, compares=True, measures=False)
    assert compiler_of(session("traced", folder, compute, 0.0, planned).engine).backends == native.backends
    monkeypatch.setenv("TTRAIN_CACHE", str(tmp_path / "other"))
    assert not compiler_of(session("traced", folder, compute, 0.0, planned).engine).backends
    assert measured.count("step") == 1
