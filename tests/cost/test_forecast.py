"""Forecasts of a run's time, before its first step and corrected later: the numbers, and when they are told."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from ttrain.cli import main
from ttrain.config.compose import load
from ttrain.config.schema import to_dict
from ttrain.core.units import format_duration
from ttrain.tasks.training.expected import (
    Forecast,
    Pace,
    changed,
    command,
    evaluations_left,
    schedule_of,
    single_changes,
)
from ttrain.train.forecast import step_time as peak
from ttrain.train.forecast.step_time import Rates

HOUR = 3600.0
LONG = Forecast(step=147.0, steps=1000, evaluation=600.0, evaluations=4)
SMALL = ["model.layers=1", "model.width=32", "model.heads=2", "model.context=128", "device=cpu"]
SMALL += ["data.max_bytes=100000"]


def pace(forecast: Forecast, said: list[str], others: Any = lambda: [("less", 0.1)]) -> Pace:
    return Pace(forecast, HOUR, said.append, others)


def test_a_long_run_is_told_with_what_takes_less_and_corrected_once() -> None:
    said: list[str] = []
    told = pace(LONG, said)
    told.announce()
    expected = "about 41 h 30 min: 1000 steps of 2 min 27 s and 4 evaluations of 10 min 00 s"
    assert said[0] == f"This run is expected to take {expected}. It goes on."
    assert [line.split() for line in said[2:]] == [["4", "h", "09", "min", "less"]]
    for seconds in (900.0, 290.0, 298.0, 294.0, 1.0, 1.0):  # the first one compiles, and is not counted
        told(seconds)
    assert len(said) == 4 and said[3].startswith("By its steps 2 to 4, ")
    assert f"about {format_duration(996 * 294 + 4 * 1200)} more: 996 steps of 4 min 54 s" in said[3]
    assert "2 min 27 s a step was expected" in said[3]


def test_a_short_run_says_nothing_and_asks_for_nothing() -> None:
    said: list[str] = []
    told = pace(Forecast(1.0, 1000, 5.0, 4), said, lambda: pytest.fail("asked"))
    told.announce()
    for _ in range(9):
        told(1.0)
    assert not said


def test_a_run_that_turns_out_to_be_long_says_so_when_it_knows() -> None:
    for expected, ratio in ((Forecast(0.0, 1000, 0.0, 4), 1), (Forecast(2.0, 1000, 5.0, 4), 5)):
        said: list[str] = []
        told = pace(expected, said)
        told.announce()
        for seconds in (60.0, 10.0, 10.0):
            told(seconds)
        assert not said
        told(10.0)
        total = 996 * 10 + 4 * 25 * (ratio > 1)
        assert f"This run takes, by its steps 2 to 4, about {format_duration(total)}: " in said[0]
        assert said[2].split() == [*format_duration(0.1 * total).split(), "less"]


@pytest.mark.parametrize("every", [None, 1, 7, 250, 300, 1000, 2000])
def test_evaluations_are_counted_as_the_loop_makes_them(every: int | None) -> None:
    for steps in (1, 250, 1000):
        for step in (0, 1, 249, 250, 999, 1000):
            due = [s for s in range(step + 1, steps + 1) if s == steps or (every is not None and s % every == 0)]
            assert evaluations_left(step, steps, every) == len(due)


def test_growing_steps_are_counted_by_their_tokens() -> None:
    growing = ["model.context=64", "train.length_schedule=[16,32,64]", "train.phase_steps=10", "train.batch_size=4"]
    schedule = schedule_of(load([*growing, "train.gradient_accumulation=2", "train.batch_schedule=[2,4]"]))
    tokens = [2 * 16] * 10 + [4 * 32] * 10 + [4 * 64] * 15
    for step in (0, 4, 10, 29, 35):
        left = tokens[step:]
        found = schedule.in_steps_of(schedule.at(step + 1), step, 35)
        assert found == pytest.approx(sum(left) / left[0] if left else 0)


@pytest.mark.parametrize(
    "overrides",
    [
        ["model=gpt2", "engine=traced", "run.dir=x y"],
        ["recipe=gpt2-124m", "data.path=a b", "device=cpu"],
        ["model=agillm", "train.batch_size=6", "train.gradient_accumulation=3"],
        ["model.context=100", "+precision=bf16"],
    ],
    ids=" ".join,
)
def test_a_command_gives_the_config_that_was_planned(overrides: list[str]) -> None:
    config = load(overrides)
    found = list(single_changes(config, "cpu"))
    assert found
    for changes in [*found, {"model.preset": "0.8M" if "agillm" not in overrides[0] else "small"}]:
        _, _, name, *run = shlex.split(command(config, changes))
        assert name == "ttrain" and not any(override.startswith("run.dir=") for override in run)
        expected, given = to_dict(changed(config, changes)), to_dict(load(run))
        expected["run"]["dir"] = None
        assert given == expected
        assert given["train"]["batch_size"] % given["train"]["gradient_accumulation"] == 0


@pytest.mark.parametrize("engine", ["static", "dynamic"])
def test_a_run_is_expected_to_take_its_operations_over_the_rate(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(peak, "measured_rates", lambda *_: Rates(1e7, 1e30))
    expected: list[Forecast] = []
    announce = Pace.announce
    monkeypatch.setattr(Pace, "announce", lambda self: (expected.append(self.expected), announce(self)))
    overrides = [*SMALL, f"engine={engine}", "train.steps=4", "train.batch_size=4", "train.eval_sequences=12"]
    assert main([*overrides, f"run.dir={tmp_path}/run", "train.long_hours=0.01", "sample.tokens=1"]) == 0
    err = capsys.readouterr().err
    assert main(["task=plan", *overrides, "plan.time=false", f"plan.json={tmp_path}/plan.json"]) == 0
    plan, found = json.loads((tmp_path / "plan.json").read_text("utf-8")), expected[0]
    assert found.step == pytest.approx(plan["flops_per_step"]["total"] / 1e7 / 0.6, rel=0.15) and found.step > 5
    forward = sum(plan["steps"]["evaluate"]["flops"].values())
    assert found.evaluation == pytest.approx(3 * forward / 1e7 / 0.6, rel=0.15)
    assert (found.steps, found.evaluations) == (4, 1)
    assert f"is expected to take about {format_duration(found.total)}: " in err
    assert "train.batch_size=1" in err and "model.context=32" in err and "By its steps 2 to 4" in err
