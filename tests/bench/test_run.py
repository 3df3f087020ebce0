"""Contenders, the order of turns and the texts of rows; and a real measuring process with its ways to end."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.bench.pretend import ONE_THREAD, QUICK, Processes, case, failing
from tests.forked import ForkedChild
from ttrain.bench import child, contender, run
from ttrain.bench.contender import STEPS
from ttrain.bench.report import notes, table
from ttrain.bench.results import Result
from ttrain.bench.run import LEAST_ROUNDS, Bench, Entry, Worker, WorkerFailed, entries_of
from ttrain.cli import main
from ttrain.core.errors import UserError
from ttrain.core.files import to_json
from ttrain.device.settings import DeviceConfig
from ttrain.device.ttnn.settings import TenstorrentConfig
from ttrain.engine.settings import EngineConfig
from ttrain.tasks import bench as task


def ran(processes: Processes, device: DeviceConfig = ONE_THREAD, clock: Any = None, **changes: Any) -> dict[str, Any]:
    """The only case of a benchmark, as JSON, with its rows by contender."""
    config = replace(QUICK, **changes)
    result = Result("gpt", asdict(config), {"command": "a command"})
    save = lambda: to_json(result.to_dict())  # noqa: E731 - raises for what JSON can't hold
    made = Bench(config, device, EngineConfig(), 1, [], result, save, lambda _: None, processes)  # type: ignore[arg-type]
    made.clock = clock or made.clock
    made.run()
    assert made.result.complete and processes.open == 0
    values = result.to_dict()
    return {
        **values["cases"][0],
        "whole": values,
        "rows": {row["contender"]: row for row in values["cases"][0]["rows"]},
    }


def test_everybody_has_one_turn_per_round_in_an_order_that_changes_but_can_be_repeated() -> None:
    processes, again = Processes(), Processes()
    rows = ran(processes, rounds=12, seconds=1e9)["rows"]
    turns = processes.names("turn")
    rounds = [tuple(turns[start : start + 3]) for start in range(0, 36, 3)]
    assert len(turns) == 36 and all(set(each) == {"eager", "compile", "static"} for each in rounds)
    assert len(set(rounds)) > 3 and [len(row["round_ms"]) for row in rows.values()] == [12] * 3
    ran(again, rounds=12, seconds=1e9)
    assert again.names("turn") == turns


@pytest.mark.parametrize(
    ("step_seconds", "settle", "timed"), [(0.1, 2, 8), (0.9, 0, 1), (10.0, 0, 1), (0.001, 200, 800), (0.0, 400, 1600)]
)
def test_the_size_of_a_turn_of_a_second(step_seconds: float, settle: int, timed: int) -> None:
    entry = Entry("static", case("4x8"), Path())
    entry.size(1.0, step_seconds)
    assert (entry.settle, entry.timed) == (settle, timed)


@pytest.mark.parametrize(("seconds", "rounds"), [(0.01, LEAST_ROUNDS), (10.0, LEAST_ROUNDS + 9)])
def test_time_ends_it_but_not_before_a_spread_can_be_told(seconds: float, rounds: int) -> None:
    ticks = iter(range(1000))
    found = ran(Processes(), clock=lambda: float(next(ticks)), seconds=seconds, rounds=50)["rows"]["static"]
    assert found["step_ms"]["rounds"] == rounds


def test_rivals_that_are_slow_do_not_hold_up_a_case() -> None:
    """Three steps of eager do not fit into its time, so it has no turn, and no other form of PyTorch is started."""
    slow = {"description": "", "first_step_s": 31.0, "losses": [1.0, 0.5], "rss": 1, "step_seconds": 30.0}
    processes = Processes()
    processes.answers["eager", "start"] = {**slow, "later_s": [30.0]}
    found = ran(processes, seconds=15.0, rounds=4)
    rows, asked = found["rows"], {name: words for name, command, *words in processes.asked if command == "start"}
    assert asked == {"eager": [STEPS, 15.0], "static": [2, math.inf]} and set(processes.names("turn")) == {"static"}
    assert rows["compile"]["status"] == "left out" and "3 steps of eager take longer" in rows["compile"]["reason"]
    assert rows["eager"]["round_ms"] == [30e3] and rows["static"]["times_as_fast"]["ratio"] == pytest.approx(6e4)
    told = [note for note in notes(found["whole"]) if "rounds" in note]
    assert told == ["4x8 in fp32: 1 of 4 rounds fitted into bench.seconds=15."]


def test_mfu_is_of_the_best_product_of_anybody_and_of_a_step_that_is_faster() -> None:
    processes = Processes()
    processes.answers["static", "facts"] = {"device": {}, "facts": {"peak_flops": 4e11}, "planned_ms": None}
    found = ran(processes)
    assert found["rows"]["eager"]["mfu"] == pytest.approx(found["flops_per_step"] / 1e-3 / 4e11)
    slow = {"device": {}, "facts": {"peak_flops": 1.0}, "planned_ms": None}
    assert [row["mfu"] for row in ran(Processes(facts=slow))["rows"].values()] == pytest.approx([0.5, 0.5, 1.0])


def test_numbers_of_a_row() -> None:
    case = ran(Processes())
    static = case["rows"]["static"]
    assert static["step_ms"]["median"] == pytest.approx(0.5)  # the median of 0.5, 0.5 and 1.5
    assert static["units_per_s"] == pytest.approx(4 / 0.5e-3)
    assert static["mfu"] == pytest.approx(case["flops_per_step"] / 0.5e-3 / 1e11)
    assert static["times_as_fast"]["ratio"] == pytest.approx(2.0)
    assert (static["side"], static["status"], static["checked_against"]) == ("ttrain", "ok", "eager")
    assert case["rows"]["eager"]["checked_against"] == "eager"


def test_starts_come_in_turns_with_caches_that_are_empty_at_first() -> None:
    seconds = iter([5.0, 1.0, 9.0, 3.0, 7.0, 2.0])
    processes = Processes(start=lambda: {"description": "", "first_step_s": next(seconds)})
    row = ran(processes, measure=["start"], starts=3, engines=[], baselines=["compile"])["rows"]["compile"]
    caches = [environment["TORCHINDUCTOR_CACHE_DIR"] for environment in processes.started if environment]
    assert len(caches) == 6 and len(set(caches)) == 3 and caches[0] == caches[1]
    assert all(Path(folder).parent.name == "compile" for folder in caches)
    assert (row["cold_s"], row["warm_s"]) == ([5.0, 9.0, 7.0], [1.0, 3.0, 2.0])
    rows = ran(Processes(), measure=["start"], baselines=["eager"])["rows"]
    assert [len(row["cold_s"]) + len(row["warm_s"]) for row in rows.values()] == [1, 1]  # they compile nothing


def test_memory_is_that_of_a_process_of_its_own_beside_the_plan() -> None:
    found = ran(processes := Processes(), measure=["memory", "steps"], baselines=["eager"])
    assert processes.names("memory") == ["eager", "static"] == processes.names("start")
    titles, *lines = table(found["whole"])
    cells = dict(zip(titles, lines[1], strict=True))
    assert [cells[name] for name in ("planned memory", "memory", "of process")] == ["512.0 MiB", "1.0 GiB", "3.0 GiB"]


@pytest.mark.parametrize("difference", [0.5, float("nan")])
def test_other_work_makes_a_row_invalid_and_it_is_never_compared(difference: float) -> None:
    processes = Processes()
    processes.answers |= {("compile", "weight_difference"): difference, ("compile", "turn"): [1e-9]}
    rows = ran(processes)["rows"]
    assert rows["compile"]["status"] == "invalid" and "times_as_fast" not in rows["compile"]
    assert rows["static"]["times_as_fast"]["ratio"] == pytest.approx(2.0)  # of eager


@pytest.mark.parametrize("command", ["make", "start", "weight_difference", "turn", "facts"])
def test_a_contender_that_fails_takes_no_further_part_and_says_why(command: str) -> None:
    processes = failing("compile", command, "no working C++ compiler")
    rows = ran(processes, rounds=5)["rows"]
    assert (rows["compile"]["status"], rows["compile"]["reason"]) == ("failed", "no working C++ compiler")
    assert processes.names("turn").count("compile") == {"turn": 1, "facts": 5}.get(command, 0)
    assert [rows[name]["status"] for name in ("eager", "static")] == ["ok", "ok"]


def test_what_does_not_fit_into_memory_beside_the_others_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = Processes()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=(3.5 - processes.open) * 2**30))
    rows = ran(processes, engines=["dynamic", "static"])["rows"]
    assert [name for name, row in rows.items() if row["status"] == "left out"] == ["dynamic"]
    assert processes.most == 3


def test_a_device_that_two_processes_can_not_share_is_opened_for_every_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ttrain.device.ttnn.runtime.environment.has_card", lambda: True)
    processes = Processes()
    card = TenstorrentConfig(name="n300")
    rows = ran(processes, card, baselines=[], engines=["static", "traced"], rounds=3, seconds=1e9)["rows"]
    assert processes.most == 1 and len(processes.started) == 2 + 2 * 3
    assert all(len(row["round_ms"]) == 3 and row["facts"] for row in rows.values())


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"ranks": 2}, ["eager ddp x2", "static", "static ddp x2", "static zero1 x2"]),
        ({"baselines": ["eager", "compile"], "engines": ["static", "static"]}, ["eager", "compile", "static"]),
    ],
    ids=str,
)
def test_who_takes_part(changes: dict[str, Any], names: list[str]) -> None:
    config = replace(QUICK, **{"baselines": ["eager"], **changes})
    found = entries_of(config, case(config.size[0]), Path())
    assert [entry.row.contender for entry in found] == names


def test_every_size_in_every_precision_is_a_case_and_what_is_given_twice_counts_once() -> None:
    found = ran(Processes(), size=["4x8", "4x9", "4x8"], precision=["bf16", "fp32"])["whole"]["cases"]
    cases = [(case["size"], case["precision"]) for case in found]
    assert cases == [("4x8", "bf16"), ("4x8", "fp32"), ("4x9", "bf16"), ("4x9", "fp32")]


def test_ctrl_c_keeps_what_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def turn(*_: Any) -> list[float]:
        if len(processes.names("turn")) > 4:
            raise KeyboardInterrupt
        return [1e-3]

    processes = Processes(turn=turn)
    monkeypatch.setattr(task, "Bench", partial(Bench, make_worker=processes))
    overrides = ["bench.engines=static", "bench.baselines=eager", f"bench.out={tmp_path / 'x'}"]
    assert main(["task=bench", "bench=mlp", "bench.size=4x8", *overrides]) == 130
    values = json.loads((tmp_path / "x" / "results.json").read_text("utf-8"))
    assert not values["complete"] and [len(row["round_ms"]) for row in values["cases"][0]["rows"]] == [2, 2]
    shown = capsys.readouterr()
    assert "static" in shown.out and str(tmp_path / "x") in shown.err and processes.open == 0


# a real measuring process


def order(name: str, size: str = "4x8", mode: str = "none") -> tuple[Any, ...]:
    return "make", [], name, case(size), ONE_THREAD, EngineConfig(), mode


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "Child", ForkedChild)


def test_a_process_builds_compares_and_times(tmp_path: Path, forked: None) -> None:
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
        assert facts["facts"]["counters"]["compilations"] == 0 and facts["facts"]["roof_ms"] > 0
    finally:
        for worker in workers:
            worker.close()
    assert not any(psutil.pid_exists(process.pid) for worker in workers for process in worker.children)


def test_what_goes_wrong_in_a_process_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked: None) -> None:
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
    monkeypatch.setattr(run, "SILENCE_SECONDS", 0.01)
    worker = Worker(tmp_path)
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
    monkeypatch.setattr(contender.gc, "freeze", lambda: None)
    for limit, steps in ((0.1, 2), (0.9, 3), (9.0, 5)):
        assert len(clocked.start(5, limit)["losses"]) == steps
    assert clocked.start(1, 9.0)["later_s"] == [0.5]


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
