"""A real measuring process, what it answers, and how it may end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.bench.pretend import ONE_THREAD
from ttrain.bench import child
from ttrain.bench.process import Neighbour, Worker, WorkerFailed, caches
from ttrain.core.errors import UserError


def order(name: str, **changes: Any) -> dict[str, Any]:
    return {
        "case": {"size": "4x8", "precision": "fp32", "seed": 1}, "name": name, "mode": "none", "plugins": [],
        "device": vars(ONE_THREAD), "engine": {"name": "static", "rematerialize": True}, **changes,
    }  # fmt: skip


def test_a_process_builds_compares_and_times(tmp_path: Path) -> None:
    """Two ranks of PyTorch are the reference; memory is that of what the plan can speak of."""
    weights = str(tmp_path / "weights")
    reference = Worker(order("eager", mode="ddp"), tmp_path / "eager", ranks=2)
    ours = Worker(order("static", case={"size": "512x256", "precision": "fp32", "seed": 1}), tmp_path / "static")
    small = Worker(order("static", mode="zero1"), tmp_path / "zero1", ranks=2)
    try:
        expected = reference.ask("start", False)["losses"]
        reference.ask("write_weights", weights)
        found = small.ask("start", False)
        assert found["losses"] == pytest.approx(expected, rel=1e-6)
        assert small.ask("weight_difference", weights) < 1e-5
        found = ours.ask("start", True)
        assert (
            0 < found["step_seconds"] < found["first_step_s"] and found["imports_s"] > 0 and len(found["losses"]) == 5
        )
        # Two weights and two biases with their gradients, and at least the batch and one layer's activations.
        assert found["planned_bytes"] > 4 * (4 * 256 * 256 + 3 * 512 * 256)
        assert 0 < found["steady_bytes"] - found["base_bytes"] < 4 * found["planned_bytes"]
        assert len(ours.ask("turn", 1, 3, True)) == 3 and len(ours.ask("turn", 1, 3, False)) == 1
        facts = ours.ask("facts", False)
        assert facts["device"]["threads"] == 1 and facts["facts"]["peak_flops"] > 1e6
        assert facts["facts"]["counters"]["allocations_after_first"] == 0 and facts["facts"]["roof"]["ms"] > 0
    finally:
        for worker in (reference, ours, small):
            worker.close()
    assert not any(psutil.pid_exists(process.pid) for worker in (reference, ours, small) for process in worker.children)


@pytest.mark.parametrize(
    ("changes", "said"), [({"name": "statik"}, "not registered. Did you mean 'static'?"), ({"case": {}}, "TypeError")]
)
def test_an_order_that_fails_says_why(changes: Any, said: str) -> None:
    with pytest.raises((UserError, TypeError)) as caught:
        child.Measured({**order("static"), **changes}).start(False)
    assert said in child.reason(caught.value)


def test_a_process_that_does_nothing_is_ended(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match="nothing happened for 10 ms"):
        Worker(order("static"), tmp_path, silence=0.01)


def test_a_process_that_dies_says_its_last_words(tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text("import os, sys\nprint('the end', file=sys.stderr, flush=True)\nos._exit(75)\n")
    with pytest.raises(WorkerFailed, match="exit code 75: the end"):
        Worker(order("static", plugins=["dies"]), tmp_path, environment={"PYTHONPATH": str(tmp_path)})


def test_a_neighbour_uses_a_core_only_while_it_is_let_run() -> None:
    neighbour = Neighbour()
    process = psutil.Process(neighbour._children[0].pid)

    def used(seconds: float) -> float:
        before = process.cpu_times().user
        time.sleep(seconds)
        return process.cpu_times().user - before

    try:
        time.sleep(0.05)  # until it stands still
        assert used(0.1) < 0.02
        with neighbour.running():
            assert any(used(0.1) > 0.02 for _ in range(100))
        time.sleep(0.05)
        assert used(0.1) < 0.02
    finally:
        neighbour.close()
    assert not process.is_running()


def test_caches_lie_below_their_folder(tmp_path: Path) -> None:
    assert all(Path(folder).is_relative_to(tmp_path) and Path(folder).is_dir() for folder in caches(tmp_path).values())


class Clocked:
    """A contender whose steps take half a second of a clock of its own."""

    now, waits = 0.0, 0
    numbers: list[int] = []

    def step(self, number: int) -> float:
        self.numbers.append(number)
        self.now += 0.5
        return 1 / number

    def loss(self, handle: float) -> float:
        return handle

    def synchronize(self) -> None:
        self.waits += 1

    def rest(self) -> None: ...


def test_settling_steps_are_not_timed_and_step_numbers_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    contender, measured = Clocked(), child.Measured.__new__(child.Measured)
    measured.contender, measured._step = contender, 5  # type: ignore[assignment]
    monkeypatch.setattr(child.gc, "collect", lambda: 0)
    monkeypatch.setattr(child.time, "perf_counter", lambda: contender.now)
    assert measured.turn(2, 3, True) == pytest.approx([0.5] * 3)
    assert contender.numbers == [6, 7, 8, 9, 10]
    assert measured.turn(1, 4, False) == pytest.approx([0.5])  # a device that runs ahead: over the whole turn
    assert contender.numbers[-1] == 15 and contender.waits == 3


class InvalidCxxCompiler(RuntimeError):
    """Named as torch's."""


def test_reasons_are_one_line() -> None:
    assert child.reason(UserError("device cpu:\n  can't")) == "device cpu: can't"
    assert child.reason(ValueError("first\nsecond")) == "ValueError: first"
    assert child.reason(ValueError()) == "ValueError: no message"
    outer = RuntimeError("backend failed, see above\nlong trace")
    outer.__cause__ = InvalidCxxCompiler("No working C++ compiler found in g++")
    assert child.reason(outer) == "no working C++ compiler: No working C++ compiler found in g++"
    assert len(child.reason(ValueError("x" * 999))) == 240
