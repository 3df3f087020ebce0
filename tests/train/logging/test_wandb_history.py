"""One W&B run over several attempts, online and offline: every recorded step is there once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ttrain.train.logging.metrics import cut_metrics
from ttrain.train.logging.wandb_logger import WandbLogger, note_earlier_attempts
from ttrain.train.settings import WandbConfig


class Attempt:
    """An attempt of a run in a folder: logs steps as the loop does, file first."""

    def __init__(self, run: Path, fake: Any, mode: str | None, resume_at: int | None = None) -> None:
        self.run, self.fake = run, fake
        if resume_at is not None:
            note_earlier_attempts(run)
            cut_metrics(run / "metrics.jsonl", resume_at)
        self.logger = WandbLogger(WandbConfig(mode=mode), run, {}, None, lambda text: None)
        if mode == "offline":
            (run / "wandb" / f"offline-run-{len(fake.runs)}-{self.logger.run_id}").mkdir(parents=True)

    def steps(self, first: int, last: int) -> Attempt:
        for step in range(first, last + 1):
            lines = [{"step": step, "train/loss": float(step)}]
            lines += [{"step": step, "val/loss": float(step)}] if step % 4 == 0 else []
            for line in lines:
                with open(self.run / "metrics.jsonl", "a") as file:
                    file.write(json.dumps(line) + "\n")
                self.logger.log(line)
        return self

    def end(self) -> None:
        self.logger.close(0)


def told(runs: list[Any]) -> list[tuple[int, str]]:
    return [(line["step"], key) for run in runs for line in run.logged for key in line if key != "step"]


def expected(last: int) -> list[tuple[int, str]]:
    pairs = [(step, "train/loss") for step in range(1, last + 1)]
    return sorted([*pairs, *((step, "val/loss") for step in range(4, last + 1, 4))])


@pytest.fixture
def online(fake: Any) -> Any:
    fake.key = "x"
    return fake


CASES: dict[str, tuple[list[tuple[str, int, int, int | None]], list[int]]] = {  # attempts, and whose lines W&B has
    "online": ([("online", 1, 10, None), ("online", 7, 12, 6)], [0, 1]),
    "offline": ([("offline", 1, 5, None), ("offline", 4, 9, 3), ("offline", 9, 12, 8)], [2]),
    "offline between": ([("online", 1, 6, None), ("offline", 5, 9, 4), ("online", 9, 12, 8)], [0, 2]),
    "from the start": ([("online", 1, 3, None), ("online", 1, 12, 0)], [0, 1]),  # before a first save
}


@pytest.mark.parametrize("killed", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_attempts_repeat_nothing_and_miss_nothing(tmp_path: Path, online: Any, case: str, killed: bool) -> None:
    """An offline attempt lacks nothing that is not online, and the last one takes the place of those before."""
    attempts, counted = CASES[case]
    for mode, first, last, resume_at in attempts:
        attempt = Attempt(tmp_path, online, mode, resume_at).steps(first, last)
        if not killed:
            attempt.end()
    assert sorted(told([online.runs[number] for number in counted])) == expected(12)
    assert {run.id for run in online.runs} == {"run1"}
    if case == "offline":
        assert [path.name for path in (tmp_path / "wandb").glob("offline-run-*")] == ["offline-run-3-run1"]
        assert len(list((tmp_path / "wandb" / "superseded").iterdir())) == 2
    if case == "offline between":
        later = [(7, "train/loss"), (8, "train/loss"), (8, "val/loss"), (9, "train/loss")]
        assert sorted(told(online.runs[1:2])) == later


def test_an_offline_attempt_that_was_uploaded_is_not_repeated(tmp_path: Path, online: Any) -> None:
    Attempt(tmp_path, online, "offline").steps(1, 6).end()
    (tmp_path / "wandb" / "offline-run-1-run1" / "run.wandb.synced").touch()
    Attempt(tmp_path, online, "online", resume_at=4).steps(5, 8).end()
    assert sorted(told(online.runs)) == expected(8)


def test_steps_that_another_logger_recorded_are_told_later(tmp_path: Path, online: Any) -> None:
    Attempt(tmp_path, online, "online").steps(1, 4).end()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "train/loss": 5.0}\n')
    Attempt(tmp_path, online, "online", resume_at=5).steps(6, 8).end()
    assert sorted(told(online.runs)) == expected(8)


VARIABLES = {
    "WANDB_PROJECT": "theirs", "WANDB_ENTITY": "team", "WANDB_NAME": "named", "WANDB_RUN_GROUP": "grouped",
    "WANDB_TAGS": "a,b", "WANDB_MODE": "offline", "WANDB_NOTES": "noted", "WANDB_JOB_TYPE": "job",
    "WANDB_CONSOLE": "wrap", "WANDB_INIT_TIMEOUT": "7",
}  # fmt: skip
KEYS = {"project": "mine", "entity": "me", "run_name": "called", "group": "ours", "tags": ["c"], "mode": "offline"}


@pytest.mark.parametrize("variables", [{}, VARIABLES])
@pytest.mark.parametrize("keys", [{}, KEYS])
def test_a_key_wins_over_the_environment_and_that_over_our_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], variables: dict[str, str]
) -> None:
    wandb = pytest.importorskip("wandb")
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setenv("WANDB_SILENT", "true")
    wandb.teardown()  # a session keeps the environment that it was started in
    place = tmp_path / "elsewhere"
    place.mkdir()
    if variables:
        monkeypatch.setenv("WANDB_DIR", str(place))
    run = tmp_path / "run"
    run.mkdir()
    said: list[str] = []
    logger = WandbLogger(WandbConfig(**keys), run, {}, None, said.append)
    settings = logger._run.settings
    logger.close(0)
    default = ("ttrain", None, "run", None, None)
    theirs = ("theirs", "team", "named", "grouped", ("a", "b")) if variables else default
    expected = ("mine", "me", "called", "ours", ("c",)) if keys else theirs
    found = (settings.project, settings.entity or None, settings.run_name, settings.run_group, settings.run_tags)
    assert (*found[:4], found[4] and tuple(found[4])) == expected
    assert (settings.console, settings.init_timeout) == (("wrap", 7) if variables else ("off", 60))
    assert (settings.run_notes, settings.run_job_type) == (("noted", "job") if variables else (None, None))
    (written,) = ((place if variables else run) / "wandb").glob("offline-run-*")
    assert written.name.endswith(f"-{logger.run_id}")
    again = WandbLogger(WandbConfig(**keys), run, {}, None, said.append)
    again.close(0)
    assert again.run_id == logger.run_id
    assert len(list(written.parent.glob("offline-run-*"))) == len(list((written.parent / "superseded").iterdir())) == 1


def test_a_run_that_goes_on_stays_in_its_project(tmp_path: Path, online: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "first")
    Attempt(tmp_path, online, None).steps(1, 2).end()
    monkeypatch.setenv("WANDB_PROJECT", "second")
    Attempt(tmp_path, online, None, resume_at=2).steps(3, 4).end()
    assert [init["project"] for init in online.inits] == ["first", "first"]
