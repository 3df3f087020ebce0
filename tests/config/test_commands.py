"""Commands that ttrain prints, records or starts train the model of the command that they come from."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import composed
from ttrain.cli import main
from ttrain.config.files import packaged
from ttrain.config.schema import Config
from ttrain.tasks.training import expected, supervised
from ttrain.train.runs.record import command_line, override
from ttrain.train.supervise import launch

TINY = [
    "data.path=book.txt", "device=cpu", "device.threads=1", "logger=jsonl", "train.steps=2", "train.batch_size=2",
    "train.eval_sequences=2", "sample.tokens=1",
]  # fmt: skip
FILES = {
    "name": ["--config-name", "exp.yaml"],
    "folder": ["--config-dir=my", "model=mine"],
    "path": ["--config-path", "conf"],
    "all": ["--config-dir", "my", "--config-name", "other"],
}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder in which each of FILES gives a model of width 24."""
    monkeypatch.chdir(tmp_path)
    model = "model: {layers: 1, width: 24, heads: 2, context: 16}\n"
    Path("exp.yaml").write_text(f"defaults: [config, _self_]\n{model}", "utf-8")
    Path("my/model").mkdir(parents=True)
    Path("my/other.yaml").write_text(f"defaults: [config, _self_]\n{model}", "utf-8")
    Path("my/model/mine.yaml").write_text(
        "defaults: [nano-gpt]\nlayers: 1\nwidth: 24\nheads: 2\ncontext: 16\n", "utf-8"
    )
    shutil.copytree(packaged(), "conf")
    with open("conf/config.yaml", "a", encoding="utf-8") as file:
        file.write(model)
    Path("book.txt").write_text("river stone lamp garden winter " * 200, "utf-8")


def config_of(arguments: Sequence[str]) -> Config:
    return composed(command_line(arguments))


@pytest.mark.parametrize("files", FILES.values(), ids=FILES)
def test_a_command_composes_to_the_config_that_it_comes_from(files: list[str]) -> None:
    config = config_of([*files, "task=plan", "train.steps=7", "--run.dir=a b", "sample.prompt=a, {b} ${c} 'd' é"])
    assert config.model.width == 24
    again = composed(config.source.command())
    assert again == config and again.source == config.source
    changed = composed(config.source.command({"train.steps": 8, "run.dir": "x,y"}, ["sample"], task="train"))
    assert (changed.task.name, changed.train.steps, changed.run.dir) == ("train", 8, "x,y")
    assert (changed.model, changed.sample.prompt) == (config.model, None)
    alternative = composed(expected.command(config, {"precision": "bf16"}))
    assert (alternative.model, alternative.precision.name, alternative.run.dir) == (config.model, "bf16", None)


@pytest.mark.parametrize(
    ("task", "files"), list(zip(["train", "lr_finder", "eval", "prepare"], FILES.values(), strict=True)), ids=FILES
)
def test_what_a_task_prints_and_records(task: str, files: list[str], capsys: Any) -> None:
    if task == "train":
        assert main([*files, *TINY, 'run.dir="a,b"']) == 0
        attempt = json.loads(Path("a,b/run.json").read_text("utf-8"))["attempts"][-1]
        assert composed(attempt["command"]).model.width == 24
        printed = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines() if "  python" in line)
        for label in ("train on", "sample"):
            assert main([*shlex.split(printed[label])[3:], *TINY[1:4]]) == 0
    elif task == "lr_finder":
        keys = "steps=30 lr_finder.low=1e-4 lr_finder.high=10 lr_finder.out=found optimizer.lr=1 +task=lr_finder"
        ramp = f"lr_finder.{keys}".split()
        assert main([*files, *TINY, *ramp]) == 0
        command = json.loads(Path("found/results.json").read_text("utf-8"))["command"]
        assert (composed(command).model.width, composed(command).task.name) == (24, "train")
        assert command in capsys.readouterr().out
    elif task == "eval":
        assert main([*files, *TINY, "run.dir=run"]) == 0
        assert main([*files, "task=eval", "run.dir=run", "eval.text=[book.txt]", "eval.out=o.json", *TINY[1:3]]) == 0
        command = json.loads(Path("o.json").read_text("utf-8"))["command"]
        assert f"python -m ttrain {files[0].partition('=')[0]} " in command
    else:
        assert main([*files, *TINY, "task=prepare", "prepare.dir=tok ens"]) == 0
        (command,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("train on it: "))
        assert composed(command.removeprefix("train on it: ")).model.width == 24


def test_a_file_that_chooses_the_task_is_overruled() -> None:
    Path("rates.yaml").write_text(
        "defaults: [config, {override task: lr_finder}, _self_]\nmodel: {width: 40, heads: 2}\n", "utf-8"
    )
    source = config_of(["--config-name", "rates", "lr_finder.steps=20"]).source
    given = composed(source.command({"optimizer.lr": "1e-3"}, without=["lr_finder"], task="train"))
    assert (given.task.name, given.model.width, given.optimizer.lr, given.lr_finder.steps) == ("train", 40, 1e-3, 200)


def test_a_job_of_a_file_that_asks_for_a_sweep_is_one_run_again() -> None:
    Path("axes.yaml").write_text(
        "defaults: [config, _self_]\nhydra: {mode: MULTIRUN, sweeper: {params: {run.seed: '3,4'}}}\n"
    )
    source = config_of(["--config-name", "axes", "run.seed=3", "hydra.mode=RUN"]).source
    assert source.command() == "python -m ttrain --config-name axes hydra.mode=RUN run.seed=3"


@pytest.mark.parametrize("name", ["path", "all"])
def test_children_are_given_the_files(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a supervisor, also after a restart, and the ranks of one machine."""
    started: list[list[str]] = []
    files = FILES[name]

    class Once:
        failures = 0

        def __init__(self, config: Any, command: Any, say: Any) -> None:
            self.command = command

        def run(self) -> int:
            started.extend(self.command(run)[3:] for run in (None, Path("a,b")))
            return 0

    monkeypatch.setattr(supervised, "Supervisor", Once)
    monkeypatch.setattr(launch, "launch", lambda config, arguments, note: started.append(list(arguments)) or 0)
    assert main([*files, "supervise.enabled=true", "run=old"]) == 0
    assert main([*files, "parallel=ddp", "parallel.processes=2"]) == 0
    assert [config_of(each).model.width for each in started] == [24, 24, 24]
    assert [config_of(each).run.dir for each in started] == ["old", "a,b", None]


@pytest.mark.parametrize(
    "text", ["a", "a/b c", "a,b", "[a]", "null", "None.", "é", "a'b", 'a"b', "${x}", " a ", "a=b", "\\n", "$x", "(a)"]
)
def test_text_of_an_override_is_read_back(text: str) -> None:
    assert composed(command_line([override("run.dir", text)])).run.dir == text


def test_a_run_that_goes_on_names_plugins_and_supervision() -> None:
    given = ["supervise.max_restarts=5", "train.steps=3", "+supervise.enabled=true"]
    assert config_of(["--config-name=exp", *given]).source.going_on() == f"{command_line([given[0], given[2]])}"
