"""Documented, bounded config fields, which the schema, the checks and the reference page read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, asdict, field, fields
from operator import ge, gt, le, lt
from types import FunctionType
from typing import Any

from ttrain.core.names import did_you_mean

LARGEST_INTEGER = 2**63 - 1  # of a shape, an offset and a seed alike
Rule = Callable[[Any, Any], Iterable[str]]
_RULES: set[Rule] = set()
_BOUNDS = {"minimum": (ge, "at least"), "above": (gt, "above"), "maximum": (le, "at most"), "below": (lt, "below")}


def option(
    default: Any,
    help: str,  # noqa: A002 - the word that argparse and Hydra use too
    *,
    choices: tuple[str, ...] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    path: bool = False,
    changes: str = "function",
    one: bool = False,
    verbatim: bool = False,
) -> Any:
    """Declare a dataclass field with its meaning, unit and bounds.

    `minimum` and `maximum` are inclusive, `above` and `below` exclusive. They hold for each number of a list or
    mapping. A `path` names a file or folder; a leading `~` in it is the home folder. `changes` is for keys of a model,
    see models/identity.py. With `one`, a single value stands for a list of one value. A `verbatim` text is not parsed.
    A mutable default is copied per instance.
    """
    bounds = {"minimum": minimum, "maximum": maximum, "above": above, "below": below}
    kinds = {"path": path, "changes": changes, "one": one, "verbatim": verbatim}
    metadata = {"help": help, "choices": choices, **kinds, **bounds}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def rule(check: Rule) -> Rule:
    """Mark a method of a section as one of its rules, `check(self, others)`.

    It yields a sentence for each problem: what was given, what is expected, how to fix it. `others` has the other
    sections by name; a rule that asks for one whose own values are wrong is left out.
    """
    _RULES.add(check)
    return check


def rules_of(section: Any) -> Iterator[Rule]:
    """Yield the rules of a config dataclass, those of its bases first."""
    for kind in reversed(type(section).__mro__):
        yield from (check for check in vars(kind).values() if isinstance(check, FunctionType) and check in _RULES)


def key_of(declared: Field[Any]) -> str:
    """Return the key of a field: its name, without the underscore that sets it apart from a word of Python."""
    return declared.name.rstrip("_")


def as_keys(config: Any) -> dict[str, Any]:
    """Return a config dataclass as plain values by key."""
    values = asdict(config)
    return {key_of(declared): values[declared.name] for declared in fields(config)}


def default_of(declared: Field[Any]) -> Any:
    """Return the default value of a dataclass field, however it was declared."""
    if declared.default is not MISSING:
        return declared.default
    return declared.default_factory() if declared.default_factory is not MISSING else None


def value_problems(key: str, value: Any, rules: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each part of a value that lies outside the choices or bounds of its option."""
    items: Iterable[tuple[str, Any]] = [(key, item) for item in value] if isinstance(value, list) else [(key, value)]
    if isinstance(value, dict):
        items = [(f"{key}.{name}", item) for name, item in value.items()]
    for path, item in items if rules and value is not None else ():
        if rules.get("choices") and item not in rules["choices"]:
            yield f"{path}={item}: no such choice. {did_you_mean(str(item), rules['choices'])}"
        if rules.get("path") and isinstance(item, str) and (not item.strip() or "\0" in item):
            yield f"{path}={item!r}: must be the path of a file or folder."
        if isinstance(item, int | float) and not isinstance(item, bool):
            yield from _bound_problems(path, item, rules)


def _bound_problems(key: str, number: float, rules: Any) -> Iterable[str]:
    if not math.isfinite(number):
        yield f"{key}={number}: must be a finite number."
        return
    if isinstance(number, int) and abs(number) > LARGEST_INTEGER and rules["maximum"] is None:
        yield f"{key}={number}: must be at most {LARGEST_INTEGER}."
    for bound, (holds, words) in _BOUNDS.items():
        if rules[bound] is not None and not holds(number, rules[bound]):
            yield f"{key}={number}: must be {words} {rules[bound]}."


def differences(old: Any, new: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted key and both values of whatever differs in two nested mappings; None where one has no such key."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            yield from differences(old.get(key), new.get(key), f"{prefix}.{key}" if prefix else str(key))
    elif old != new:
        yield prefix, old, new


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key below `key` and the value of all that is no mapping, or an empty one."""
    if isinstance(value, dict) and value:
        for name, part in value.items():
            yield from leaves(part, f"{key}.{name}" if key else str(name))
    else:
        yield key, value
