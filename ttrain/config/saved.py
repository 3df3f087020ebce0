"""The config of an earlier run or of a folder of Transformers, with the keys of this command on top."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ttrain.config import registry
from ttrain.config.schema import Config, Given, to_dict
from ttrain.config.validate import Findings, typed_config
from ttrain.core.errors import CheckpointError, UserError
from ttrain.core.options import key_of
from ttrain.train.settings import DURATIONS, OF_A_COMMAND, superseded

# What a command is asked to do is never remembered from the run that it works on.
ALWAYS_GIVEN = (*OF_A_COMMAND, "replicas", "parallel.name", "parallel.processes", "parallel.timeout")


def continued(saved: Mapping[str, Any], given: Config, always_given: Iterable[str] = ()) -> Config:
    """The saved config, except for keys that the command line set explicitly and those of ALWAYS_GIVEN.

    Explicit are `key=value`, every key of a group chosen by `group=option`, and what a recipe or debug preset sets.
    `always_given` names more keys or sections to take from the command line, set or not: sampling takes `device`, so
    that a run trained on one machine is sampled on another. Raises ConfigError where the two together break a rule.
    """
    merged = copy.deepcopy(dict(saved))
    values = to_dict(given)
    # Whole groups first, so that single keys of a group that was chosen anew land in it.
    explicit = given.source.explicit - {"parallel"}  # how many processes take part does not change the slices
    # What the run has already keeps the steps that followed from it.
    new = {f"train.{name}" for name in DURATIONS if values["train"][name] != merged["train"].get(name)}
    merged["train"] |= dict.fromkeys(superseded(new & explicit))
    for key in sorted({*explicit, *ALWAYS_GIVEN, *always_given}, key=lambda key: (key.count("."), key)):
        _copy(key.split("."), values, merged)
    return typed_config(merged, dataclasses.replace(given.source, merged=True))


def _copy(path: list[str], source: Mapping[str, Any], target: dict[str, Any]) -> None:
    *parents, last = path
    for name in parents:
        source = source.get(name, {})
        target = target.setdefault(name, {})
    if last in source:
        target[last] = copy.deepcopy(source[last])


def with_model_folder(values: dict[Any, Any], source: Given, found: Findings) -> tuple[dict[Any, Any], Given]:
    """The plain values, which have model.from, with what it says in them, and their source.

    Keys that disagree are problems.
    """
    model = values["model"]
    given = str(model["from"])
    from ttrain.train.checkpoint.hub_folder import find_folder, read_architecture

    own = {key: value for key, value in model.items() if f"model.{key}" in source.explicit and value is not None}
    if isinstance(saved := _saved(values).get("model"), dict) and saved.get("from") == given:
        return {**values, "model": {**saved, **own}}, source
    try:
        folder = find_folder(given)
        sizes = read_architecture(folder)
        data = _with_tokenizer(values.get("data"), folder, source)
    except UserError as error:
        found.add(f"model.from={given}: {error}", "model", "data")
        return values, source
    for problem in _disagreeing(own, sizes, given, source.choices.get("model")):
        found.add(problem, "model")
    source = dataclasses.replace(source, choices={**source.choices, "model": Path(given).name})
    return {**values, "model": {**sizes, **own, "from": given}, "data": data}, source


def with_saved_options(values: dict[Any, Any], source: Given) -> tuple[dict[Any, Any], Given]:
    """Return the plain values, where what no key names is as in the run to continue, and their source."""
    saved, found = _saved(values), dict(values)
    for group in {*registry.groups()} - {"task", "parallel", *source.explicit}:
        own, given = saved.get(group), values.get(group)
        if isinstance(own, dict) and isinstance(given, dict) and own.get("name") != given.get("name"):
            keys = {key: value for key, value in given.items() if f"{group}.{key}" in source.explicit}
            kept = {key: value for key, value in own.items() if key != "from"}  # a folder is for new runs
            found[group] = {**kept, **keys}
    return found, dataclasses.replace(source, continues=bool(saved))


def _saved(values: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the recorded config of the run that is continued; empty where there is none."""
    resume, run = values.get("resume"), values.get("run")
    place = run.get("dir") if resume == "auto" and isinstance(run, Mapping) else resume
    if not isinstance(place, str) or place == "none":
        return {}
    from ttrain.train.runs.run_directory import read_config

    for folder in (Path(place), *Path(place).absolute().parents[1:2]):
        with suppress(CheckpointError):  # it may be a checkpoint of the run, too
            return read_config(folder)
    return {}


def _disagreeing(own: Mapping[str, Any], sizes: Mapping[str, Any], given: str, chosen: str | None) -> Iterator[str]:
    """One problem for each key of the user's that the folder says otherwise.

    A context may be shorter where no parameter depends on it.
    """
    row = registry.find("model", sizes["name"])
    assert row is not None
    rules = {key_of(declared): declared.metadata["changes"] for declared in dataclasses.fields(row.config)}
    config: Any = row.config
    preset = config.presets.get(config.preset_called(own.get("preset")), {})
    if any(sizes.get(key, value) != value for key, value in preset.items() if key != "context"):
        yield f"model.preset={own['preset']}: {given} has other sizes. Leave it out, and model=<option> with it."
    for key, value in own.items():
        numbers = isinstance(value, int) and isinstance(sizes.get(key), int)
        shorter = numbers and key == "context" and rules[key] != "shape" and value <= sizes[key]
        free = shorter or rules.get(key) == "nothing"
        if key in sizes and value != sizes[key] and not free:
            told = f"model={chosen}" if key == "name" and chosen else f"model.{key}={value}"
            yield f"{told}: {given} has {sizes[key]}. Leave it out, or give what the folder or file has."


def _with_tokenizer(data: Any, folder: Path, source: Given) -> Any:
    """The data section with the folder's tokenizer and its end token, unless the user gave one."""
    row = registry.find("data", str(data.get("name"))) if isinstance(data, Mapping) else None
    if row is None or getattr(row.config, "tokenizer", None) is None or "data.tokenizer" in source.explicit:
        return data
    from ttrain.data.chat.jinja import tokenizer_settings
    from ttrain.train.checkpoint.hub_folder import tokenizer_file

    file = tokenizer_file(folder)
    if not file.is_file():
        raise UserError("has no tokenizer.json. Give data.tokenizer=<tokenizer.json>.")
    taken: dict[str, Any] = {"tokenizer": str(file)}
    if hasattr(row.config, "end_token") and "data.end_token" not in source.explicit:
        taken["end_token"] = tokenizer_settings(file).get("eos_token")
    return {**data, **taken}
