"""The config as a JSON Schema (draft 2020-12), with which editors complete and check YAML files.

It holds the keys, types, choices and bounds of files. The rules across keys stay with the config, and so do values that
are no JSON (NaN), keys of an option that another file or the command line chooses, and which file may name which.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import Field, fields, is_dataclass
from typing import Any, get_args, get_origin

from ttrain.config import registry
from ttrain.config.compose import ON_COMMAND_LINE
from ttrain.config.files import ConfigFiles
from ttrain.config.schema import Config, sections
from ttrain.config.validate import entry_type, hints_of, takes_texts, without_none
from ttrain.core.errors import ConfigError
from ttrain.core.files import to_json
from ttrain.core.names import did_you_mean
from ttrain.core.options import LARGEST_INTEGER, default_of, key_of

Schema = dict[str, Any]
DIALECT = "https://json-schema.org/draft/2020-12/schema"
KINDS = {int: ["integer"], float: ["number"], bool: ["boolean"], str: ["string", "number"]}
BOUNDS = {"minimum": "minimum", "maximum": "maximum", "above": "exclusiveMinimum", "below": "exclusiveMaximum"}
LATER = r"^\?\?\?$|\$\{"  # a text in place of any value: another file gives it, or it is an interpolation


def run(config: Config) -> None:
    """Task schema: prints the schema to stdout. Raises ConfigError for an unknown schema.group."""
    print(to_json(file_schema(config.source.files, config.schema.group)), end="")


def file_schema(files: ConfigFiles, section: str | None = None) -> Schema:
    """Return the schema of recipes and main configs, or of the files in the folder of one `section`.

    Options are those of `files` and of the plugins that are loaded. Raises ConfigError for an unknown section.
    """
    listed = {"defaults": {"type": "array", "items": {"anyOf": [{"type": "string"}, _chosen(files)]}}}
    if section is not None:
        if section not in (known := {*files.groups()} & {*sections()}):
            raise ConfigError(f"schema.group={section}: no such group. {did_you_mean(section, known)}")
        return {"$schema": DIALECT, "$ref": f"#/$defs/{section}", "$defs": _parts(section, listed)}
    keys = {**listed, **{name: _part(name) for name in sections()}, "hydra": {"type": "object"}}
    parts = {name: part for section in sections() for name, part in _parts(section, {}).items()}
    conditions = [each for group in registry.groups() for each in _conditions(files, group)]
    whole = {"type": "object", "properties": keys, "additionalProperties": False, "allOf": conditions}
    return {"$schema": DIALECT, "title": "ttrain", **whole, "$defs": parts}


def _part(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def _parts(section: str, more: Schema) -> Schema:
    """Return the definition of a section, and one for each config dataclass of its components."""
    declared = Config.__dataclass_fields__[section]
    if section in registry.groups():
        choice = {"description": declared.metadata["help"]}
        found = {
            name: _object(section, rows[0].config, {**more, "name": {**choice, "enum": [row.name for row in rows]}})
            for name, rows in _components(section).items()
        }
        return {section: {"anyOf": [_part(name) for name in found]}, **found}
    default = default_of(declared)
    if is_dataclass(default):
        return {section: _object(section, type(default), more)}
    return {section: _value(Config, declared, section)}


def _components(group: str) -> dict[str, list[registry.Component]]:
    """Return the rows of a group by the config dataclass that they share, under a name of it."""
    rows = [row for row in registry.rows() if row.group == group]
    shared = {config: [row for row in rows if row.config is config] for config in {row.config: 0 for row in rows}}
    return {f"{group}.{each[0].name}": each for each in shared.values()}


def _object(section: str, config: type[Any], more: Schema) -> Schema:
    values = {key_of(each): _value(config, each, f"{section}.{key_of(each)}") for each in fields(config)}
    about = (config.__doc__ or "").partition("\n")[0]
    return {"type": "object", "description": about, "properties": {**values, **more}, "additionalProperties": False}


def _value(config: type[Any], declared: Field[Any], key: str) -> Schema:
    """Return the schema of one key; `pattern` there says nothing about numbers, nor bounds about texts."""
    hint, rules, default = hints_of(config)[declared.name], declared.metadata, default_of(declared)
    about = {"description": rules["help"], "default": default}
    if key in ON_COMMAND_LINE:
        return {**about, "enum": [default]}
    bare = without_none(hint)
    kind, parts = get_origin(bare), get_args(bare)
    null = ["null"] if bare is not hint or default == "none" else []
    if kind is list:
        entry, text = entry_type(hint), _single(str if takes_texts(hint) else parts[0], rules, [])
        item = {"anyOf": [_object(key, entry, {}), *([text] if takes_texts(hint) else [])]} if entry else text
        found = {**about, "type": ["array", "string", *null], "items": item, "pattern": LATER}
        return {**about, "anyOf": [found, item]} if rules["one"] else found
    if kind is dict:
        found = {**about, "type": ["object", "string", *null], "pattern": LATER}
        return {**found, "additionalProperties": _single(parts[1], rules, [])}
    return {**about, **_single(bare, rules, null)}


def _single(kind: Any, rules: Mapping[str, Any], null: list[str]) -> Schema:
    if rules["choices"]:
        return {"anyOf": [{"enum": [*rules["choices"], *(None for _ in null)]}, {"type": "string", "pattern": LATER}]}
    if get_origin(kind) is list:
        return {"type": "array", "items": _single(get_args(kind)[0], rules, [])}
    if kind not in KINDS:
        return {}
    if kind is str:
        return {"type": KINDS[str] + null, **({"pattern": r"\S"} if rules["path"] else {})}
    limits = {"minimum": -LARGEST_INTEGER, "maximum": LARGEST_INTEGER} if kind is int else {}
    bounds = {word: rules[bound] for bound, word in BOUNDS.items() if rules[bound] is not None}
    return {"type": [*KINDS[kind], "string", *null], **limits, **bounds, "pattern": LATER}


def _chosen(files: ConfigFiles) -> Schema:
    """Return the schema of an entry of a defaults list that chooses options of groups."""
    properties: Schema = {}
    for group in files.groups():
        options: Schema = {"enum": [*files.options(group), None]}
        if group == "logger":
            options = {"anyOf": [options, {"type": "array", "items": options}]}
        properties |= dict.fromkeys((f"override /{group}", f"override {group}", f"/{group}", group), options)
    # More forms of Hydra, such as `optional model` and `model@<package>`, pass as they are.
    names = {"anyOf": [{"enum": list(properties)}, {"pattern": "^optional |@"}]}
    return {"type": "object", "properties": properties, "propertyNames": names}


def _conditions(files: ConfigFiles, group: str) -> Iterator[Schema]:
    """Yield for each kind of component: where the defaults list chooses it, the section has its keys."""
    for name, rows in _components(group).items():
        names = {row.name for row in rows}
        options = [option for option in files.options(group) if files.component(group, option) in names]
        key = {"pattern": f"^(override )?/?{group}$"}
        entry = {"type": "object", "minProperties": 1, "propertyNames": key, "additionalProperties": {"enum": options}}
        chosen = {"required": ["defaults"], "properties": {"defaults": {"contains": entry}}}
        yield {"if": chosen, "then": {"properties": {group: _part(name)}}}
