"""A real measuring process, what it finds, and how it may end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.bench.pretend import ONE_THREAD, SMALL_MLP
from ttrain.bench.process import Caches, Neighbour, WorkerFailed, events
from ttrain.bench.reason import reason
from ttrain.bench.workload import Case
from ttrain.core.errors import UserError


def order(**changes: Any) -> dict[str, Any]:
    return {
        "do": "together", "case": Case(SMALL_MLP, "fp32", 1).to_dict(), "contenders": ["eager", "static", "statik"],
        "plugins": [], "device": vars(ONE_THREAD), "engine": {"name": "static", "rematerialize": True},
        "reference": "eager", "seconds": 0.05, "rounds": 3, **changes,
    }  # fmt: skip


def test_a_process_builds_checks_and_times(tmp_path: Path) -> None:
    found = list(events(order(), tmp_path / "p"))
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for event in found:
        by_kind.setdefault(event["event"], []).append(event)
    assert by_kind["environment"][0]["device"]["threads"] == 1
    assert [event["contender"] for event in by_kind["built"]] == ["eager", "static"]
    assert "statik: not registered. Did you mean 'static'?" in by_kind["failed"][0]["reason"]
    assert [event["problem"] for event in by_kind["checked"]] == [None, None]
    assert len(by_kind["round"]) == 3
    turns = by_kind["round"][0]["turns"]
    assert {turn["contender"] for turn in turns} == {"eager", "static"}
    assert all(seconds > 0 for turn in turns for seconds in turn["seconds"])
    counters = by_kind["facts"][1]["facts"]["counters"]
    assert counters["allocations_after_first"] == 0


def test_turns_beside_a_neighbour_are_rows_of_their_own(tmp_path: Path) -> None:
    asked = order(contenders=["static"], rounds=2, seconds=0.01, beside="same")
    found = list(events(asked, tmp_path / "p"))
    assert [event["contender"] for event in found if event["event"] == "seated"] == ["static", "static beside"]
    turns = [{turn["contender"] for turn in event["turns"]} for event in found if event["event"] == "round"]
    assert turns == [{"static", "static beside"}] * 2


def test_a_neighbour_uses_a_core_only_while_it_is_let_run() -> None:
    neighbour = Neighbour()
    process = psutil.Process(neighbour._child.pid)

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


def test_a_start_alone_tells_time_and_memory(tmp_path: Path) -> None:
    (found,) = events(order(do="alone", contenders=["static"]), tmp_path / "p")
    assert found["event"] == "alone"
    assert 0 < found["build_s"] < found["first_step_s"] < 60
    assert 2**26 < found["base_bytes"] <= found["peak_bytes"] < 2**33
    assert len(found["losses"]) == 5


def test_a_process_that_fails_says_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match=r"exit code 1: KeyError: 'case'"):
        list(events({"do": "alone", "plugins": [], "contenders": ["static"]}, tmp_path / "p"))


def test_a_process_that_says_nothing_is_ended(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match="nothing happened for 10 ms"):
        list(events(order(), tmp_path / "p", silence=0.01))


def test_compiled_code_of_all_comes_together(tmp_path: Path) -> None:
    caches = Caches(tmp_path)
    for name in ("compile", "traced"):
        folder = Path(caches.of(name)["TORCHINDUCTOR_CACHE_DIR"])
        (folder / name).write_text(name, "utf-8")
    together = Path(caches.all()["TORCHINDUCTOR_CACHE_DIR"])
    assert {path.name for path in together.iterdir()} == {"compile", "traced"}


class InvalidCxxCompiler(RuntimeError):
    """Named as torch's."""


def test_reasons_are_one_line() -> None:
    assert reason(UserError("device cpu:\n  can't")) == "device cpu: can't"
    assert reason(ValueError("first\nsecond")) == "ValueError: first"
    assert reason(ValueError()) == "ValueError: no message"
    outer = RuntimeError("backend failed, see above\nlong trace")
    outer.__cause__ = InvalidCxxCompiler("No working C++ compiler found in g++")
    assert reason(outer) == "no working C++ compiler: No working C++ compiler found in g++"
    assert len(reason(ValueError("x" * 999))) == 240
