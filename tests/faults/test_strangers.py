"""A checkpoint or a YAML file from a stranger can't run code or read elsewhere; no malformed config is run."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import struct
import typing
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.faults.conftest import TINY, Train
from ttrain.cli import main
from ttrain.config.schema import Config, sections
from ttrain.config.validate import without_none
from ttrain.core.errors import CheckpointError
from ttrain.core.files import sha256_file
from ttrain.core.options import default_of
from ttrain.train.checkpoint.checkpoint import Progress, sealed

SHARD = "parameters-00001-of-00001.safetensors"


class Bomb:
    def __reduce__(self) -> Any:
        return (os.system, ("touch exploded",))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    assert main([*TINY, f"run.dir={folder / 'run'}", "train.steps=2"]) == 0
    return folder / "run"


@pytest.fixture
def stranger(trained: Path, train: Train) -> Path:
    """The checkpoint of a run of somebody else, to be tampered with."""
    shutil.copytree(trained, "run")
    return Path("run/checkpoints/step_00000002")


def reseal(checkpoint: Path, *, add: dict[str, Any] | None = None) -> None:
    """Makes the manifest agree with the files, as a stranger can."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    del manifest["sha256"]
    for name in manifest["files"]:
        file = checkpoint / name
        manifest["files"][name] = {"bytes": file.stat().st_size, "sha256": sha256_file(file)}
    manifest["files"] |= add or {}
    (checkpoint / "manifest.json").write_text(sealed(manifest))


def refused(train: Train, part: str, *commands: str) -> None:
    for command in commands or ("resume=run/checkpoints/step_00000002", "resume=run"):
        assert part in train.command(command, "train.steps=3", "device=cpu", code=2), command
    assert not Path("exploded").exists()


def header(length: int, given: bytes | None = None) -> Callable[[bytes], bytes]:
    """A file whose header has another length, or is the one given."""
    return lambda data: struct.pack("<Q", length) + (data[8:] if given is None else given + b"\0" * 4)


def linked(checkpoint: Path) -> None:
    (checkpoint / SHARD).rename("elsewhere.safetensors")
    (checkpoint / SHARD).symlink_to(Path("elsewhere.safetensors").resolve())


ALL_MEMORY = json.dumps({"w": {"dtype": "F32", "shape": [2**40, 2**20], "data_offsets": [0, 4]}}).encode()
SHARDS: dict[str, Callable[[bytes], bytes]] = {
    "a pickle": lambda data: pickle.dumps(Bomb()),
    "no header": header(0),
    "a long header": header(2**32),
    "a header beyond any file": header(2**64 - 1),
    "all memory": header(len(ALL_MEMORY), ALL_MEMORY),
}
TAMPERED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a link out of the folder": (linked, "is missing"),
    **{
        how: (lambda it, change=change: (it / SHARD).write_bytes(change((it / SHARD).read_bytes())), "safetensors")
        for how, change in SHARDS.items()
    },
    **{
        f"config {text[:9]}": (lambda it, text=text: (it / "config.json").write_text(text), "ttrain: ")
        for text in ("[" * 100_000, "[]", "null", "{", "\x00")
    },
}


@pytest.mark.parametrize("how", TAMPERED)
def test_a_checkpoint_that_was_tampered_with_is_refused(stranger: Path, train: Train, how: str) -> None:
    tamper, part = TAMPERED[how]
    tamper(stranger)
    reseal(stranger)
    refused(train, part)


NAMES = ["weights.pt", "code.py", ".json", "../other.safetensors", "/etc/passwd", "a/b.json", "..", "manifest.json"]


@pytest.mark.parametrize("name", NAMES)
def test_files_of_other_kinds_and_places(stranger: Path, train: Train, name: str) -> None:
    if name in NAMES[:3]:
        (stranger / name).write_bytes(pickle.dumps(Bomb()))
        refused(train, name)
    reseal(stranger, add={name: {"bytes": 1, "sha256": "0" * 64}})
    refused(train, "its own folder only")


PROGRESS = [
    ("step", "2"), ("tokens", None), ("tokens", True), ("read_samples", -1), ("lr_factor", []), ("lr_factor", -0.5),
    ("loss_scale", -2.0), ("loss_scale", float("nan")), ("loss_scale", float("inf")), ("loss_scale", "2"),
    ("good_steps", 1.5), ("val_loss", {}), ("wandb_id", 1), ("x", 1),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), PROGRESS)
def test_kinds_of_progress(name: str, value: Any) -> None:
    whole = vars(Progress(step=2, lr_factor=1, val_loss=-0.5, wandb_id="a", loss_scale=0.25))
    assert vars(Progress.from_dict(whole)) == whole
    with pytest.raises(CheckpointError, match=f"the progress holds '?{name}"):
        Progress.from_dict({**whole, name: value})


NAMED = [("train", "_target_", "os.system"), ("model", "name", "os:system"), ("data", "name", "../../evil")]


@pytest.mark.parametrize(("section", "key", "value"), NAMED)
def test_a_config_that_names_code(stranger: Path, train: Train, section: str, key: str, value: str) -> None:
    """The config is that of the run, or that of the checkpoint if the run has none."""
    own = Path("run/config.yaml")
    for file in (own, stranger / "config.json"):
        config = yaml.safe_load(file.read_text())
        config[section][key] = value
        file.write_text(json.dumps(config))
    reseal(stranger)
    part = "_target_: unknown key" if key == "_target_" else "not registered"
    refused(train, part)
    own.unlink()
    refused(train, part)


def test_commands_and_plugins_of_a_checkpoint_are_ignored(stranger: Path, train: Train) -> None:
    config = json.loads((stranger / "config.json").read_text())
    config["plugins"] = ["exploding_plugin"]
    config["supervise"] = {**config["supervise"], "enabled": True, "on_restart": "touch exploded"}
    (stranger / "config.json").write_text(json.dumps(config))
    reseal(stranger)
    Path("exploding_plugin.py").write_text("open('exploded', 'w')\n")
    assert "on_restart" not in train.command("resume=run", "train.steps=3") and not Path("exploded").exists()


@pytest.mark.parametrize(
    "text",
    [
        "train: !!python/object/apply:os.system ['touch exploded']",
        "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]",
        "defaults: [../../../../etc/passwd]",
    ],
)
def test_a_yaml_file(train: Train, text: str) -> None:
    """Names of code, plugins and commands in a file are refused where configs are composed."""
    Path("own").mkdir()
    Path("own/mine.yaml").write_text(text)
    for overrides in ([], ["-m", "run.seed=1,2"]):
        train.command("--config-dir", "own", "--config-name", "mine", "device=null", *overrides, code=2)
    assert not Path("exploded").exists()


def test_the_config_of_a_run_that_is_inspected(stranger: Path, train: Train) -> None:
    with open("run/metrics.jsonl", "a") as metrics:
        metrics.write('{"step": 1, "train/loss": "low"}\n' + "[" * 10**5 + "\n")
    Path("run/events.jsonl").write_text('{"kind": "held_out", "step": "x"}\n')
    Path("run/plan.txt").write_bytes(b"\xff")
    Path("run/summary.json").write_text('{"step": null, "tokens": "many"}')
    for text in ("!!python/object/apply:os.system ['touch exploded']", "[" * 3000, "{train: , model: 3}"):
        Path("run/config.yaml").write_text(text)
        train.command("task=runs", "runs.root=.")
        train.command("task=report", "run=run")
        assert not Path("exploded").exists()


def test_a_tokenizer_that_is_none(stranger: Path, train: Train) -> None:
    for content in (pickle.dumps(Bomb()), b"[]", b"{", b'{"kind": "char"}'):
        file = stranger / "tokenizer.json"
        file.write_bytes(content)
        reseal(stranger, add={file.name: {"bytes": len(content), "sha256": sha256_file(file)}})
        train.command("task=sample", "run.dir=run", code=2)
        assert not Path("exploded").exists()


# malformed configs made from the schema


# TTRAIN_FUZZ=300 checks so many; the suite takes fewer, because composing a config takes a tenth of a second.
EXAMPLES = int(os.environ.get("TTRAIN_FUZZ", "25"))
# Text that every option may have, so nothing but its type can be wrong.
NO_NUMBER = ("x", "1e", "--3", "[1,2]", "{a: 1}", "1_x", "''", "true1")


def declared() -> Iterator[tuple[str, Any, Any]]:
    """(key, type, rules) of every key that a default command has."""
    default = Config()
    for section in sections():
        part = getattr(default, section)
        if not is_dataclass(part):
            continue
        hints = typing.get_type_hints(type(part))
        for field in fields(part):
            if field.name != "name":
                yield f"{section}.{field.name}", hints[field.name], field.metadata


KEYS = list(declared())


def wrong_values(hint: Any, rules: Any) -> list[str]:
    """Values that the key must refuse."""
    bare, values = without_none(hint), []
    if bare in (int, float):
        values += NO_NUMBER
        values += [] if bare is float else ["1.5", "1e-3", "inf", "nan"]
    elif bare is bool:
        values += ["maybe", "2", "[true]", "1.0"]
    elif bare is str and rules["choices"]:
        values += ["nonsense", "[a]", "{a: 1}"]
    if bare in (int, float):
        if rules["minimum"] is not None:
            values.append(str(rules["minimum"] - 1))
        if rules["above"] is not None:
            values += [str(rules["above"]), str(rules["above"] - 1)]
        if rules["below"] is not None:
            values += [str(rules["below"]), str(rules["below"] + 1)]
        if rules["maximum"] is not None:
            values.append(str(rules["maximum"] + 1))
    if bare is hint and values:
        values.append("null")
    return values


WRONG = [f"{key}={value}" for key, hint, rules in KEYS for value in wrong_values(hint, rules)]
PREFIXES = ("", "+", "++", "--")
OTHERS = [
    "train.steps_q=1", "qtrain.steps=1", "optimizer=adamwq", "train.steps", "train.steps=[1", "train.steps={a",
    "train.steps=${x", "train.steps=1,2", "train.steps=a: b: c}", "train.steps=(", "train.steps=\"x",
    "+model._target_=os.system",
]  # fmt: skip


def test_every_malformed_config_is_refused_in_one_line(train: Train) -> None:
    chosen = random.Random(0).sample(WRONG, EXAMPLES)
    before = set(os.listdir())
    for override in [*OTHERS, *(PREFIXES[number % 4] + given for number, given in enumerate(chosen))]:
        said = train.command(override, "device=null", code=2)
        assert said.startswith("ttrain: ") and said.count("\n") == 1, f"{override}: {said}"
        assert set(os.listdir()) == before, override


def test_the_schema_was_walked() -> None:
    assert len(KEYS) > 90 and len(WRONG) > 400
    assert default_of(Config.__dataclass_fields__["train"]).steps == 1000
