"""metrics.jsonl and its views."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ttrain.core.errors import UserError
from ttrain.train.logging.loggers import Console, Loggers
from ttrain.train.logging.metrics import MetricsFile, cut_metrics, read_metrics
from ttrain.train.logging.wandb_logger import WandbLogger, note_earlier_attempts
from ttrain.train.settings import WandbConfig


def test_lines_are_on_the_disk_before_the_next_step(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.append({"step": 1, "train/loss": 2.5})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "train/loss": 2.5}\n'
    file.append({"step": 2, "train/loss": float("nan"), "grad_norm": float("inf"), "mfu": None})
    line = (tmp_path / "metrics.jsonl").read_text().splitlines()[1]
    nothing = dict.fromkeys(("train/loss", "grad_norm", "mfu"))
    assert json.loads(line, parse_constant=pytest.fail) == {"step": 2, **nothing}
    file.close()
    again = MetricsFile(tmp_path / "metrics.jsonl")
    again.append({"step": 3})
    again.close()
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_cut_after_a_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    kept = '{"step": 1, "a": 1.50}\n{"step": 2}\n{"step": 2, "val/loss": 3}\n'
    path.write_text(kept + '{"step": 3}\nnot json\n{"step": 4}\n{"step": 5, "tr')
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 2, 3, 4]
    assert cut_metrics(path, 2) == 4
    assert path.read_text() == kept  # byte for byte
    assert cut_metrics(path, 2) == 0
    assert cut_metrics(tmp_path / "none.jsonl", 2) == 0
    assert list(read_metrics(tmp_path / "none.jsonl")) == []


class View:
    """Remembers what it is told; fails on request."""

    def __init__(self, fail_at: int | None = None, fail_to_close: bool = False) -> None:
        self.fail_at, self.fail_to_close = fail_at, fail_to_close
        self.seen: list[Any] = []
        self.closed: list[int] = []

    def log(self, metrics: Any) -> None:
        if metrics["step"] == self.fail_at:
            raise ConnectionError("no network")
        self.seen.append(metrics["step"])

    def close(self, exit_code: int) -> None:
        self.closed.append(exit_code)
        if self.fail_to_close:
            raise ConnectionError("still no network")


def test_a_view_that_fails_ends_neither_the_run_nor_other_views(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken, stubborn, fine = View(fail_at=2), View(fail_to_close=True), View()
    loggers = Loggers(MetricsFile(tmp_path / "metrics.jsonl"), Console(bar=False), [broken, stubborn, fine])
    for step in (1, 2, 3):
        loggers.log({"step": step})
    loggers.close(5)
    loggers.close(5)
    assert (broken.seen, broken.closed) == ([1], [1])
    assert (fine.seen, fine.closed, stubborn.closed) == ([1, 2, 3], [5], [5])
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    errors = capsys.readouterr().err
    assert "View failed" in errors and "could not be closed" in errors


def test_the_bar_shows_loss_rate_speed_and_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console()
    console.start(3, 10)
    for step in range(4, 11):
        console.advance()
        console.log({"step": step, "train/loss": 1.23456, "lr": 1e-3, "tokens_per_s": 12_345.0})
    console.log({"step": 10, "val/loss": 2.0, "val/bits_per_byte": 1.5})
    console.say("a message")
    console.close()
    errors = capsys.readouterr().err
    assert "10/10" in errors and "loss=1.2346" in errors and "lr=1.00e-03" in errors and "tok/s=12.3k" in errors
    assert "val=2.0000" in errors and "a message\n" in errors
    assert "bits" not in errors  # a bar of 100 columns has no room for them


def start(tmp_path: Path, said: list[str], run_id: str | None = None, **settings: Any) -> WandbLogger:
    return WandbLogger(WandbConfig(**settings), tmp_path, {"model": "gpt"}, run_id, said.append)


def test_online_with_an_account(fake: Any, tmp_path: Path) -> None:
    fake.key, said = "key", []
    logger = start(tmp_path, said, project="p", entity="e", tags=["a"], group="g")
    assert (logger.mode, logger.run_id, said) == ("online", "run1", [])
    init = fake.inits[0]
    assert (init["project"], init["entity"], init["tags"], init["group"]) == ("p", "e", ["a"], "g")
    assert (init["name"], init["dir"], init["config"]) == (tmp_path.name, str(tmp_path), {"model": "gpt"})
    assert (init["id"], init["resume"], init["reinit"]) == (None, None, "create_new")
    assert fake.runs[0].defined == [("step", None), ("*", "step")]
    logger.log({"step": 1, "train/loss": 2.0, "val/loss": None})
    logger.close(0)
    assert fake.runs[0].logged == [{"step": 1, "train/loss": 2.0}] and fake.runs[0].exit_codes == [0]


@pytest.mark.parametrize(("key", "told"), [(None, "no account is logged in"), ("key", "no answer")])
def test_without_an_account_or_a_network_the_run_is_offline(
    fake: Any, tmp_path: Path, key: str | None, told: str
) -> None:
    fake.key, fake.online_error, said = key, TimeoutError("no answer"), []
    assert start(tmp_path, said).mode == fake.inits[0]["mode"] == "offline" and len(fake.inits) == 1
    assert told in said[0] and "wandb sync" in said[1]


@pytest.mark.parametrize(
    ("mode", "environment", "expected"),
    [("offline", None, "offline"), ("disabled", None, "disabled"), (None, "disabled", "disabled"),
     ("offline", "online", "offline")],
)  # fmt: skip
def test_modes_that_need_no_account(
    fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str | None, environment: str | None, expected: str
) -> None:
    said: list[str] = []
    if environment is not None:
        monkeypatch.setenv("WANDB_MODE", environment)
    logger = start(tmp_path, said, "abc", mode=mode)
    assert logger.mode == fake.inits[0]["mode"] == expected and said == []
    assert logger.run_id == (None if expected == "disabled" else "abc")
    assert (fake.inits[0]["id"], fake.inits[0]["resume"]) == ("abc", "allow")  # a resumed job continues its run


def test_a_login_without_prompt_argument(fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake, "login", lambda verify: True)
    assert start(tmp_path, []).mode == "offline"
    fake.api.api_key = "key"
    assert start(tmp_path, []).mode == "online"


def test_without_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="pip install wandb"):
        start(tmp_path, [])


# one W&B run over several attempts, online and offline: every recorded step is there once


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
