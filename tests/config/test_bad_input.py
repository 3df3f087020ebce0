"""Every wrong input is one clear sentence, all of them at once, and never a traceback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ttrain.config import renamed
from ttrain.config.build import build_dataset
from ttrain.config.compose import load
from ttrain.config.renamed import RENAMED
from ttrain.config.saved import ALWAYS_GIVEN, continued
from ttrain.config.schema import to_dict
from ttrain.core.errors import EXIT_USER, ConfigError
from ttrain.core.names import did_you_mean

OWN = "defaults: [config, _self_]\n"
PACKED = "data=documents data.sources=[x] data.attention=document"


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


@pytest.mark.parametrize(
    ("override", "key", "nearest"),
    [
        ("train.stpes=5", "train.stpes", "'steps'"),
        ("+train.stpes=5", "train.stpes", "'steps'"),
        ("optimzer.lr=1", "optimzer", "'optimizer'"),
        ("lr=1", "lr", "'optimizer.lr'"),
        ("+sede=1", "sede", "Valid: "),
        ("run.dri=x", "run.dri", "'dir'"),
        ("optimizer.momentum=0.9", "optimizer.momentum", "optimizer sgd"),
    ],
)
def test_a_misspelt_key_on_the_command_line(override: str, key: str, nearest: str) -> None:
    (problem,) = problems(override)
    assert problem.startswith(f"{key}: unknown key")
    assert nearest in problem


def test_a_misspelt_key_in_a_config_and_nested(tmp_path: Path) -> None:
    write(tmp_path, "mine.yaml", OWN + "trian: {steps: 3}\ntrain: {steps: {count: 3}}\n")
    assert problems(config_dir=tmp_path, config_name="mine") == [
        f"trian: unknown key (set in mine.yaml). {did_you_mean('trian', load().__dict__.keys() - {'source'})}",
        "train.steps={'count': 3}: must be an integer, got a mapping (set in mine.yaml).",
    ]


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        ("train.steps=abc", "train.steps='abc': must be an integer, got text."),
        ("train.steps=1.5", "train.steps=1.5: must be an integer, got a number."),
        ("train.steps=null", "train.steps=null: must be an integer, got null."),
        ("optimizer.lr=[1]", "optimizer.lr=[1]: must be a number, got a list."),
        ("optimizer.betas=0.9", "optimizer.betas=0.9: must be a list of numbers, got a number."),
        ("optimizer.lr_multipliers=3", "optimizer.lr_multipliers=3: must be a mapping of names to numbers, got"),
        ("optimizer.lr_multipliers.a=x", "optimizer.lr_multipliers={'a': 'x'}: must be a mapping of names to numbers"),
        ("train=5", "train=5: must be a group of keys such as train.<key>=<value>."),
        ("runs.root=null", "runs.root=null: must be text, got null."),
        ("report.run=3", "report.run=3: must be a list of texts, got an integer."),
        ("optimizer.freeze=blocks", "optimizer.freeze='blocks': must be a list of texts, got text. Write"),
        ("data=documents", "data.sources: has no value (set in data/documents.yaml); give one with"),
        ("train.steps=0", "train.steps=0: must be at least 1."),
        ("optimizer.lr=-1", "optimizer.lr=-1.0: must be at least 0."),
        ("model.dropout=1", "model.dropout=1.0: must be below 1."),
        ("model.activation=gelo", "model.activation=gelo: no such choice. Did you mean 'gelu'?"),
        ("model.heads=3", "model.heads=3: must divide model.width=128. Nearest that does: 2."),
        ("model=gpt2 model.preset=355M model.heads=7", "model.heads=7: must divide model.width=1024."),
        ("model.preset=125M", "model.preset=125M: no such preset. Did you mean '124M'?"),
        ("model.preset=null", "model.layers, model.heads, model.width, model.context: no value."),
        ("train.gradient_accumulation=3", "train.gradient_accumulation=3: must divide train.batch_size=16. "),
        ("train.gradient_accumulation=1e9", "train.gradient_accumulation=1000000000: must divide train.batch_size=16."),
        ("optimizer=sgd optimizer.momentum=0 optimizer.nesterov=1", "optimizer.nesterov=true: needs momentum."),
        ("optimizer.betas=[0.9]", "optimizer.betas=[0.9]: must hold two numbers, got 1."),
        ("lora.rank=2 model.parametrization=mup model.base_width=8 optimizer=muon", "optimizer=muon: has no rule for"),
        ("schedule.warmup=2000", "schedule.warmup=2000: must be at most train.steps=1000."),
        ("schedule=wsd schedule.warmup=900", "schedule.decay=0.2: warm-up (900 steps)"),
        ("schedule=wsd schedule.warmup=9 schedule.decay_from=8", "schedule.decay_from=8: must be at least"),
        ("optimizer=normuon optimizer.scale=spectral", "optimizer.scale=spectral: no such choice. Valid: rms"),
        ("optimizer=muon optimizer.iterations=101", "optimizer.iterations=101: must be at most 100"),
        ("model=mlp data=stdlib", "data=text: model=mlp trains on numbers"),
        ("data=regression", "data=regression: a language model trains on tokens."),
        ("model=mlp data.inputs=3", "data.inputs=3: the model has 64 inputs."),
        ("data=tokens", "data.path: no value."),
        ("task=sample", "task=sample: needs a trained model."),
        ("task=prepare", "prepare.dir: no value."),
        ("task=prepare prepare.dir=x data=documents data.sources=[x] data.loss_on=replies", "data.loss_on=replies: "),
        ("data=documents data.sources=[x,'']", "data.sources='': must be the path of a file or folder."),
        (f"{PACKED} model.context=1", "data=documents: sequences of 1 token have no target"),
        (f"{PACKED} model.context=4 train.length_schedule=[1,4]", "data=documents: sequences of 1 token have no"),
        ("resume=auto", "resume=auto: continues the run in run.dir, which has no value."),
        ("device=n300 device.core_grid=[8,99]", "device.core_grid=[8, 99]: a chip of device=n300 has at most 10"),
        ("device=n150 device.trace_region_mb=20000", "device.trace_region_mb=20000: is more than device=n150"),
        ("sample.checkpoint=first", "sample.checkpoint=first: must be last, best or a step number."),
    ],
)
def test_a_wrong_value_is_one_sentence(overrides: str, part: str) -> None:
    """A wrong type, a bound, or two keys that do not fit together."""
    (problem,) = problems(*overrides.split())
    assert problem.startswith(part)


def test_all_problems_come_at_once() -> None:
    found = problems(
        "model=gpt3", "model.heads=3", "train.gradient_accumulation=3", "optimzer=sgd", "train.eval_every=x",
        "run.seed=-1", "optimizer.betas=[", "engine=staic",
    )  # fmt: skip
    assert [problem.split(":")[0] for problem in found] == [
        "model=gpt3", "'optimizer.betas=['", "engine=staic", "optimzer", "train.eval_every='x'", "run.seed=-1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("model=gpt3", "model=gpt3: no such option. Did you mean 'gpt2'? Valid: agillm, gpt2, llama, mlp, nano-gpt."),
        ("logger=null", "logger=null: no such option. Valid: console, jsonl, wandb."),
        ("recipe=none", "recipe=none: no such option."),
        ("recipe=bench-gpt", "recipe=bench-gpt: no such option. Give task=bench bench=<preset>"),
        ("+debug=fats", "debug=fats: no such option. Did you mean 'fast'?"),
        ("model={layers: 3}", "model={layers: 3}: model takes the name of an option."),
        ("optimizer.name=sgd", "optimizer.name=sgd: a component is chosen by its group; give optimizer=sgd."),
        ("~model", "model: nothing is chosen."),
        ("train.steps=[1,2", "'train.steps=[1,2': the value can't be read."),
        ("train.steps", "'train.steps': expected key=value. No space goes around the equals sign"),
        ("train.steps=1,2", "train.steps=1,2: a comma means a sweep, which needs -m."),
        ("train.steps=${model.widht}", "train.steps: Interpolation key 'model.widht' not found."),
        ("hydra.sweep.dri=x", "hydra.sweep.dri: has no effect with ttrain. Give sweep.dir=<folder>."),
        ("plugins=[no_such_module]", "plugins=[no_such_module]: there is no module 'no_such_module' on Python's path."),
    ],
)
def test_what_hydra_refuses_is_said_in_one_sentence(override: str, part: str) -> None:
    (problem,) = problems(override)
    assert problem.startswith(part)


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
        build_dataset(config.data, config.model, [])


def test_what_a_recipe_sets_is_its_own(tmp_path: Path) -> None:
    """What the command line gives is not."""
    write(tmp_path, "recipe/mine.yaml", "# @package _global_\ntrain: {steps: -3, batch_size: 0}\n")
    assert problems("recipe=mine", "train.batch_size=-1", config_dir=tmp_path) == [
        "train.steps=-3 (set in recipe/mine.yaml): must be at least 1.",
        "train.batch_size=-1: must be at least 1.",
    ]


LATER = {"precision=half": "precision=bf16", "data.order=dealt": "data.order=random", "optimise": "optimizer"}


def test_what_went_is_answered_on_the_command_line_and_in_a_recorded_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renamed, "RENAMED", {**RENAMED, **LATER})
    now, given = load(), load(["resume=auto", "run.dir=x"])
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
