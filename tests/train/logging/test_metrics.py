"""metrics.jsonl and its views."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from ttrain.core.errors import UserError
from ttrain.train.logging.loggers import Console, Loggers
from ttrain.train.logging.metrics import MetricsFile, cut_metrics, read_metrics
from ttrain.train.logging.wandb_logger import WandbLogger
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


def test_the_real_package_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No account, no network, no prompt: a run directory that `wandb sync` takes."""
    pytest.importorskip("wandb")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for name in ("HOME", "XDG_CONFIG_HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "home" / "netrc"))
    said: list[str] = []
    logger = start(tmp_path, said)
    logger.log({"step": 1, "train/loss": 2.0})
    logger.close(0)
    assert logger.mode == "offline" and "no account" in said[0]
    assert list((tmp_path / "wandb").glob(f"offline-run-*-{logger.run_id}"))
