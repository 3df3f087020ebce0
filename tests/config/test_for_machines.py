"""Output for editors and programs: the JSON Schema of config files beside the config's own checks, and --json."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from ttrain.cli import DOCUMENTS, main
from ttrain.config import registry
from ttrain.config.compose import Composer
from ttrain.config.files import packaged
from ttrain.config.json_schema import LATER, file_schema
from ttrain.config.schema import sections
from ttrain.config.validate import Findings, _fill, section_type, typed_config
from ttrain.core.errors import ConfigError
from ttrain.core.options import LARGEST_INTEGER, default_of, key_of
from ttrain.train.settings import TrainConfig

jsonschema = pytest.importorskip("jsonschema")
# What the schema holds, one file each. A recipe may leave the model to the command, hence the choices.
REFUSED = """
trian: {steps: 5}
train: {stpes: 5}
train: {steps: many}
train: {steps: 1.5}
train: {steps: 0}
train: {tokens: 0}
train: {steps: [5]}
train: {batch_size: -1}
train: {ema: 1.0}
train: {ema: -0.1}
train: 5
optimizer: {lr: fast}
optimizer: {lr: -1.0e-3}
optimizer: {lr_multipliers: [1.0]}
optimizer: {lr_multipliers: {head: high}}
optimizer: {betas: 0.9}
optimizer: {betas: [0.9, 1.5]}
model: {name: gtp}
model: {widht: 32}
model: {tied: sometimes}
model: {name: mlp, heads: 4}
data: {name: text, tokenizer: null}
sample: {mode: sta}
sample: {top_p: 0}
sweep: {direction: up}
export: {form: onnx}
runs: {root: ""}
plugins: [mine]
supervise: {on_restart: rm}
resume: [last]
run: {seed: 9223372036854775808}
{defaults: [{override /model: gtp2}]}
{defaults: [{override /modle: gpt2}]}
{defaults: [{override /optimizer: adamw}], optimizer: {momentum: 0.9}}
{defaults: [{override /model: mlp}, {override /data: regression}], model: {context: 8}}
"""
# What it can't hold: rules across keys, what other files choose, a number that is no JSON.
ONLY_BY_CONFIG = """
lr_finder: {low: 1.0, high: 0.5}
schedule: {warmup: 2000}
optimizer: {momentum: 0.9}
optimizer: {lr: .nan}
"""


def lines(text: str) -> list[str]:
    return text.strip().splitlines()


def values_of(file: Path) -> Any:
    return OmegaConf.to_container(OmegaConf.load(file))


@pytest.fixture(scope="module")
def composer() -> Iterator[Composer]:
    with Composer() as composer:
        yield composer


@pytest.fixture(scope="module")
def schema(composer: Composer) -> Any:
    found = json.loads(json.dumps(file_schema(composer.files), allow_nan=False))
    jsonschema.Draft202012Validator.check_schema(found)
    return jsonschema.Draft202012Validator(found)


def test_the_schema_refuses_what_the_config_refuses_in_a_file(schema: Any, tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    with Composer(config_dir=tmp_path) as composer:
        whole = composer.compose().job
        for text in [*lines(REFUSED), *lines(ONLY_BY_CONFIG)]:
            (file := tmp_path / "recipe" / "bad.yaml").write_text(f"# @package _global_\n{text}\n", "utf-8")
            with pytest.raises(ConfigError):
                if re.search(r"defaults|plugins|on_restart|multipliers: \[", text):  # which only whole files have
                    composer.typed(["recipe=bad"])
                typed_config(OmegaConf.to_container(OmegaConf.merge(whole, OmegaConf.load(file))))
            told = [error.json_path for error in schema.iter_errors(values_of(file))]
            assert bool(told) == (text in lines(REFUSED)), (text, told)
    assert len(lines(REFUSED)) >= 30
    (wrong,) = schema.iter_errors({"train": {"stpes": 5}})
    assert wrong.json_path == "$.train" and "stpes" in wrong.message


def test_the_schema_takes_every_file_that_we_ship(composer: Composer, schema: Any) -> None:
    checked = 0
    for file in [packaged() / "config.yaml", *packaged().glob("*/*.yaml")]:
        whole = file.parent == packaged() or "@package _global_" in file.read_text("utf-8")
        its = schema if whole else schema.evolve(schema=file_schema(composer.files, file.parent.name))
        assert [error.message for error in its.iter_errors(values_of(file))] == [], file
        checked += 1
    assert checked > 60


POOL = [
    None, True, 0, 1, -1, 2, 7, 1.0, 1.5, 0.0, -0.5, 1e3, 1e300, LARGEST_INTEGER + 1, -LARGEST_INTEGER - 1, "", " ",
    "none", "auto", "x", "7", "null", [], [1], [0.5], [-1], ["x"], [None], [[1]], ["x", 1], {}, {"x": 1},
    {"x": -1.5}, {"x": "y"}, {"x": None},
]  # fmt: skip


def test_a_value_that_the_schema_takes_is_one_that_the_config_takes(schema: Any) -> None:
    """Each kind of key with each value. The other way round the schema may be stricter: it wants no quoted numbers."""
    kinds: dict[str, tuple[str, type[Any], Any, Any]] = {}
    parts = schema.schema["$defs"]
    for section in sections():
        rows = [row for row in registry.rows() if row.group == section]
        for config, name in [(row.config, f"{section}.{row.name}") for row in rows] or [
            (section_type(section, None), section)
        ]:
            for declared in fields(config) if config and name in parts else ():
                its = parts[name]["properties"][key_of(declared)]
                known = {word: its[word] for word in its if word not in ("description", "default")}
                kinds.setdefault(json.dumps(known, sort_keys=True), (section, config, declared, its))
    assert len(kinds) > 60
    taken = 0
    for section, config, declared, its in kinds.values():
        assert declared.name == "name" or schema.evolve(schema=its).is_valid(default_of(declared)), its
        for value in POOL:
            found = Findings()
            _fill(config, section, {key_of(declared): value}, found)
            takes = schema.evolve(schema=its).is_valid(value)
            taken += takes
            text = declared.metadata["one"] and isinstance(value, float)  # a fraction in place of one text: passes
            assert text or not (takes and found.problems), (found.problems, its)
    assert taken > 300


def test_interpolations_and_values_that_come_later_are_taken(schema: Any) -> None:
    later = {"train": {"steps": "${data.examples}"}, "data": {"sources": "???"}, "sweep": {"direction": "${x}"}}
    assert schema.is_valid(later) and not schema.is_valid({"train": {"steps": "data.examples"}})


def test_the_task_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["task=schema"]) == 0
    steps = json.loads(capsys.readouterr().out)["$defs"]["train"]["properties"]["steps"]
    assert steps["type"] == ["integer", "string", "null"] and (steps["minimum"], steps["pattern"]) == (1, LATER)
    assert steps["default"] == TrainConfig().steps and "optimizer steps" in steps["description"]
    assert main(["task=schema", "train.stpes=1"]) == 2
    assert main(["task=schema", "schema.group=modle"]) == 2
    assert "Did you mean 'model'?" in capsys.readouterr().err


def test_a_document_is_all_that_stdout_holds(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Keys of plan, runs and doctor stay as they are here; tests/train/sampling/test_eval.py has those of eval."""
    assert main(["task=plan", "model=mlp", "device=null", "plan.time=false", "--json"]) == 0
    out, err = capfd.readouterr()
    plan = json.loads(out)
    head = {"model": "mlp", "device": "null", "engine": "static", "precision": "fp32", "batch_size": 16}
    assert head.items() <= plan.items() and {"parameters", "flops_per_step", "memory"} <= plan.keys()
    assert "Plan of mlp on null" in err
    run = ["model=mlp", "device=cpu", "engine=dynamic", "train.steps=2", "schedule.warmup=0", "logger=jsonl"]
    assert main([*run, f"run.dir={tmp_path}/run"]) == 0
    capfd.readouterr()
    assert main(["task=runs", f"runs.root={tmp_path}", "--json"]) == 0
    (row,) = json.loads(capfd.readouterr().out)["runs"]
    assert (row["run"], row["state"], row["model"]) == (f"{tmp_path}/run", "finished", "mlp")
    assert (row["step"], row["steps"], row["checkpoint"], row["reason"]) == (2, 2, 2, "")
    assert math.isfinite(row["train/loss"]) and row["updated"].startswith("20")
    assert row.keys() - {"val/loss", "tokens_per_s", "caution"} == {
        "run", "state", "model", "step", "steps", "checkpoint", "train/loss", "updated", "reason",
    }  # fmt: skip
    assert main(["task=runs", f"runs.root={tmp_path}", "runs.state=failed", "--json"]) == 0
    assert capfd.readouterr() == ('{\n  "runs": []\n}\n', f"No failed runs below {tmp_path}.\n")
    assert main(["--json"]) == 2 and main(["task=runs", f"runs.root={tmp_path}/none", "--json"]) == 2
    out, err = capfd.readouterr()
    assert not out and all(f"{task}" in err for task in DOCUMENTS)
