"""Faults of a terminal, a disk and a command line: one sentence, the right exit code, nothing lost."""

from __future__ import annotations

import builtins
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.faults.conftest import Train
from ttrain.cli import main
from ttrain.config.compose import load
from ttrain.core.errors import ConfigError
from ttrain.data.synthetic.regression import RegressionDataset
from ttrain.train.logging.loggers import Console
from ttrain.train.logging.metrics import read_events, read_metrics
from ttrain.train.loop.interrupt import StopRequests
from ttrain.train.runs.run_directory import read_config

REPO = Path(__file__).parents[2]


TINY_GPT = (
    "model=nano-gpt", "data=text", "data.path=text.txt", "model.layers=1", "model.width=8", "model.heads=1",
    "model.context=8", "logger=jsonl", "device=cpu", "device.threads=1", "train.peak_tflops=1",
    "schedule.warmup=0",
)  # fmt: skip


PATH = "must be the path of a file or folder."
BAD = {
    "optimizer.lr=inf": "must be a finite number",
    "optimizer.lr=1e400": "must be a finite number",
    "optimizer.lr_multipliers={blocks: nan}": "must be a finite number",
    "train.save_minutes=inf": "must be a finite number",
    "train.steps=1e30": "must be at most 9223372036854775807",
    "device.threads=1000000": "must be at most 1024",
    "optimizer.eps=1e-50": "must be at least 1.2e-38",  # 0 in fp32, so 0/0 where a gradient is 0
    "optimizer.clip_norm=1e-300": "must be at least 1.2e-38",
    "run.dir=": f"run.dir='': {PATH}",
    "data.path=' '": f"data.path=' ': {PATH}",
    "data.tokenizer=''": f"data.tokenizer='': {PATH}",
}


@pytest.mark.parametrize("override", BAD)
def test_a_value_that_nothing_can_be_made_of(override: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(BAD[override])):
        load([override])


def test_a_path_that_holds_nul(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text('defaults: [config, _self_]\nrun: {dir: "a\\0b"}\n')
    with pytest.raises(ConfigError, match=PATH):
        load([], "mine", tmp_path)


def test_a_home_folder_in_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/anybody")
    config = load(["run.dir=~/runs/a", "resume=~/runs/b", "run=~/x,~/y", "data.path=~/book.txt"])
    assert (config.run.dir, config.resume) == ("/home/anybody/runs/a", "/home/anybody/runs/b")
    assert config.report.run == ["/home/anybody/x", "/home/anybody/y"]


def test_a_model_larger_than_any_address(train: Train) -> None:
    Path("text.txt").write_text("hello world " * 100)
    overrides = ["data.path=text.txt", "model.context=8", "device=cpu", "run.dir=a", "model.heads=1"]
    assert "Out of memory on cpu: " in train.command(*overrides, "model.width=1000000000", code=1)
    assert "Out of memory: Unable to allocate" in train.told("model.width=1000000000000", "run.dir=b", code=1)


def test_files_of_the_users_own_are_not_written_over(train: Train) -> None:
    Path("mine").mkdir()
    Path("mine/config.yaml").write_text("precious")
    assert "run.dir=mine holds config.yaml but no run.json" in train.told("run.dir=mine", code=2)
    assert "mine is not a run of ttrain: it has no run.json" in train.told("run.dir=mine", "resume=auto", code=2)
    assert Path("mine/config.yaml").read_text() == "precious"


def test_a_run_whose_parts_can_not_be_written(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    assert train("run.dir=a", "train.steps=2") == 0
    original = os.access
    for part in (Path("a"), Path("a/checkpoints"), Path("a/metrics.jsonl")):
        monkeypatch.setattr(os, "access", lambda path, mode, part=part: Path(path) != part and original(path, mode))
        told = train.told("run.dir=a", "resume=auto", "train.steps=4", code=2)
        assert "The run directory a can't be written: no permission" in told


def test_a_checkpoint_that_can_not_be_read_is_passed_over(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    assert train("run.dir=a", "train.steps=4") == 0
    original = Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        if path.name == "manifest.json" and path.parent.name == "step_00000004":
            raise PermissionError(13, "Permission denied", str(path))
        return original(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    told = train.command("resume=a/checkpoints/step_00000004", "run.dir=b", code=2)
    assert "a/checkpoints/step_00000004/manifest.json can't be read: Permission denied." in told


def test_what_the_system_refuses_is_one_sentence(train: Train) -> None:
    assert train("run.dir=a", "train.steps=2") == 0
    Path("a/metrics.jsonl").unlink()
    Path("a/metrics.jsonl").mkdir()
    assert "ttrain: a/metrics.jsonl: Is a directory." in train.told("run.dir=a", "resume=auto", "train.steps=4", code=1)


def test_json_without_an_end(train: Train) -> None:
    Path("text.txt").write_text("hello world " * 200)
    Path("tokens").mkdir()
    for file in (Path("tokenizer.json"), Path("tokens/tokens.json")):
        file.write_text("[" * 100_000)
    for overrides in (["data.path=text.txt", "data.tokenizer=tokenizer.json"], ["data=tokens", "data.path=tokens"]):
        assert "ttrain: " in train.command(*overrides, "device=cpu", code=2)


def test_a_run_that_is_done_already_says_how_to_go_on(train: Train, capsys: Any) -> None:
    assert train("run.dir=a", "train.steps=8") == 0
    assert train("run.dir=a", "resume=auto", "train.steps=2") == 0
    assert "train.steps=16" in capsys.readouterr().out


def test_a_file_name_that_is_not_utf8(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml, "SafeLoader", yaml.loader.SafeLoader)  # the C library's, of tests, refuses such a name
    name = os.fsdecode(b"caf\xe9.txt")
    Path(name).write_text("hello world " * 200)
    assert main([*TINY_GPT, f"data.path={name}", "train.batch_size=2", "train.steps=2", "run.dir=a"]) == 0
    assert main(["run.dir=a", "resume=auto", "train.steps=3"]) == 0
    assert read_config(Path("a"))["data"]["path"] == name


def test_a_separator_that_is_not_text(train: Train) -> None:
    Path("texts").mkdir()
    Path("texts/a.txt").write_text("hello")
    assert "is not UTF-8" in train.command("data.path=texts", "device=cpu", "data.separator=\udce9", code=2)


def test_the_same_command_again_after_a_failure_in_the_first_step(train: Train) -> None:
    overrides = ["run.dir=a", "train.steps=4", "optimizer=sgd", "optimizer.clip_norm=null", "train.log_every=10"]
    assert train(*overrides, "optimizer.lr=1e38") == 1
    assert "a held a run that ended before it had done anything" in train.told(*overrides, "optimizer.lr=0.1")
    kinds = [event["kind"] for event in read_events(Path("a"))]
    assert kinds == ["started", "first_step", "failed", "started", "first_step", "finished"]
    assert [line["step"] for line in read_metrics(Path("a/metrics.jsonl")) if "lr" in line] == [4]
    assert train(*overrides) == 2


def test_other_text_at_a_resume_is_a_matter_of_the_tokenizer(train: Train) -> None:
    Path("text.txt").write_text("hello world " * 200)
    assert main([*TINY_GPT, "train.steps=2", "run.dir=a"]) == 0
    Path("text.txt").write_text("HELLO, WORLD? hello world " * 200)
    assert "was trained with another tokenizer" in train.command("run.dir=a", "resume=auto", "train.steps=3", code=2)
    Path("text.txt").write_text("hold low " * 200)
    kept = "data.tokenizer=a/checkpoints/step_00000002/tokenizer.json"
    assert main(["run.dir=a", "resume=auto", "train.steps=3", kept]) == 0


def test_text_of_one_character(train: Train, capsys: Any) -> None:
    Path("text.txt").write_text("a" * 2000)
    assert main([*TINY_GPT, "train.steps=2", "run.dir=a", "optimizer.lr=0"]) == 0
    told = capsys.readouterr()
    assert "unigram entropy  0.0000" in told.out and "WARNING: optimizer.lr=0" in told.err


def test_the_command_that_goes_on_names_the_plugins(train: Train, monkeypatch: Any) -> None:
    Path("my_part.py").write_text("")
    monkeypatch.syspath_prepend(".")
    original = RegressionDataset.batch

    def interrupting(self: Any, split: str, *arguments: Any) -> Any:
        if split == "train":
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, split, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(RegressionDataset, "batch", interrupting)
        told = train.told("run.dir=a", "plugins=[my_part]", code=130)
        assert "Continue with: python -m ttrain 'plugins=[my_part]' resume=auto run.dir=a" in told


class Gone:
    """A stream whose terminal was closed."""

    encoding = "utf-8"

    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")

    def flush(self) -> None:
        raise OSError(5, "Input/output error")

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return os.open(os.devnull, os.O_WRONLY)


def test_a_closed_terminal_does_not_end_a_run(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Gone())
    assert train("run.dir=a", "train.steps=4", "logger=console") == 0
    assert Path("a/summary.json").exists() and len(list(Path("a/checkpoints").iterdir())) == 2


def test_a_console_that_breaks_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console()
    console.start(0, 10)
    monkeypatch.setattr(sys, "stderr", Gone())
    console.say("a")
    console.advance()
    console.log({"train/loss": 1.0})
    console.start(0, 10)
    console.close()


def test_what_can_not_be_printed_loses_nothing(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("text.txt").write_text("hello world " * 200)
    printed = builtins.print

    def broken(*given: Any, **named: Any) -> None:
        if named.get("file") is None:
            raise BrokenPipeError(32, "Broken pipe")
        printed(*given, **named)

    monkeypatch.setattr(builtins, "print", broken)
    code = main([*TINY_GPT, "train.steps=2", "train.batch_size=2", "run.dir=a"])
    assert code == 1  # as everywhere: the reader is gone
    assert Path("a/summary.json").exists() and '"finished"' in Path("a/events.jsonl").read_text()


def python(*arguments: str, **how: Any) -> subprocess.CompletedProcess[str]:
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "check": False, "cwd": REPO, **how}
    return subprocess.run([sys.executable, *arguments], **given)


def test_streams_that_were_closed_or_are_full() -> None:
    command = f"{sys.executable} -m ttrain --version >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], check=False, cwd=REPO).returncode == 0
    with open("/dev/full", "w") as full:
        done = python("-m", "ttrain", "--version", stdout=full)
    assert done.returncode == 1 and done.stderr.startswith("ttrain: No space left on device.")
    assert done.stderr.count("\n") == 1


INTERRUPTED = """
import sys
class Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == 'omegaconf': raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
from ttrain.__main__ import main
sys.exit(main())
"""


def test_ctrl_c_during_the_first_imports() -> None:
    done = python("-c", INTERRUPTED)
    assert (done.returncode, done.stderr) == (130, "ttrain: interrupted\n")


def test_a_hangup_saves_unless_nohup_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a process that was started without a place for messages."""
    monkeypatch.setattr(sys, "stderr", None)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the suite itself may run under nohup
    try:
        with StopRequests() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.requested == signal.SIGHUP
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with StopRequests() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.requested is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
