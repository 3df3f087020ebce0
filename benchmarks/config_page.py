"""The reference page of every config key: `python -m benchmarks.config_page > docs/config.md`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from ttrain.config import components, registry
from ttrain.config.help import shown
from ttrain.config.schema import Config, sections
from ttrain.config.validate import entry_type, expected, hints_of
from ttrain.core.options import default_of, key_of

HEAD = Path(__file__).with_suffix(".md")  # what the page says before its tables


def reference() -> str:
    """The page as Markdown."""
    parts = [HEAD.read_text("utf-8")]
    for section in sections():
        declared = Config.__dataclass_fields__[section]
        default = default_of(declared)
        if section in registry.groups():
            parts += _group(section)
        elif is_dataclass(default):
            parts.append(
                f"## `{section}`\n\n{_first_line(type(default))}\n\n{_table(_rows(section, type(default)).values())}"
            )
        else:
            parts.append(f"## `{section}`\n\n{_table([_row(section, Config, section)])}")
    return "\n".join(parts)


def _group(group: str) -> Iterator[str]:
    """One part for each schema of a group; rows that an earlier part has are only named."""
    printed: set[str] = set()
    for schema, names in _schemas(group):
        rows = _rows(group, schema)
        again = [key for key, row in rows.items() if row in printed]
        text = f"## `{group}` {', '.join(names)}\n\n{_first_line(schema)}\n"
        if again:
            text += f"\nAs above: {', '.join(f'`{key}`' for key in again)}.\n"
        new = [row for row in rows.values() if row not in printed]
        printed.update(new)
        yield text + (f"\n{_table(new)}" if new else "")


def _schemas(group: str) -> Iterator[tuple[type[Any], list[str]]]:
    rows = [row for row in registry.rows() if row.group == group and (row.group, row.name) in components.BUILT_IN]
    for schema in dict.fromkeys(row.config for row in rows):
        yield schema, [row.name for row in rows if row.config is schema]


def _first_line(schema: type[Any]) -> str:
    return (schema.__doc__ or "").strip().splitlines()[0]


def _rows(section: str, schema: type[Any]) -> dict[str, str]:
    """Rows by key, without the name of an option, which the title has."""
    found = {}
    for declared in fields(schema):
        key = f"{section}.{key_of(declared)}"
        if declared.name != "name" or declared.metadata["choices"] or section.endswith("]"):
            found[key_of(declared)] = _row(key, schema, declared.name)
        if entry := entry_type(hints_of(schema)[declared.name]):
            found |= {f"{key_of(declared)}[]{name}": row for name, row in _rows(f"{key}[]", entry).items()}
    return found


def _table(rows: Iterable[str]) -> str:
    return "\n".join(["| key | default: values | meaning |", "| --- | --- | --- |", *rows]) + "\n"


def _row(key: str, schema: type[Any], name: str) -> str:
    declared = schema.__dataclass_fields__[name]
    default, rules = default_of(declared), declared.metadata
    cells = (f"`{key}`", f"`{shown(default)}`" + _others(default, hints_of(schema)[name], rules), rules["help"])
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _others(default: Any, hint: Any, rules: Any) -> str:
    """What may be given in place of the default: nothing that the default itself tells."""
    if isinstance(default, bool):
        return ""
    kind = expected(hint).removeprefix("an ").removeprefix("a ").replace("true or false", "boolean")
    if default is None:
        kind = kind.removesuffix(" or null")
    if rules["choices"]:
        kind = kind.replace("texts", "text").replace("text", ", ".join(rules["choices"]))
    words = {"minimum": "≥", "above": ">", "maximum": "≤", "below": "<"}
    bounds = [f"{sign} {rules[rule]}" for rule, sign in words.items() if rules[rule] is not None]
    return f": {kind} {', '.join(bounds)}".rstrip()


if __name__ == "__main__":
    print(reference(), end="")
