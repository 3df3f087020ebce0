"""Documented, bounded config fields: what the schema, the checks and the reference page all read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, Field, field, fields
from typing import Any

from ttrain.core.names import did_you_mean


def option(
    default: Any,
    help: str,  # noqa: A002 - the word that argparse and Hydra use too
    *,
    choices: tuple[str, ...] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> Any:
    """A dataclass field with its meaning, unit and bounds.

    `minimum` and `maximum` are inclusive, `above` and `below` exclusive. A mutable default is copied per instance.
    """
    bounds = {"minimum": minimum, "maximum": maximum, "above": above, "below": below}
    metadata = {"help": help, "choices": choices, **bounds}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def default_of(declared: Field[Any]) -> Any:
    """The default value of a dataclass field, however it was declared."""
    if declared.default is not MISSING:
        return declared.default
    return declared.default_factory() if declared.default_factory is not MISSING else None


def option_problems(config: Any, prefix: str) -> Iterable[str]:
    """Every field of a config dataclass that lies outside its declared choices or bounds, one sentence each."""
    for declared in fields(config):
        value, rules = getattr(config, declared.name), declared.metadata
        key = f"{prefix}.{declared.name}" if prefix else declared.name
        if value is None or not rules:
            continue
        items = value if isinstance(value, list) else [value]
        for item in items if rules.get("choices") else []:
            if item not in rules["choices"]:
                yield f"{key}={item}: no such choice. {did_you_mean(str(item), rules['choices'])}"
        for number in items:
            if isinstance(number, bool) or not isinstance(number, int | float):
                continue
            yield from _bound_problems(key, number, rules)


def _bound_problems(key: str, number: float, rules: Any) -> Iterable[str]:
    if number != number:
        yield f"{key}={number}: must be a number."
    if rules["minimum"] is not None and number < rules["minimum"]:
        yield f"{key}={number}: must be at least {rules['minimum']}."
    if rules["above"] is not None and number <= rules["above"]:
        yield f"{key}={number}: must be greater than {rules['above']}."
    if rules["maximum"] is not None and number > rules["maximum"]:
        yield f"{key}={number}: must be at most {rules['maximum']}."
    if rules["below"] is not None and number >= rules["below"]:
        yield f"{key}={number}: must be less than {rules['below']}."
