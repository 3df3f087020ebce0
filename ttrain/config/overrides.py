"""One override of the command line, `key=value`: Hydra's grammar reads it, except for keys that hold plain text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, get_origin

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import OverrideParseException

from ttrain.config import registry
from ttrain.config.schema import Config, sections
from ttrain.config.validate import NO_VALUE, expected, hints_of, section_type, without_none
from ttrain.core.errors import ConfigError
from ttrain.train.runs.record import as_text

OPTIONAL_GROUPS = ("recipe", "debug")  # of which none may be chosen
# What a word processor or a web page makes of quotes and minus signs. No number, name or list holds one of them.
TYPOGRAPHIC = str.maketrans("“”„‘’‚\u00a0‐‑‒–—−", "\"\"\"''' ------")


def parse(override: str, sweep: bool = False) -> Override:
    """The parsed override; its `input_line` is what Hydra can read.

    Free text, such as a prompt, is taken as it stands unless it is quoted. So is the value of any other text key that
    the grammar has no way to read, such as a path with an accent or a bracket. With `sweep` a comma separates values.
    Raises ConfigError with the quoting that would help.
    """
    override = _spelt_out(override, sweep)
    if override.startswith("="):
        raise ConfigError(_syntax_problem(override, []))
    declared = list(_declared(override))
    hints = [hint for hint, _ in declared]
    text_key = any(without_none(hint) is str for hint in hints)
    if not sweep and any(verbatim for _, verbatim in declared) and not _is_quoted(override):
        override = _quoted(override)
    parser = OverridesParser.create()
    try:
        return parser.parse_overrides([override])[0]
    except OverrideParseException:
        # A list or mapping as Python writes it comes as text too: the type of its key tells how it is read.
        if (text_key and not (sweep and "," in override)) or _is_python(override, hints):
            return parser.parse_overrides([_quoted(override)])[0]
        raise ConfigError(_syntax_problem(override, hints)) from None


def _spelt_out(override: str, sweep: bool) -> str:
    """The override as its key has it: no space around the key, plain quotes and minus signs where no text is wanted.

    `run=<folder>` is short for run.dir, `run=<folder>,<folder>` for report.run, `supervise=true` for supervise.enabled;
    `recipe=None`, as W&B's agents write it, chooses none.
    """
    key, equals, value = override.partition("=")
    key = key.strip()
    if not equals or not key:
        return override
    if not any(without_none(hint) is str for hint, _ in _declared(override)) and not value.isascii():
        value = value.translate(TYPOGRAPHIC)
    if key == "supervise" and value and value[0] not in "{$":
        return f"supervise.enabled={value}"
    if key.lstrip("+") in OPTIONAL_GROUPS and value in ("null", NO_VALUE):
        return f"~{_key(override)}"
    if key == "run" and value.startswith("["):
        if "," in value or not value.endswith("]"):
            return f"report.run={value}"
        value = value[1:-1].strip()
    if key == "run" and value and value[0] not in "{$":
        overrides = [f"run={part}" for part in value.split(",") if part]
        parts = [(each if _is_quoted(each) else _quoted(each)).partition("=")[2] for each in overrides]
        if len(parts) > 1 and not sweep:
            return f"report.run=[{','.join(parts)}]"
        return f"run.dir={','.join(parts)}"
    return f"{key}={value}"


def _key(override: str) -> str:
    return override.partition("=")[0].strip().lstrip("+")


def _is_quoted(override: str) -> bool:
    value = override.partition("=")[2]
    return len(value) > 1 and value[0] in "'\"" and value[0] == value[-1]


def _is_python(override: str, hints: list[Any]) -> bool:
    """Return whether the key holds lists or mappings and the value has the brackets of one."""
    value = override.partition("=")[2].strip()
    held = any(get_origin(without_none(hint)) in (list, dict) for hint in hints)
    return held and len(value) > 1 and value[0] + value[-1] in ("[]", "{}", "()")


def _quoted(override: str) -> str:
    """The override with its value as literal text, in which `${...}` is no interpolation."""
    key, _, value = override.partition("=")
    return f"{key}={as_text(value)}"


def _declared(override: str) -> Iterator[tuple[Any, bool]]:
    """Yield the key's type in every schema that its section may have, and True where it takes text verbatim.

    An override that is no key of ours has none.
    """
    section, _, name = _key(override).partition(".")
    if "=" not in override or section not in sections():
        return
    schemas = [row.config for row in registry.rows() if row.group == section] or [section_type(section, None) or Config]
    for schema in schemas:
        if (name or section) in (hints := hints_of(schema)):
            rules = schema.__dataclass_fields__[name or section].metadata
            yield hints[name or section], bool(rules.get("verbatim"))


def _syntax_problem(override: str, hints: list[Any]) -> str:
    key, equals, value = override.partition("=")
    if not equals or not key:
        return f"{override!r}: expected key=value. {_nearest(override)}"
    if hints:
        return f"{override!r}: the value can't be read. It must be {expected(hints[0])}."
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f"{override!r}: the value can't be read. To pass it as plain text, quote it twice: '{key}=\"{escaped}\"'."


def _nearest(override: str) -> str:
    """Return a guess at what an override without an equals sign was meant to be, else the commonest reason for one."""
    bare = override.strip().lower()
    if bare in registry.names("task"):
        return f"Did you mean 'task={bare}'?"
    if bare in ("help", "version"):
        return f"Did you mean '--{bare}'?"
    key, colon, value = override.partition(":")
    if colon and key.partition(".")[0] in sections() and re.fullmatch(r"[\w.]+", key):
        return f"Did you mean '{key}={value.strip()}'?"
    return "No space goes around the equals sign; text with a space is quoted."
