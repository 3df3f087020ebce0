"""Commands that compose, and the configs that they give."""

from __future__ import annotations

import os
import re
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from ttrain.config.components import BUILT_IN
from ttrain.config.compose import load
from ttrain.config.files import packaged
from ttrain.config.saved import continued
from ttrain.config.schema import Config, to_dict
from ttrain.config.validate import typed_config
from ttrain.models.settings import GPTConfig
from ttrain.optim.settings import AdamWConfig, SGDConfig

ON_A_FILE = (
    "data=text data=tokens recipe=gpt2-124m recipe=gpt2-124m-ddp recipe=char-0.8m recipe=moe-tiny recipe=speedrun-char "
    "recipe=speedrun-nano recipe=nano-adamw recipe=agillm_large_cpu recipe=agillm_large_n300"
)
# What an option needs beside its own name to be complete.
NEEDS = {
    "data=documents": ["data.sources=[x]"],
    "data=regression": ["model=mlp"],
    "task=sample": ["run.dir=x"],
    "task=chat": ["run.dir=x"],
    "task=eval": ["run.dir=x", "eval.text=[x.txt]"],
    "task=export": ["run.dir=x", "export.file=x.pt"],
    "task=prepare": ["prepare.dir=x"],
    "task=profile": ["profile.csv=x"],
    "task=report": ["run=x"],
    "task=trial": ["trial.variants={a:[]}"],
    "parallel=auto": ["task=plan"],
    "objective=classification": ["data=documents", "data.sources=[x]"],
    "objective=embedding": ["data=documents", "data.sources=[x]"],
    "objective=distillation": ["objective.teacher=x"],
    **{f"objective={name}": ["data=documents", "data.sources=[x]"] for name in ("dpo", "ipo", "kto", "orpo", "simpo")},
    "objective=grpo": ["data=sums", "objective.max_completion_length=8"],
    "precision=bf16_true": ["device=tt"],
    "precision=bf8": ["device=tt"],
    "precision=tf32": ["device=cuda"],
    "precision=fp16": ["device=cuda"],
    **{option: ["data.path=x"] for option in ON_A_FILE.split()},
    "recipe=smollm2-135m-dpo": ["model.from=null", "data.sources=[x]"],
    "recipe=smollm2-135m-finetune": ["model.from=null", "data.sources=[x]"],
    "recipe=smollm2-135m-lora": ["model.from=null", "data.sources=[x]"],
}


def shipped_options() -> list[str]:
    """Every YAML under conf/ as the override that chooses it."""
    conf = packaged()
    return [
        f"{path.parent.relative_to(conf)}={path.stem}"
        for path in sorted([*conf.glob("*.yaml"), *conf.glob("*/*.yaml")])
    ]


@pytest.mark.parametrize("override", [override for override in shipped_options() if override != ".=config"])
def test_every_shipped_yaml_composes_and_passes_the_checks(override: str) -> None:
    config = load([override, *NEEDS.get(override, [])])
    group, _, option = override.partition("=")
    assert config.source.choices[group] == option


def test_every_built_in_name_is_chosen_by_some_option() -> None:
    conf = packaged()
    for group, name in BUILT_IN:
        assert any(
            re.search(rf"^ *name: '?{name}'?$", file.read_text("utf-8"), re.M) for file in (conf / group).glob("*")
        )


def test_defaults() -> None:
    config = load()
    assert config.source.choices == {
        "task": "train", "data": "stdlib", "model": "nano-gpt", "optimizer": "adamw", "schedule": "cosine",
        "precision": "fp32", "engine": "auto", "device": "auto", "parallel": "none", "objective": "next_token",
        "logger": "console",
        "bench": "gpt",
    }  # fmt: skip
    assert (config.run.dir, config.resume, config.plugins) == (None, "none", [])
    assert isinstance(config.model, GPTConfig)
    assert config.model.preset == "0.8M"


OVERFIT = {"train.batch_size": 8, "data.limit": 8, "schedule.warmup": 0}
PROMPTS = ("def f(x, y):\n    # ${z}", " spaced ", "", "null", "a,b", "[1,", 'say "hi" \\', "é漢")
COMPOSED: list[tuple[list[str], dict[str, Any]]] = [
    # A key that no YAML mentions needs no plus.
    (["optimizer.eps=1e-9"], {"optimizer.eps": 1e-9}),
    (["optimizer.lr_multipliers.head=0.5"], {"optimizer.lr_multipliers": {"head": 0.5}}),
    (["+model.tied=false"], {"model.tied": False}),
    (["optimizer=sgd", "optimizer.momentum=0.5"], {"optimizer": SGDConfig(momentum=0.5)}),
    (["model=mlp", "train.batch_size=${data.examples}"], {"train.batch_size": 8192, "data.name": "regression"}),
    (["model=gpt2"], {"model.preset": "124M"}),
    (["model=gpt2", "model.preset=1.5B"], {"model.preset": "1.5B"}),
    (["device=null"], {"device.name": "null"}),
    (["+device=null"], {"device.name": "null"}),
    *(([override, "recipe=char-10.7m"], OVERFIT) for override in ("debug=overfit", "+debug=overfit")),
    (["recipe=char-10.7m", "debug=fast", "train.steps=7"], {"train.steps": 7}),  # the command line wins
    (["train.steps=1e3", 'optimizer.lr="0.5"', "train.batch_size='8'"], {"train.steps": 1000, "optimizer.lr": 0.5}),
    # Texts are taken as they stand, also those that Hydra's grammar can't read.
    *(([f"sample.prompt={prompt}"], {"sample.prompt": prompt}) for prompt in PROMPTS),
    *(([f"data.path={path}"], {"data.path": path}) for path in ("données/texte (1).txt", "a&b;c.txt", "C:\\new")),
    (["data.path=~/x y.txt"], {"data.path": os.path.expanduser("~/x y.txt")}),
]


@pytest.mark.parametrize(("overrides", "expected"), COMPOSED)
def test_values_that_a_command_gives(overrides: list[str], expected: dict[str, Any]) -> None:
    config = load(overrides)
    assert {key: attrgetter(key)(config) for key in expected} == expected


@pytest.mark.parametrize("written", ["null", "'null'"])
def test_null_is_a_device_in_a_yaml_file(tmp_path: Path, written: str) -> None:
    (tmp_path / "mine.yaml").write_text(f"defaults:\n  - config\n  - override device: {written}\n", "utf-8")
    assert load(config_name="mine", config_dir=tmp_path).device.name == "null"


def test_a_user_folder_adds_options_and_configs_on_top_of_which_options_are_chosen(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [config, _self_]\ntrain: {steps: 7}\n", "utf-8")
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer" / "mine.yaml").write_text("defaults: [adamw]\nlr: 0.25\n", "utf-8")
    assert load(["optimizer=mine"], config_dir=tmp_path).optimizer == AdamWConfig(lr=0.25)
    config = load(["engine=dynamic", "+debug=overfit"], "mine", tmp_path)
    assert (config.engine.name, config.train.steps) == ("dynamic", 7)
    assert "engine" in config.source.explicit
    assert "train.steps" not in load(["engine=dynamic"], "mine", tmp_path).source.explicit


def test_a_config_survives_the_way_through_plain_values() -> None:
    config = load(["optimizer=sgd", "model=mlp", "optimizer.lr_multipliers={layers.0: 0.1}"])
    assert typed_config(to_dict(config)) == config


def test_explicit_keys_are_known() -> None:
    assert load().source.explicit == frozenset()
    assert load(["train.steps=5", "+model.tied=false"]).source.explicit == {"train.steps", "model.tied"}
    assert "optimizer" in load(["optimizer=adamw"]).source.explicit
    assert {"train.steps", "model"} <= load(["recipe=gpt2-124m", "data.path=x"]).source.explicit


def test_a_continued_run_keeps_what_the_command_line_leaves_alone() -> None:
    saved = to_dict(load(["optimizer.lr=0.5", "train.steps=70", "schedule=linear", "device=cpu", "run.dir=old"]))
    given = load(["resume=auto", "run.dir=new", "optimizer.lr=0.25", "train.steps=1000", "schedule=wsd"])
    config = continued(saved, given)
    assert (config.optimizer.lr, config.train.steps, config.schedule.name) == (0.25, 1000, "wsd")
    assert (config.run.dir, config.resume, config.device.name) == ("new", "auto", "cpu")
    assert continued(saved, load(["task=sample", "run.dir=old"]), ["device"]).device.name == "auto"
    assert continued(saved, load(["run.dir=old"])).train.steps == 70


def test_a_group_chosen_anew_replaces_the_saved_one_and_takes_single_keys() -> None:
    saved = to_dict(load(["optimizer.betas=[0.1,0.2]"]))
    config: Config = continued(saved, load(["optimizer.momentum=0.3", "optimizer=sgd"]))
    assert config.optimizer == SGDConfig(momentum=0.3)
