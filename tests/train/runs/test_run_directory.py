"""One process per run directory, and everything in it survives a move."""

from __future__ import annotations

import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import pytest

import ttrain
from ttrain.core.errors import UserError
from ttrain.train.runs.record import environment_record, git_state
from ttrain.train.runs.run_directory import RunDirectory, read_config


def test_runs_in_the_same_second_get_a_directory_each(tmp_path: Path) -> None:
    def claim(_: int) -> RunDirectory:
        return RunDirectory.claim(None, "gpt_cpu_static", tmp_path, datetime(2026, 11, 28, 12, 0, 0))

    with ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(claim, range(40)))
    names = {"12-00-00_gpt_cpu_static", *(f"12-00-00_gpt_cpu_static_{number}" for number in range(2, 41))}
    assert {run.path for run in runs} == {tmp_path / "2026-11-28" / name for name in names}
    for run in runs:
        run.close()


def test_a_named_directory_is_claimed_once(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "notes.txt").write_text("mine")  # a folder without a run is fine
    run = RunDirectory.claim(str(tmp_path / "a" / "b"), "x")
    with pytest.raises(UserError, match=f"in use by process {os.getpid()}"):
        RunDirectory.claim(str(tmp_path / "a" / "b"), "x")
    with pytest.raises(UserError, match="in use"):
        RunDirectory.open(tmp_path / "a" / "b")
    (run.checkpoints / "step_00000002").mkdir()
    run.close()
    run.close()
    with pytest.raises(UserError, match="already holds a run.*resume=auto to continue it"):
        RunDirectory.claim(str(tmp_path / "a" / "b"), "x")
    RunDirectory.open(tmp_path / "a" / "b").close()
    assert (tmp_path / "a" / "b" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    "left",
    [
        ("checkpoints/step_00000001/manifest.json", "{}"),
        ("checkpoints/abandoned_after_00000001/x", ""),
        ("metrics.jsonl", '{"step": 10, "train/loss": 2.5}\n'),
        ("summary.json", "{}"),
    ],
    ids=lambda left: left[0],
)
def test_a_run_with_something_to_lose_is_not_written_over(tmp_path: Path, left: tuple[str, str]) -> None:
    RunDirectory.claim(str(tmp_path / "a"), "x").close()
    path = tmp_path / "a" / left[0]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(left[1])
    with pytest.raises(UserError, match="already holds a run"):
        RunDirectory.claim(str(tmp_path / "a"), "x")
    assert path.read_text() == left[1]


def test_a_run_that_ended_before_it_did_anything_gives_its_place(tmp_path: Path) -> None:
    """As after a NaN in the first steps, or a save that was cut off: only what is worth nothing is there."""
    run = RunDirectory.claim(str(tmp_path / "a"), "x")
    run.metrics.write_text('{"step": 2, "train/loss": null}\n{"step": 3, "tra')
    (run.checkpoints / ".unfinished_step_00000002").mkdir()
    run.config.write_text("x")
    run.close()
    again = RunDirectory.claim(str(tmp_path / "a"), "x")
    assert again.note is not None and "takes its place" in again.note and again.attempts() == []
    again.close()


@pytest.mark.parametrize("wanted", ["file/run", "file", None])
def test_a_place_that_can_not_be_written_is_a_user_error(
    tmp_path: Path, wanted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one by a simulated refusal, because the superuser may write everywhere."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="can't be written.*run.dir="):
        RunDirectory.claim(None if wanted is None else str(tmp_path / wanted), "x", root=tmp_path / "file")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(UserError, match="Permission denied"):
        RunDirectory.claim(str(tmp_path / "run"), "x")


def test_config_and_attempts_go_with_a_moved_run(tmp_path: Path) -> None:
    config = {"model": {"name": "gpt", "layers": None}, "eps": 1e-8, "s": "1e-3"}
    config["texts"] = ["é\n: [x", "a\x85b", "a\u2028b", "a\rb\x0cc", "\ufeffa"]
    run = RunDirectory.claim(str(tmp_path / "before"), "x")
    run.record(config, {"attempt": 1})
    run.record(config, {"attempt": 2})
    followed = RunDirectory(run.path)  # by another rank, which writes nothing
    followed.record({}, {"attempt": 3})
    followed.write(followed.plan, "its own")
    assert run.attempts() == [{"attempt": 1}, {"attempt": 2}]
    assert read_config(run.path) == config and not run.plan.exists()
    run.write(run.plan, "plan")
    run.write(run.summary, {"step": 1})
    run.close()
    os.rename(tmp_path / "before", tmp_path / "after")
    files = [path for path in (tmp_path / "after").rglob("*") if path.is_file()]
    assert len(files) == 5
    assert all(str(tmp_path) not in path.read_text() for path in files)
    moved = RunDirectory.open(tmp_path / "after")
    assert moved.attempts() == [{"attempt": 1}, {"attempt": 2}] and moved.path == tmp_path / "after"
    moved.close()


def test_environment_record_is_json_and_complete() -> None:
    record = environment_record({"a": 1}, {"name": "cpu"}, {"source": "x"}, "abc", "python -m ttrain model=gpt2")
    assert json.loads(json.dumps(record)) == record
    assert record["command"] == "python -m ttrain model=gpt2"
    assert record["versions"]["ttrain"] == ttrain.__version__ and "numpy" in record["versions"]
    assert record["config_hash"] == "015abd7f5cc57a2dd94b7590f04ad8084273905ee33ec5cebeae62276a97f862"
    other = environment_record({"a": 2}, {"name": "cpu"}, {"source": "x"}, "abc", "")
    assert other["config_hash"] != record["config_hash"]


def test_git_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    assert git_state(tmp_path) is None  # no commit yet
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-q", "-m", "first")
    assert git_state(tmp_path) == {"commit": git("rev-parse", "HEAD"), "changed": False}
    (tmp_path / "a").write_text("2")
    state = git_state(tmp_path)
    assert state is not None and state["changed"] is True
    monkeypatch.setenv("PATH", "")
    assert git_state(tmp_path) is None
