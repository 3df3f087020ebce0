"""A run whose length is told in minutes or tokens: how many steps that is, and that these stay and change no bit."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import Told
from tests.parallel.forks import TINY, Forks
from tests.train.conftest import MakeTraining
from tests.train.reading import events, losses, steps_on_disk, tensors
from ttrain.cli import main
from ttrain.config.compose import load
from ttrain.config.saved import continued
from ttrain.config.schema import to_dict
from ttrain.config.validate import typed_config
from ttrain.core.errors import ConfigError
from ttrain.tasks.training import budget
from ttrain.tasks.training.expected import schedule_of, steps_within
from ttrain.train.checkpoint.checkpoint import read_checkpoint, read_manifest
from ttrain.train.loop import loop as module
from ttrain.train.runs.run_directory import read_config

SMALL = ["model=mlp", "model.width=8", "data=regression", "data.examples=64", "device=cpu", "device.threads=1"]
SMALL += ["logger=jsonl", "train.batch_size=4", "train.eval_every=10", "train.save_every=15", "train.peak_tflops=1"]
MINUTES = 0.5


def expected_steps(left: float, done: int = 0, step: float = 0.5) -> int:
    """What a walk over the steps of SMALL finds, if an evaluation, a save, and what ends a run besides take 1 s each.

    Each evaluation may be the best so far, and is saved then.
    """
    used = 0.0
    for number in count(done + 1):
        used += step + 2.0 * (number % 10 == 0) + 1.0 * (number % 15 == 0)
        if used + 2.0 * (number % 10 != 0) + 2.0 > left:
            return number - 1
    raise AssertionError


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a run is measured, a second passes between any two looks at the clock."""
    seconds = count()
    monkeypatch.setattr(budget, "time", SimpleNamespace(perf_counter=lambda: float(next(seconds))))


def run(*overrides: str) -> int:
    return main([*SMALL, *overrides])


def steps_of(folder: str) -> Any:
    return read_config(Path(folder))["train"]["steps"]


def test_the_steps_of_tokens_are_those_that_read_them() -> None:
    def steps(*overrides: str) -> Any:
        return load(["model.context=64", "train.batch_size=16", *overrides]).train.steps

    assert steps("train.tokens=1024") == 1 and steps("train.tokens=1025") == 2 and steps("train.tokens=1e6") == 977
    growing = ["train.gradient_accumulation=4", "train.batch_schedule=[4,8,16]", "train.length_schedule=[32,64]"]
    sizes = [4 * 32] * 5 + [8 * 64] * 5 + [16 * 64] * 200
    for tokens in (1, 640, 641, 3201, 100_000):
        found = steps(*growing, "train.phase_steps=5", f"train.tokens={tokens}")
        assert sum(sizes[: found - 1]) < tokens <= sum(sizes[:found])
    config = load([*SMALL, "train.tokens=33"])  # examples count as tokens
    assert config.train.steps == 9 and typed_config(to_dict(config), config.source) == config


def test_one_key_says_how_long_a_run_is_and_the_command_line_wins() -> None:
    config = load(["recipe=char-0.8m", "data.path=x.txt", "train.minutes=5"])
    assert (config.train.minutes, config.train.steps, config.train.tokens) == (5, None, None)
    with pytest.raises(ConfigError, match=r"a run measures its steps first. Give train\.steps"):
        _ = config.train.last
    fixed = {**to_dict(config), "train": {**to_dict(config)["train"], "steps": 734}}

    def again(*overrides: str) -> tuple[Any, ...]:
        train = continued(fixed, load(overrides)).train
        return train.steps, train.minutes, train.tokens

    command = "recipe=char-0.8m", "data.path=x.txt", "train.minutes=5"
    assert again(*command) == again("train.minutes=5.0") == again("optimizer.lr=1e-3") == (734, 5, None)
    assert again("train.minutes=6") == (None, 6, None)
    assert again("train.steps=900") == (900, None, None)
    assert again("train.tokens=768001") == (1001, None, 768001)  # of 12 sequences of 64 tokens
    for wrong in (["train.steps=10", "train.tokens=9"], ["train.steps=null"], ["train.minutes=nan"]):
        with pytest.raises(ConfigError):
            load(wrong)


@pytest.mark.parametrize("save_every", [7, None])
def test_as_many_steps_as_fit_beside_evaluations_and_saves(save_every: int | None) -> None:
    """Against a walk over the steps of a run whose second half has twice the tokens."""
    config = load(["train.minutes=0.5", "train.gradient_accumulation=2", "train.batch_schedule=[8,16]"])
    train = replace(config.train, phase_steps=20, eval_every=6, save_every=save_every)
    config = replace(config, train=train)
    schedule, hold, save = schedule_of(config), 0.125, 0.5
    for spent, done in ((0.0, 0), (12.5, 13), (31.0, 13)):
        used, last = spent, done
        while True:
            number = last + 1
            used += 0.25 * schedule.at(number).rows / 8
            due = number % 6 == 0
            used += due * (0.75 + hold) + hold * (save_every is not None and (number % save_every == 0))
            end = save + (0.75 + hold) * (not due)
            if used + end > 30:
                break
            last = number
        parts = (0.25, 0.75, hold, save)
        found = steps_within(config, spent, done, parts)
        assert abs(found - last) <= (save_every is not None and done > 0), (found, last)
    assert steps_within(config, 0.0, 0, (1000.0, 0, 0, 0)) == 1


def test_the_loop_counts_steps_evaluations_and_saves_but_not_what_compiles(
    make_training: MakeTraining, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes 1 s, later 2 s, the first one 50 s more; an evaluation 4 s and a save 8 s."""
    now = [100.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0], time=lambda: 0.0))

    def takes(work: Any, seconds: Any) -> Any:
        def timed(*given: Any, **named: Any) -> Any:
            now[0] += next(seconds)
            return work(*given, **named)

        return timed

    training = make_training(steps=12, minutes=1.0, eval_every=4, save_every=None, keep_best=False)
    loop, said = training.loop, []
    monkeypatch.setattr(loop.context.loggers.console, "say", said.append)
    loop.train_step = takes(loop.train_step, iter([51.0, 1.0, 1.0, 1.0, *[2.0] * 8]))
    loop.evaluation = takes(loop.evaluation, iter([4.0] * 3))  # type: ignore[assignment]
    saves = iter([8.0] * 9)
    loop.checkpoints.save = takes(loop.checkpoints.save, saves)  # type: ignore[method-assign]
    progress = loop.run()
    steps, evaluations = 4 * 1.0 + 8 * 2.0, 3 * 4.0
    assert progress.spent == steps + evaluations + 8.0 * (9 - len([*saves]))
    told = events(training.run_directory.path, "pace")
    assert [event["step"] for event in told] == [4, 12]
    offs = [8 / 60 * 3 - 1, progress.spent / 60 - 1]
    assert [event["off"] for event in told[:2]] == [round(off, 4) for off in offs]
    assert said[-1] == f"train.minutes=1: {abs(offs[1]):.1%} less time than planned up to step 12 of 12."


@pytest.mark.usefixtures("inside", "ticks")
def test_a_run_of_minutes_is_the_run_of_its_steps_and_keeps_them(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while it is measured, after a save, at its end; then it gets more minutes."""
    steps = expected_steps(60 * MINUTES)
    with monkeypatch.context() as patch:
        patch.setattr(budget, "read_manifest", lambda path: (_ for _ in ()).throw(KeyboardInterrupt))
        assert run("run.dir=run", f"train.minutes={MINUTES}") == 130
    assert steps_of("run") is None and not list(Path("run/checkpoints").iterdir())
    assert events("run")[-1]["kind"] == "interrupted"

    printed = told(*SMALL, "run.dir=run", "resume=auto", f"train.minutes={MINUTES}")
    assert (
        f"train.minutes={MINUTES} allows {steps} steps of 500 ms, with evaluations of 1.0 s and saves of 1.0 s."
        in printed
    )
    assert steps_of("run") == steps and steps_on_disk("run")[-1] == steps
    assert not [path for path in Path("run/checkpoints").iterdir() if path.name.startswith(".")]
    assert run("run.dir=plain", f"train.steps={steps}") == 0
    whole, expected = losses("plain"), tensors("plain")
    assert losses("run") == whole and tensors("run") == expected

    shutil.rmtree(f"run/checkpoints/step_{steps:08d}")
    Path("run/summary.json").unlink()
    monkeypatch.setattr(budget, "read_manifest", None)  # nothing is measured again
    assert run("run.dir=run", "resume=auto", f"train.minutes={MINUTES}") == 0
    assert losses("run") == whole and tensors("run") == expected
    assert steps_of("run") == steps and len(events("run", "budget")) == 1

    # More minutes are measured anew, and what the run has used counts.
    used = read_checkpoint(Path(f"run/checkpoints/step_{steps:08d}")).progress["spent"]
    monkeypatch.setattr(budget, "read_manifest", read_manifest)
    more = expected_steps(60 * 2 * MINUTES - used, steps, step=1 / 4)
    assert run("run.dir=run", "resume=auto", f"train.minutes={2 * MINUTES}") == 0
    assert steps_of("run") == more > steps and steps_on_disk("run")[-1] == more


@pytest.mark.usefixtures("inside", "ticks")
def test_keys_that_ask_for_more_steps_a_tiny_budget_and_what_measures_nothing(told: Told, capsys: Any) -> None:
    assert "allows 1 step of " in told(*SMALL, "run.dir=tiny", "train.minutes=0.001")
    assert steps_of("tiny") == 1 and steps_on_disk("tiny") == [1]
    refused = told(*SMALL, "run.dir=refused", f"train.minutes={MINUTES}", "schedule.warmup=900", code=2)
    steps = expected_steps(60 * MINUTES)
    assert f"allows {steps} steps. schedule.warmup=900: must be at most train.steps={steps}." in refused
    assert not Path("refused").exists()
    told("run.dir=none", "device=null", "data.max_bytes=100000", "train.minutes=1")
    assert not Path("none").exists()


@pytest.mark.usefixtures("inside", "ticks")
def test_growing_batches_and_sequences_take_as_long_as_their_tokens() -> None:
    words = ["data=stdlib", "data.max_bytes=100000", "model.layers=1", "model.width=16", "model.heads=1", "device=cpu"]
    words += ["model.context=32", "train.batch_size=4", "train.gradient_accumulation=2", "train.phase_steps=8"]
    words += ["train.batch_schedule=[2,4]", "train.length_schedule=[16,32]", "train.eval_every=null", "logger=jsonl"]
    words += ["train.eval_sequences=8", "train.save_every=null", "device.threads=1", "sample.tokens=4"]
    # A second each for an evaluation, its save, the last save, and the end; steps of 1/2 s, after 8 of them of 2 s.
    left = 30.0 - 4
    steps = 8 + int((left - 8 * 0.5) // 2.0)
    assert main([*words, "run.dir=grows", "train.minutes=0.5"]) == 0 and steps_of("grows") == steps
    assert main([*words, "run.dir=plain", f"train.steps={steps}"]) == 0
    assert tensors("grows") == tensors("plain") and losses("grows") == losses("plain")


def test_ranks_take_the_steps_of_the_leading_one(tmp_path: Path) -> None:
    words = [word for word in TINY if not word.startswith("train.steps=")]
    words += ["parallel=zero1"]

    def ranks(name: str, *own: str) -> None:
        begun = Forks([[*words, f"run.dir={tmp_path / name}", *own]] * 2, tmp_path / f"{name}.log")
        assert begun.wait() and begun.codes == [0, 0], begun.said("")

    ranks("minutes", "train.minutes=0.002")
    steps = read_config(tmp_path / "minutes")["train"]["steps"]
    ranks("plain", f"train.steps={steps}")
    assert tensors(tmp_path / "minutes") == tensors(tmp_path / "plain")
    assert losses(tmp_path / "minutes") == losses(tmp_path / "plain")
