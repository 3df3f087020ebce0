"""Every wrong input is one clear sentence, all of them at once, and never a traceback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.config.messages import said, sentences
from ttrain.config import renamed
from ttrain.config.build import build_dataset
from ttrain.config.compose import Composer, load
from ttrain.config.renamed import RENAMED
from ttrain.config.saved import ALWAYS_GIVEN, continued
from ttrain.config.schema import to_dict
from ttrain.core.errors import EXIT_USER, ConfigError
from ttrain.core.names import did_you_mean

SENTENCES = sentences()
OWN = "defaults: [config, _self_]\n"


def problems(*overrides: str, config_dir: Path | None = None, config_name: str | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(overrides, config_name, config_dir)
    assert caught.value.exit_code == EXIT_USER
    assert all("\n" not in problem for problem in caught.value.problems)
    return caught.value.problems


def write(folder: Path, name: str, text: str | bytes) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return folder


@pytest.mark.parametrize("command", SENTENCES)
def test_a_mistake_is_told_in_these_words(command: str) -> None:
    """The whole list comes at once, each with its key."""
    assert said(command) == SENTENCES[command]


@pytest.mark.parametrize(
    ("override", "valid"),
    [
        ("model.width=range(5,1)", False),
        ("model.width=range(1,5,0)", False),
        ("model.width=range(5,1,-1)", True),
        ("optimizer.lr=interval(1e-2,1e-4)", False),
        ("optimizer.lr=interval(1e-2,inf)", False),
        ("optimizer.lr=tag(log,interval(0,1))", False),
        ("optimizer.lr=interval(0,1)", True),
        ("model.width=glob(*)", False),
        ("optimizer=glob(zz*)", False),
        ("optimizer=glob(ad*)", True),
    ],
)
def test_a_sweep_without_values_is_refused(override: str, valid: bool) -> None:
    with Composer() as composer:
        told = composer.compose([override], sweep=True).problems
    assert [problem.startswith(f"{override}: has no values.") for problem in told] == ([] if valid else [True])


def test_a_misspelt_key_in_a_config_and_nested(tmp_path: Path) -> None:
    write(tmp_path, "mine.yaml", OWN + "trian: {steps: 3}\ntrain: {steps: {count: 3}}\n")
    assert problems(config_dir=tmp_path, config_name="mine") == [
        f"trian: unknown key (set in mine.yaml). {did_you_mean('trian', load().__dict__.keys() - {'source'})}",
        "train.steps={'count': 3}: must be an integer or null, got a mapping (set in mine.yaml).",
    ]


@pytest.mark.parametrize(
    "override", ["model._target_=x", "+a.b._target_=x", "hydra.launcher._target_=x", "train.steps={_target_: x}"]
)
def test_code_on_the_command_line_is_refused(override: str) -> None:
    assert problems(override)[0].startswith(override.lstrip("+")[:5].partition(".")[0])


@pytest.mark.parametrize(
    "text",
    [
        "model: {_target_: os.system}\n",
        "train: {steps: 3, extra: [{_target_: os.system}]}\n",
        "hydra: {launcher: {_target_: os.system}}\n",
        "hydra: {callbacks: {mine: {_target_: os.system}}}\n",
        "hydra: {job_logging: {handlers: {mine: {(): os.system}}}}\n",
    ],
)
def test_code_in_a_file_is_refused(tmp_path: Path, text: str) -> None:
    write(tmp_path, "mine.yaml", OWN + text)
    assert any("(set in mine.yaml)" in problem for problem in problems(config_dir=tmp_path, config_name="mine"))


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("mine", "train: {steps: 3\n", "expected ',' or '}'"),
        ("mine", "train: {steps: 3, steps: 4}\n", "duplicate"),
        ("mine", "- a\n- b\n", "mine"),
        ("mine", "defaults: [mine]\n", "includes itself"),
        ("mine", "defaults: [modle/x]\n", "there is no config modle/x.yaml."),
        ("mine", b"run: {dir: \xff}\n", "utf-8"),
        ("mine", f"{OWN}plugins: [antigravity]\n", "plugins=['antigravity']: a config file can't name a plugin"),
        ("optimizer/mine", "name: adamw\nrate: 1\n", "optimizer.rate: unknown key (set in optimizer/mine.yaml)."),
        ("optimizer/mine", "lr: 0.1\n", "optimizer: has no name, so nothing is chosen. Valid: adafactor, adamw, "),
        ("optimizer/adamw", "name: adamw\n", "optimizer/adamw.yaml has the name of a config that ttrain ships"),
    ],
)
def test_a_file_that_is_wrong(tmp_path: Path, name: str, text: str | bytes, part: str) -> None:
    chosen = ["optimizer=mine"] if name == "optimizer/mine" else []
    folder, own = write(tmp_path, f"{name}.yaml", text), "mine" if name == "mine" else None
    (problem,) = problems(*chosen, config_dir=folder, config_name=own)
    assert part in problem


def test_a_vocabulary_smaller_than_the_tokenizers(tmp_path: Path) -> None:
    write(tmp_path, "text.txt", "abcdefgh" * 200)
    config = load([f"data.path={tmp_path / 'text.txt'}", "model.vocabulary=3"])
    with pytest.raises(ConfigError, match="model.vocabulary=3: the tokenizer has 8 ids. Give model.vocabulary=8"):
        build_dataset(config)


def test_what_a_recipe_sets_is_its_own(tmp_path: Path) -> None:
    """Keys of the command line belong to the run."""
    write(tmp_path, "recipe/mine.yaml", "# @package _global_\ntrain: {steps: -3, batch_size: 0}\n")
    assert problems("recipe=mine", "train.batch_size=-1", config_dir=tmp_path) == [
        "train.steps=-3 (set in recipe/mine.yaml): must be at least 1.",
        "train.batch_size=-1: must be at least 1.",
    ]


LATER = {"precision=half": "precision=bf16", "data.order=dealt": "data.order=random", "optimise": "optimizer"}


def test_what_went_is_answered_on_the_command_line_and_in_a_recorded_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renamed, "RENAMED", {**RENAMED, **LATER})
    now = load(["objective=distillation", "objective.teacher=x"])  # a key of it was renamed
    given = load(["resume=auto", "run.dir=x"])
    for old, new in {**RENAMED, **LATER}.items():
        answer, (key, _, value) = new if " " in new else f"It is now {new}.", old.partition("=")
        (problem,) = problems(f"{key}={value or 1}")
        assert problem.startswith(old) and problem.endswith(answer)
        section, _, name = key.partition(".")
        if " " not in new and old not in LATER:
            group, _, key_now = new.partition("=")[0].partition(".")
            assert hasattr(getattr(now, group), key_now) if key_now else hasattr(now, group)
        if section in (*ALWAYS_GIVEN, "recipe", "hydra"):
            continue  # a run that goes on takes nothing of it from its record
        saved: Any = to_dict(now)
        saved[section] = {**saved[section], name: value or 1} if name else {"name": value or 1}
        with pytest.raises(ConfigError) as caught:
            continued(saved, given)
        assert caught.value.problems[0].endswith(answer)
