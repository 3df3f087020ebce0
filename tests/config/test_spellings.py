"""Spellings of a key and value by people, shells, word processors and W&B's agents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ttrain.cli import main, parse_arguments
from ttrain.config.compose import load
from ttrain.core.errors import ConfigError


def value(*arguments: str) -> Any:
    """Return the composed value of the first override's key."""
    overrides = parse_arguments(arguments)[1]
    part: Any = load(overrides)
    for name in overrides[0].partition("=")[0].strip(" +~").split("."):
        part = getattr(part, name)
    return part


def refused(*arguments: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(parse_arguments(arguments)[1])
    return caught.value.problems


ANY_TEXT = ("None", "True", "null", "[1, 2]", "“quoted” – text", "{'a': 1}")
READ: dict[str, Any] = {
    # As an agent passes it, read by the type of its key.
    "--optimizer.clip_norm=None": None,
    '--optimizer.clip_norm="null"': None,
    "--data.path=None": None,
    "--train.keep_best=False": False,
    "--train.keep_best='False'": False,
    '--optimizer.betas="[0.5, 0.6]"': [0.5, 0.6],
    "--optimizer.betas=(0.5, 0.6)": [0.5, 0.6],
    "--optimizer.freeze=\"['a', 'b']\"": ["a", "b"],
    "--optimizer.lr_multipliers={'a': 1e-3, 'b': 2}": {"a": 0.001, "b": 2.0},
    "--resume=None": "none",
    "resume=null": "none",
    # Text stays as it is, also words that other keys read; a key that has to have a value has one.
    **{f"--{key}={text}": text for key in ("sample.prompt", "data.separator") for text in ANY_TEXT},
    "runs.root=True": "True",
    "runs.root=None": "None",
    "run.dir='[1]'": "[1]",
    # Numbers, spaces, quotes and dashes.
    "train.steps=1e4": 10_000,
    "train.steps = 7": 7,
    "train.steps=“7”": 7,
    "optimizer.lr=1e−3": 0.001,
    "-train.steps=7": 7,
    "—train.steps=7": 7,
    "–-train.steps=7": 7,
    "data.path=a b": "a b",
    "data.path=‘a’": "‘a’",
}


@pytest.mark.parametrize("argument", READ)
def test_a_value_as_people_and_programs_write_it(argument: str) -> None:
    found = value(argument)
    assert found == READ[argument] and type(found) is type(READ[argument])


def test_the_last_value_counts_and_an_option_may_be_named_as_its_file() -> None:
    assert value("train.steps=5", "train.steps=6") == 6
    for group, option in (("model", "gpt2"), ("recipe", "agillm_tiny")):
        assert load([f"{group}={option}.yaml"]).source.choices[group] == option


def test_none_in_a_file_is_read_like_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [config, _self_]\noptimizer: {clip_norm: None}\n", "utf-8")
    assert load(config_name="mine", config_dir=tmp_path).optimizer.clip_norm is None


def test_a_group_of_which_none_may_be_chosen() -> None:
    config = load(parse_arguments(["--recipe=None", "--debug=None"])[1])
    assert not {"recipe", "debug"} & config.source.choices.keys()
    assert refused("--model=None")[0].startswith("model=None: no such option.")


def test_an_option_given_as_a_path(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("defaults: [nano-gpt]\n", "utf-8")
    (problem,) = refused(f"model={tmp_path}/model/mine.yaml")
    assert problem.endswith(f"For a file of yours give --config-dir {tmp_path} model=mine.")
    assert "Did you mean 'gpt2'?" in refused("model=conf/model/gpt2.yaml")[0]


@pytest.mark.parametrize("text", ["hydra: {run: {dir: x}}", "hydra: {job: {name: x}}"])
def test_a_key_of_hydra_that_does_nothing_in_a_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.yaml").write_text(f"defaults: [config, _self_]\n{text}\n", "utf-8")
    with pytest.raises(ConfigError, match=r"hydra\.\w+\.\w+: has no effect with ttrain \(set in mine\.yaml\)"):
        load(config_name="mine", config_dir=tmp_path)
    (tmp_path / "logs.yaml").write_text("defaults: [config, {override hydra/job_logging: none}]\n", "utf-8")
    with pytest.raises(ConfigError, match="hydra/job_logging: has no effect"):
        load(config_name="logs", config_dir=tmp_path)


def test_keys_of_hydra_that_work() -> None:
    overrides = [
        "hydra.job.num=3",
        "hydra.job.config.override_dirname.exclude_keys=[run.dir]",
        "run.dir='o/${hydra:job.override_dirname}'",
    ]
    assert load([*overrides, "run.seed=4"]).run.dir == "o/run.seed=4"
    assert load(["hydra.job.num=3", "run.dir='o/${hydra:job.num}'"]).run.dir == "o/3"


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with configs of 7, 8 and 9 steps, seen from the folder above it."""
    for name, steps in (("exp", 7), ("a/exp", 8), ("a/other", 9)):
        file = tmp_path / "my" / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"defaults: [config, _self_]\ntrain: {{steps: {steps}}}\n", "utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "my"


@pytest.mark.parametrize(
    ("folder", "name", "steps"),
    [
        ("my", "exp", 7),
        ("my", "a/exp.yaml", 8),
        ("my", "my/a/other.yaml", 9),
        ("my/a", "my/exp.yaml", 7),
        (None, "my/a/exp.yaml", 8),
        (None, "{mine}/a/other.yaml", 9),
    ],
)
def test_a_config_by_name_or_path_with_or_without_yaml(mine: Path, folder: str | None, name: str, steps: int) -> None:
    assert load([], name.format(mine=mine), folder).train.steps == steps


def test_a_config_that_is_missing_says_where_it_was_looked_for(mine: Path, capsys: Any) -> None:
    assert main(["--config-dir", "my", "--config-name", "b/exq.yaml"]) == 2
    told = capsys.readouterr().err
    assert "--config-name b/exq.yaml: there is no b/exq.yaml in " in told
    assert str(mine) in told
    assert str(mine.parent) in told
    assert "Did you mean 'exp'?" in told
    (mine / "old.yml").write_text("train: {}\n", "utf-8")
    assert main(["--config-name", "my/old.yml"]) == 2
    assert "ends in .yaml; rename the file" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--config-dir", "--config-path"])
def test_a_folder_that_is_missing_or_a_file(mine: Path, capsys: Any, flag: str) -> None:
    for given, part in [
        ("nowhere", f"{flag} nowhere: there is no such folder (looked for {mine.parent / 'nowhere'})."),
        ("my/exp.yaml", "For this file give --config-name my/exp.yaml."),
        ("", f"{flag} : "),
    ]:
        assert main([flag, given]) == 2
        assert part in capsys.readouterr().err
    assert main(["--config-path", "my", "--config-name", "exp"]) == 2
    assert "--config-dir adds to them" in capsys.readouterr().err


@pytest.mark.parametrize("task", ["sample", "report", "runs", "train"])
@pytest.mark.parametrize("override", ["run=a b", "run.dir=a b", "--run='a b'", "run=[a b]"])
def test_every_task_takes_a_run_in_one_way(task: str, override: str) -> None:
    config = load(parse_arguments([f"task={task}", override])[1])
    assert (config.run.dir, config.report.run) == ("a b", [])


def test_several_runs_are_for_a_report() -> None:
    for override in ("run=a,b", "run=[a,b]", "report.run=[a,b]"):
        assert load(["task=report", override]).report.run == ["a", "b"]
    assert refused("task=sample", "run=a,b")
    assert "task=train takes one run" in refused("run=a,b")[0]
    assert "both name runs" in refused("task=report", "run=a,b", "run.dir=c")[0]
