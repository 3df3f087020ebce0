"""One word of the command line, `key=value`: read by Hydra's grammar, or taken as text where the key wants text."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import OverrideParseException

from ttrain.config import registry
from ttrain.config.schema import Config, sections
from ttrain.config.validate import section_type, without_none
from ttrain.core.errors import ConfigError

FREE_TEXT = ("sample.prompt", "data.separator")


def parse(word: str, sweep: bool = False) -> Override:
    """The parsed word; its `input_line` is what Hydra can read. Raises ConfigError with the quoting that would help.

    Free text, such as a prompt, is taken as it stands unless it is quoted. So is the value of any other text key that
    the grammar has no way to read, such as a path with an accent or a bracket. With `sweep` a comma separates values.
    """
    word = _spelt_out(word)
    text_key = _wants_text(word)
    if text_key and not sweep and _key(word) in FREE_TEXT and not _is_quoted(word):
        word = _quoted(word)
    parser = OverridesParser.create()
    try:
        return parser.parse_overrides([word])[0]
    except OverrideParseException:
        if text_key and not (sweep and "," in word):
            return parser.parse_overrides([_quoted(word)])[0]
        raise ConfigError(_syntax_problem(word)) from None


def _spelt_out(word: str) -> str:
    """`supervise=true` and `run=<folder>,<folder>` as the keys that they are short for."""
    key, _, value = word.partition("=")
    if key == "supervise" and value.lower() in ("true", "false", "null"):
        return f"supervise.enabled={value}"
    if key == "run" and value and value[0] not in "{[":
        words = [f"run={part}" for part in value.split(",")]
        parts = [(each if _is_quoted(each) else _quoted(each)).partition("=")[2] for each in words]
        return f"report.run=[{','.join(parts)}]"
    return f"report.run={value}" if key == "run" and value.startswith("[") else word


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+")


def _is_quoted(word: str) -> bool:
    value = word.partition("=")[2]
    return len(value) > 1 and value[0] in "'\"" and value[0] == value[-1]


def _quoted(word: str) -> str:
    """The word with its value as literal text, in which `${...}` is no interpolation."""
    key, _, value = word.partition("=")
    literal = value.replace("${", r"\${")
    return f"{key}={QuotedString(literal, Quote.double).with_quotes()}"


def _wants_text(word: str) -> bool:
    """Whether the key's type is text in any schema that its section may have."""
    section, _, name = _key(word).partition(".")
    if "=" not in word or section not in sections():
        return False
    return any(without_none(typing.get_type_hints(schema).get(name or section)) is str for schema in _schemas(section))


def _schemas(section: str) -> Iterator[type[Any]]:
    """Dataclasses that declare the section's keys; for a single option the root itself."""
    if section in registry.groups():
        yield from (row.config for row in registry.rows() if row.group == section)
    else:
        yield section_type(section, None) or Config


def _syntax_problem(word: str) -> str:
    key, equals, value = word.partition("=")
    if not equals:
        return f"{word!r}: expected key=value."
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f"{word!r}: the value can't be read. To pass it as plain text, quote it twice: '{key}=\"{escaped}\"'."
