"""A real measuring process, what it answers, and how it may end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.bench.pretend import ONE_THREAD, case
from ttrain.bench import child, contender, run
from ttrain.bench.run import Worker, WorkerFailed
from ttrain.core.errors import UserError
from ttrain.engine.settings import EngineConfig


def order(name: str, size: str = "4x8", mode: str = "none") -> tuple[Any, ...]:
    return "make", [], name, case(size), ONE_THREAD, EngineConfig(), mode


def test_a_process_builds_compares_and_times(tmp_path: Path) -> None:
    """Two ranks of PyTorch are the reference; memory is that of what the plan can speak of."""
    weights = str(tmp_path / "weights")
    workers = Worker(tmp_path / "eager", 2), Worker(tmp_path / "zero1", 2), Worker(tmp_path / "static")
    reference, small, ours = workers
    try:
        reference.ask(*order("eager", mode="ddp"))
        expected = reference.ask("start")["losses"]
        reference.ask("write_weights", weights)
        small.ask(*order("static", mode="zero1"))
        assert small.ask("start")["losses"] == pytest.approx(expected, rel=1e-6)
        assert small.ask("weight_difference", weights) < 1e-5
        ours.ask(*order("static", "512x256"))
        found = ours.ask("memory")
        assert 0 < found["step_seconds"] < found["first_step_s"] and len(found["losses"]) == 5
        # Two weights and two biases with their gradients, and at least the batch and one layer's activations.
        assert found["planned_bytes"] > 4 * (4 * 256 * 256 + 3 * 512 * 256)
        assert 0 < found["used_bytes"] < 4 * found["planned_bytes"] and found["used_bytes"] < found["peak_bytes"]
        assert len(ours.ask("turn", 1, 3, True)) == 3 and len(ours.ask("turn", 1, 3, False)) == 1
        facts = ours.ask("facts", False)
        assert facts["device"]["threads"] == 1 and facts["facts"]["peak_flops"] > 1e6
        assert facts["facts"]["counters"]["allocations_after_first"] == 0 and facts["facts"]["roof_ms"] > 0
    finally:
        for worker in workers:
            worker.close()
    assert not any(psutil.pid_exists(process.pid) for worker in workers for process in worker.children)


def test_what_goes_wrong_in_a_process_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_CLOSING_SECONDS", 0.1)
    (tmp_path / "dies.py").write_text("import os, sys\nprint('the end', file=sys.stderr, flush=True)\nos._exit(75)\n")
    worker = Worker(tmp_path, environment={"PYTHONPATH": str(tmp_path)})
    try:
        for words, said in (
            (order("statik"), "not registered. Did you mean 'static'?"),
            (("make",), "TypeError"),
            (("make", ["dies"], *order("static")[2:]), "exit code 75: the end"),
        ):
            with pytest.raises(WorkerFailed) as caught:
                worker.ask(*words)
                worker.ask("start")
            assert said in str(caught.value)
    finally:
        worker.close()
    worker = Worker(tmp_path, silence=0.01)
    with pytest.raises(WorkerFailed, match="nothing happened for 10 ms"):
        worker.ask(*order("static"))
    worker.close()


class Clocked(contender.Contender):
    """A contender whose steps take half a second of a clock of its own."""

    description = "clocked"

    def __init__(self) -> None:
        super().__init__(case("4x8"), ONE_THREAD)
        self.now, self.waits, self.numbers = 0.0, 0, list[int]()

    def build(self) -> None: ...

    def weight(self, path: str) -> Any: ...

    def step(self, number: int) -> float:
        self.numbers.append(number)
        self.now += 0.5
        return 1 / number

    def synchronize(self) -> None:
        self.waits += 1


def test_settling_steps_are_not_timed_and_step_numbers_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    clocked = Clocked()
    monkeypatch.setattr(contender.gc, "collect", lambda: 0)
    monkeypatch.setattr(contender.time, "perf_counter", lambda: clocked.now)
    assert clocked.turn(2, 3, True) == pytest.approx([0.5] * 3)
    assert clocked.numbers == [1, 2, 3, 4, 5]
    assert clocked.turn(1, 4, False) == pytest.approx([0.5])  # a device that runs ahead: over the whole turn
    assert clocked.numbers[-1] == 10 and clocked.waits == 3


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
