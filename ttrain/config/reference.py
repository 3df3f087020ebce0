"""The reference page of every config key: `python -m ttrain.config.reference > docs/config.md`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from ttrain.config import components, registry
from ttrain.config.help import shown
from ttrain.config.schema import Config, sections
from ttrain.config.validate import expected, hints_of
from ttrain.core.options import default_of, key_of

HEAD = Path(__file__).with_suffix(".md")  # what the page says before its tables


def reference() -> str:
    """The page as Markdown."""
    parts = [HEAD.read_text("utf-8")]
    for section in sections():
        declared = Config.__dataclass_fields__[section]
        default = default_of(declared)
        if section in registry.groups():
            for schema, names in _schemas(section):
                parts.append(f"## `{section}` {', '.join(names)}\n\n{_first_line(schema)}\n\n{_table(section, schema)}")
        elif is_dataclass(default):
            parts.append(f"## `{section}`\n\n{_first_line(type(default))}\n\n{_table(section, type(default))}")
        else:
            parts.append(f"## `{section}`\n\n{_header()}{_row(section, Config, section)}\n")
    return "\n".join(parts)


def _schemas(group: str) -> Iterator[tuple[type[Any], list[str]]]:
    rows = [row for row in registry.rows() if row.group == group and (row.group, row.name) in components.BUILT_IN]
    for schema in dict.fromkeys(row.config for row in rows):
        yield schema, [row.name for row in rows if row.config is schema]


def _first_line(schema: type[Any]) -> str:
    return (schema.__doc__ or "").strip().splitlines()[0]


def _header() -> str:
    return "| key | default | type | meaning |\n| --- | --- | --- | --- |\n"


def _table(section: str, schema: type[Any]) -> str:
    rows = [_row(f"{section}.{key_of(declared)}", schema, declared.name) for declared in fields(schema)]
    return _header() + "\n".join(rows) + "\n"


def _row(key: str, schema: type[Any], name: str) -> str:
    declared = schema.__dataclass_fields__[name]
    kind = expected(hints_of(schema)[name]) + _bounds(declared.metadata)
    default = shown(default_of(declared)).replace("|", "\\|")
    return f"| `{key}` | `{default}` | {kind} | {declared.metadata['help']} |"


def _bounds(rules: Any) -> str:
    if rules["choices"]:
        return f": {', '.join(rules['choices'])}"
    words = {"minimum": "≥", "above": ">", "maximum": "≤", "below": "<"}
    return "".join(f", {sign} {rules[rule]}" for rule, sign in words.items() if rules[rule] is not None)


if __name__ == "__main__":
    print(reference(), end="")
