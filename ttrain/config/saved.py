"""The config of an earlier run, with what the command line sets now on top."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from ttrain.config.schema import Config, to_dict
from ttrain.config.validate import typed_config

# What a command is asked to do is never remembered from the run that it works on.
ALWAYS_GIVEN = (
    "task", "resume", "run.dir", "plugins", "export", "plan", "prepare", "bench", "supervise", "sweep", "runs",
    "report", "replicas",
)  # fmt: skip


def continued(saved: Mapping[str, Any], given: Config, always_given: Iterable[str] = ()) -> Config:
    """The saved config, except for keys that the command line set explicitly and those of ALWAYS_GIVEN.

    Explicit are `key=value`, every key of a group chosen by `group=option`, and what a recipe or debug preset sets.
    `always_given` names more keys or sections to take from the command line, set or not: sampling takes `device`, so
    that a run trained on one machine is sampled on another. Raises ConfigError where the two together break a rule.
    """
    merged = copy.deepcopy(dict(saved))
    values = to_dict(given)
    # Whole groups first, so that single keys of a group that was chosen anew land in it.
    for key in sorted({*given.source.explicit, *ALWAYS_GIVEN, *always_given}, key=lambda key: (key.count("."), key)):
        _copy(key.split("."), values, merged)
    return typed_config(merged, dataclasses.replace(given.source, merged=True))


def _copy(path: list[str], source: Mapping[str, Any], target: dict[str, Any]) -> None:
    *parents, last = path
    for name in parents:
        source = source.get(name, {})
        target = target.setdefault(name, {})
    if last in source:
        target[last] = copy.deepcopy(source[last])
