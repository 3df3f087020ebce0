"""Who multiplies, by given measurements: own code unless libraries win on whole steps as well."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from pytest import MonkeyPatch

from tests.native.conftest import require_compiler
from tests.native.test_steps import Device, losses, session
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.base import Launch
from ttrain.device.torch.kernels import product_libraries
from ttrain.device.torch.native import NativeKernels, Toolchain, choice
from ttrain.device.torch.native.choice import FASTEST, OWN, decide
from ttrain.device.torch.native.openmp import entry_points
from ttrain.device.torch.native.request import Request
from ttrain.engine.static import StaticEngine
from ttrain.engine.traced import TracedEngine
from ttrain.train.forecast.show import product_ways

A, B = (
    Request.make("matmul", [TensorSpec((8, width)), TensorSpec((width, 8))], [TensorSpec((8, 8))], {})
    for width in (16, 32)
)
Seconds = Mapping[str, float] | None

DECISIONS: list[tuple[Seconds, Seconds, Seconds, str]] = [
    # seconds of A, which the plan has three times, and of B; of steps by the rivals; who makes A and B
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
    """Who makes A and B, and how many times whole steps were asked for; measurements in so many seconds."""
    asked = []

    def together(rivals: Mapping[str, dict[Request, str]]) -> Seconds:
        asked.append(rivals)
        assert step is None or rivals.keys() == step.keys()
        return None if step is None else {name: unit * seconds for name, seconds in step.items()}

    def alone(request: Request) -> Seconds:
        given = {A: a, B: b}[request]
        return None if given is None else {name: unit * seconds for name, seconds in given.items()}

    ways = decide(Counter({A: 3, B: 1}), alone, together, anyway)
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


class Compared(Device):
    """The CPU whose products are compared with those of libraries."""

    def __init__(self, folder: Path, threads: int, measures: bool = True) -> None:
        super().__init__(folder, threads)
        self.measures = measures

    def compiler(self) -> NativeKernels:
        libraries = product_libraries(self.context)
        return NativeKernels(self.kernels, self.threads, Toolchain(self.folder), "auto", libraries, self.measures)


def compiler_of(engine: StaticEngine) -> NativeKernels:
    assert isinstance(engine, TracedEngine) and isinstance(engine.compiler, NativeKernels)
    return engine.compiler


@pytest.mark.parametrize("compute", [DType.FP32, DType.BF16])
def test_a_step_with_products_of_a_library_trains_alike_and_its_trials_change_nothing(
    compute: DType, folder: Path, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    require_compiler()
    monkeypatch.setenv("TTRAIN_CACHE", str(tmp_path))
    monkeypatch.setattr(choice, "SMALLEST", 1)
    measured: list[str] = []

    def alone(launches: Mapping[str, Launch], *_: float) -> dict[str, float]:
        for launch in launches.values():
            launch()
        measured.append("product")
        return {name: 1e-3 if name == "aten" and len(measured) % 2 else 2e-3 for name in launches}

    def in_turn(runs: Mapping[str, tuple[Launch, Launch]]) -> dict[str, float]:
        for ready, run in runs.values():
            ready()
            run()
            run()
        measured.append("step")
        return {name: 2e-3 if name == FASTEST else 3e-3 for name in runs}

    monkeypatch.setattr(choice, "seconds", alone)
    monkeypatch.setattr(choice, "in_turn", in_turn)
    step, engine = session(TracedEngine, folder, compute, 0.0, Compared)
    written = [name for name in engine.state.names() if not name.endswith("/gradient")]
    plain = session(StaticEngine, folder, compute, 0.0)
    for name in written:
        np.testing.assert_array_equal(engine.state.read(name), plain[1].state.read(name))
    native = compiler_of(engine)
    assert measured[-1] == "step" and measured.count("product") == len(native.ways)
    assert set(native.ways.values()) == {OWN, "aten"} and set(product_ways(engine).values()) == {OWN, "aten"}
    np.testing.assert_allclose(losses(step, 6), losses(plain[0], 6), rtol=2e-5 if compute is DType.FP32 else 2e-2)
    fork = ctypes.c_void_p.in_dll(native._loaded[-1], "ttrain_openmp_fork").value
    assert (fork is not None) == bool(entry_points())

    def planned(folder: Path, threads: int) -> Device:
        return Compared(folder, threads, measures=False)

    assert compiler_of(session(TracedEngine, folder, compute, 0.0, planned)[1]).ways == native.ways
    monkeypatch.setenv("TTRAIN_CACHE", str(tmp_path / "other"))
    assert not compiler_of(session(TracedEngine, folder, compute, 0.0, planned)[1]).ways
    assert measured.count("step") == 1
