"""Malformed configs made from the schema: each exits with 2 and one line, and leaves nothing behind.

TTRAIN_FUZZ=300 checks that many; the suite takes fewer, because composing a config takes a tenth of a second.
"""

from __future__ import annotations

import contextlib
import io
import os
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ttrain.cli import main
from ttrain.config import registry
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


WRONG = [(key, value) for key, hint, rules in KEYS for value in wrong_values(hint, rules)]
GROUPS = sorted(registry.groups())


@st.composite
def malformed(draw: st.DrawFn) -> str:
    """One override on a command line that can't be right."""
    kind = draw(st.sampled_from(["value", "value", "value", "key", "root", "option", "syntax", "target"]))
    if kind == "value":
        key, value = draw(st.sampled_from(WRONG))
        return f"{draw(st.sampled_from(['', '+', '++', '--']))}{key}={value}"
    key = draw(st.sampled_from([key for key, _, _ in KEYS]))
    letters = st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=3)
    if kind == "key":
        return f"{key}_{draw(letters)}q={draw(st.sampled_from(['1', 'x', 'null', '[1]']))}"
    if kind == "root":
        return f"{draw(letters)}q{key}=1"
    if kind == "option":
        return f"{draw(st.sampled_from(GROUPS))}={draw(letters)}q"
    if kind == "syntax":
        key = draw(st.sampled_from([key for key, hint, rules in KEYS if without_none(hint) is not str]))
        return key + draw(st.sampled_from(["", "=[1", "={a", "=${x", "=1,2", "=a: b: c}", "=(", '="x']))
    return f"+{key.partition('.')[0]}._target_=os.system"


CHECKED: list[str] = []


@settings(
    max_examples=EXAMPLES,
    phases=[Phase.generate],
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(malformed())
def check_one(override: str) -> None:
    before = set(os.listdir())
    errors, output = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(output):
        code = main([override, "device=null"])
    said = errors.getvalue()
    assert code == 2, f"{override}: exit {code}: {said}{output.getvalue()}"
    assert said.startswith("ttrain: ") and "Traceback" not in said, f"{override}: {said}"
    assert said.count("\n") == 1, f"{override}: {said}"
    assert set(os.listdir()) == before, override
    CHECKED.append(override)


def test_every_malformed_config_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_one()
    print(f"malformed configs refused: {len(CHECKED)}, distinct: {len(set(CHECKED))}")
    assert len(set(CHECKED)) >= 0.8 * EXAMPLES


def test_the_schema_was_walked() -> None:
    assert len(KEYS) > 90 and len(WRONG) > 400
    assert default_of(Config.__dataclass_fields__["train"]).steps == 1000
