"""Malformed configs made from the schema: each exits with 2 and one line, and leaves nothing behind.

TTRAIN_FUZZ=300 checks so many; the suite takes fewer, because composing a config takes a tenth of a second.
"""

from __future__ import annotations

import os
import random
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from tests.faults.conftest import Train
from ttrain.config.schema import Config, sections
from ttrain.config.validate import without_none
from ttrain.core.options import default_of

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
