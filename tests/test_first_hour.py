"""tools/first_hour.py at tiny sizes on a CPU: a run's life and a benchmark; and what a failure and a lack do."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import page
from tests.forked import ForkedChild
from tools import first_hour
from tools.first_hour import Failed, Hour, Part, main
from ttrain.bench import run


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (first_hour, run):
        monkeypatch.setattr(module, "Child", ForkedChild)


def results(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "results.json").read_text())
    return found


@pytest.mark.slow
def test_a_run_lives_and_a_benchmark_fills_a_table(inside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["out", "--device", "cpu", "--tiny", "--parts", "nano,bench_nano"]) == 0
    found = results(inside / "out")
    life, bench = found["parts"]
    assert found["complete"] and found["notes"] == [] and [life["status"], bench["status"]] == ["ok", "ok"]
    assert life["bits"]["tensors"] > 10 and life["bits"]["unlike"] == life["bits"]["losses_apart"] == 0
    assert list(life["seconds"]) == ["train", "resume", "sample", "eval", "export"]
    assert "step_000000" in (inside / "out/logs/nano_resume.txt").read_text()
    assert bench["numbers"]["static_ms"] > 0
    monkeypatch.setattr(page, "RESULTS", inside / "out")
    table = page.written("<!-- table results: contender, ms/step -->\n<!-- /table -->")
    assert "| eager |" in table and "python -m tools.first_hour out" in table


def test_parts_fail_and_lack_by_name_and_the_others_go_on(inside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(hour: Hour) -> None:
        hour.finish("sleep", hour.start("sleep", "-c", "import time; time.sleep(60)"))

    def wrong(hour: Hour) -> None:
        hour.facts["seen"] = 1
        hour.finish("wrong", hour.start("wrong", "-c", "raise SystemExit('it went wrong')"))

    parts = (Part("slow", 0.5, slow), Part("wrong", 9, wrong), Part("lacking", 9, wrong, ("no_such_library",)),
             Part("good", 9, lambda hour: None))  # fmt: skip
    monkeypatch.setattr(first_hour, "PARTS", parts)
    began = time.monotonic()
    assert main(["out", "--parts", "slow,wrong,lacking,good"]) == 1 and time.monotonic() - began < 20
    found = results(inside / "out")
    assert [part["status"] for part in found["parts"]] == ["failed", "failed", "skipped", "ok"]
    assert found["parts"][1]["seen"] == 1
    assert found["notes"] == [
        "slow: failed, sleep: it was stopped as the part's time was used up.",
        "wrong: failed, wrong: exit code 1: it went wrong.",
        "lacking: skipped, no_such_library missing.",
    ]
    assert main(["later", "--parts", "good", "--seconds", "1"]) == 0
    assert results(inside / "later")["parts"][0]["reason"] == "the time is used up"


def test_runs_that_differ_fail_where_the_first_can_be_repeated(inside: Path) -> None:
    hour = Hour(inside, "cpu", tiny=True, stop=time.monotonic() + 100, part="runs")
    given = ["model=mlp", "data=regression", "device.threads=1", "engine=static", "train.steps=10", "logger=jsonl"]
    for seed in (1, 2):
        hour.ttrain(f"{seed}", *given, f"run.seed={seed}", f"run.dir={seed}")
    with pytest.raises(Failed, match="tensors differ"):
        first_hour.judge(hour, inside / "1", inside / "2", [*given, "run.seed=1"])
    assert hour.facts["bits_again"]["unlike"] == 0 < hour.facts["bits"]["unlike"]
