"""Turn nested values into the typed config. All unknown keys, wrong types and bounds are reported together."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import Field, dataclass, field, fields, is_dataclass, make_dataclass, replace
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ttrain.config import registry
from ttrain.config.renamed import instead
from ttrain.config.schema import Config, Given, sections
from ttrain.core.errors import ConfigError
from ttrain.core.folders import at_home
from ttrain.core.names import did_you_mean
from ttrain.core.options import default_of, key_of, rules_of, value_problems
from ttrain.device.info import info_of
from ttrain.train.settings import DURATIONS

KINDS = {
    NoneType: "null", int: "an integer", float: "a number", bool: "true or false", str: "text", list: "a list",
    dict: "a mapping",
}  # fmt: skip
MANY = {int: "integers", float: "numbers", bool: "true or false", str: "texts", list[str]: "lists of texts"}
NO_VALUE = "None"  # Python's word for null, in which W&B's agents pass it
_REFUSED = object()


@dataclass
class Findings:
    """Problems so far, and the sections that can't be trusted for cross-field checks."""

    problems: list[str] = field(default_factory=list)
    bad_sections: set[str] = field(default_factory=set)
    origins: Callable[[], Mapping[str, str]] = dict  # key -> the file that set it; looked up for a problem only

    def add(self, problem: str, *sections_: str) -> None:
        self.problems.append(problem)
        self.bad_sections.update(sections_)

    def with_recipe(self, problem: str) -> str:
        """Return the problem with the recipe or preset that set its key, which the user did not give himself."""
        key, _, rest = problem.partition("=")
        value, told, advice = rest.partition(": ")
        named = told and "(set in" not in rest and self.origins().get(key, "").startswith(("recipe/", "debug/"))
        return f"{key}={value}{self.origin(key)}: {advice}" if named else problem

    def origin(self, key: str) -> str:
        file = self.origins().get(key)
        return "" if file is None else f" (set in {file})"


def typed_config(values: Mapping[str, Any], source: Given | None = None, findings: Findings | None = None) -> Config:
    """Return the typed config of plain nested values, such as a composed tree or the config saved in a checkpoint.

    Keys that are left out take their defaults. Raises ConfigError with all problems, those already in `findings` first.
    """
    found = findings or Findings()
    config = Config(source=source or Given())
    for key in values:
        if key not in sections():
            hint = instead(str(key)) or _suggest_root(str(key))
            found.add(f"{key}: unknown key{found.origin(str(key))}. {hint}")
    for name in sections():
        if name in values and name not in found.bad_sections:
            section = _section(name, values[name], found)
            if section is not _REFUSED:
                setattr(config, name, section)
    found.problems += _settle(config, found.bad_sections)
    found.problems += rule_problems(config, found.bad_sections)
    if found.problems:
        raise ConfigError(list(dict.fromkeys(map(found.with_recipe, found.problems))))
    return config


def _settle(config: Config, bad_sections: Set[str]) -> Iterator[str]:
    """Replace what is auto, or null, and train.tokens by what they stand for; records have what was taken.

    Yield the problem of a run whose length is not said in one way. A run that is continued has steps that were fixed.
    """
    info, train = info_of(config.device), config.train
    if config.engine.name == "auto":
        config.engine = replace(config.engine, name=info.best_engine(config.device)[0])
    if config.precision.name == "auto":
        config.precision = replace(config.precision, name=info.best_precision(config.device)[0])
    if (device := config.device).batch_invariant is None and config.objective.name == "grpo":
        config.device = replace(device, batch_invariant=config.engine.lacks_invariance(device) is None)
    durations = {f"train.{name}": getattr(train, name) for name in sorted(DURATIONS)}
    if train.tokens is not None and "train" not in bad_sections:
        from ttrain.train.steps.phases import PhaseSchedule

        steps = PhaseSchedule.of(train, getattr(config.model, "context", None)).steps_for(train.tokens)
        config.train = replace(train, steps=train.steps or steps)
        durations |= {"train.steps": None} if train.steps == steps else {}  # of a config that was settled before
    given = " ".join(f"{key}={value}" for key, value in durations.items() if value is not None)
    if "train" not in bad_sections and (not given or (" " in given and not config.source.merged)):
        yield f"{given or 'train.steps=null'}: give one of train.steps, minutes and tokens; in files null for others."


class _Untrusted(Exception):
    """A rule asks for a section whose own values are wrong."""


class _Others:
    """The sections of a config, as a rule sees them."""

    def __init__(self, config: Config, bad: Set[str]) -> None:
        self._config, self._bad = config, bad

    def __getattr__(self, name: str) -> Any:
        if name in self._bad:
            raise _Untrusted
        return getattr(self._config, name)


def rule_problems(config: Config, bad_sections: Set[str] = frozenset()) -> list[str]:
    """Return what the rules of all sections find, but for those that `bad_sections` take part in."""
    others, found = _Others(config, bad_sections), []
    for name in sections():
        for check in rules_of(getattr(config, name)) if name not in bad_sections else ():
            with suppress(_Untrusted):
                found += list(check(getattr(config, name), others))
    return found


def section_type(section: str, name: Any) -> type[Any] | None:
    """Return the dataclass that a section's keys are checked against, None for a single option.

    For a component group it depends on the `name`; an unregistered name gives None too.
    """
    if section in registry.groups():
        row = registry.find(section, name) if isinstance(name, str) else None
        return row.config if row else None
    default = default_of(Config.__dataclass_fields__[section])
    return type(default) if is_dataclass(default) else None


def _section(section: str, value: Any, found: Findings) -> Any:
    """Return the typed section, or the value of a single option; _REFUSED where it is reported."""
    if section not in registry.groups() and section_type(section, None) is None:
        return _convert(Config, Config.__dataclass_fields__[section], section, value, found)
    if value is None and section in registry.groups():
        found.add(f"{section}: nothing is chosen. Give {section}=<option>; --help lists the options.", section)
    elif not isinstance(value, Mapping):
        found.add(f"{section}={value}: must be a group of keys such as {section}.<key>=<value>.", section)
    elif (schema := section_type(section, value.get("name"))) is None:
        found.add(_name_problem(section, value.get("name")), section)
    else:
        return _fill(schema, section, value, found)
    return _REFUSED


def _fill(schema: type[Any], section: str, values: Mapping[str, Any], found: Findings) -> Any:
    """Return an instance with every acceptable value; the others are reported and keep their default."""
    known = {key_of(declared): declared for declared in fields(schema)}
    accepted = {}
    for key, value in values.items():
        path = f"{section}.{key}"
        if key not in known:
            hint = instead(path) or _suggest(section, str(key), schema)
            found.add(f"{path}: unknown key{found.origin(path)}. {hint}")
        elif hint := instead(f"{path}={value}"):
            found.add(f"{path}={value}: no such choice{found.origin(path)}. {hint}", section)
        elif (converted := _convert(schema, known[key], path, value, found)) is not _REFUSED:
            accepted[known[key].name] = converted
            for problem in value_problems(path, converted, known[key].metadata):
                found.add(problem, section.partition(".")[0])
    return schema(**accepted)


def _convert(schema: type[Any], declared: Field[Any], path: str, value: Any, found: Findings) -> Any:
    """Return the value as its declared type, by OmegaConf's rules; whole floats such as 1e3 are integers too."""
    hint, rules = hints_of(schema)[declared.name], declared.metadata
    section, bare = path.partition(".")[0], without_none(hint)
    if value == "???":
        wanted = "[<value>]" if get_origin(bare) is list else "<value>"
        found.add(f"{path}: has no value{found.origin(path)}; give one with {path}={wanted}.", section)
        return _REFUSED
    if value is None or (isinstance(value, str) and not rules.get("verbatim")):
        value = _meant(value, hint, declared)
    if rules.get("one") and isinstance(value, str | int | float):
        value = [value]
    entry, kinds = entry_type(hint), (Mapping, str, int, float) if takes_texts(hint) else Mapping
    if entry and isinstance(value, list) and all(isinstance(each, kinds) for each in value):
        return [
            _fill(entry, f"{path}[{n}]", each, found) if isinstance(each, Mapping) else _path(str(each))
            for n, each in enumerate(value)
        ]
    if bare is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    try:
        converted = value if _has_type(value, hint) else _converted(value, hint)
    except (OmegaConfBaseException, ValueError):
        shown = "null" if value is None else repr(value) if isinstance(value, str) else str(value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        problem = f"{path}={shown}: must be {expected(hint)}, got {_given(value, hint)}{found.origin(path)}."
        if isinstance(value, str) and takes_texts(hint):
            problem += f" Write {path}=[{'' if value == NO_VALUE else value}]."
        found.add(problem, section)
        return _REFUSED
    if rules.get("path"):  # no shell replaces a `~` behind `key=`
        return [_path(each) for each in converted] if isinstance(converted, list) else _path(converted)
    return converted


def _path(given: Any) -> Any:
    return str(at_home(given)) if isinstance(given, str) and given.startswith("~") else given


def _has_type(value: Any, hint: Any) -> bool:
    """Return whether OmegaConf would leave a value as it is; asking OmegaConf takes a hundred times as long."""
    bare = without_none(hint)
    if value is None:
        return bare is not hint
    if get_origin(bare) is list and not entry_type(hint):
        return type(value) is list and all(type(each) is get_args(bare)[0] for each in value)
    return bare in MANY and type(value) is bare


def entry_type(hint: Any) -> type[Any] | None:
    """Return the dataclass of the mappings that a list of this type holds; None for any other type."""
    return next((kind for kind in _items(hint) if is_dataclass(kind) and isinstance(kind, type)), None)


def takes_texts(hint: Any) -> bool:
    """Return whether a list of this type holds texts."""
    return str in _items(hint) and get_origin(without_none(hint)) is list


def _items(hint: Any) -> tuple[Any, ...]:
    """Return the types of what a list of this type holds."""
    inside = get_args(without_none(hint))[:1]
    return get_args(inside[0]) or inside if inside else ()


def _converted(value: Any, hint: Any) -> Any:
    if entry_type(hint):
        raise ValueError
    if without_none(hint) is bool and isinstance(value, int) and value not in (0, 1):
        raise ValueError
    node = OmegaConf.structured(_slot(hint))
    node.value = value
    return OmegaConf.to_container(node)["value"]  # type: ignore[call-overload, index]


def _meant(text: str | None, hint: Any, declared: Field[Any]) -> Any:
    """Return the value of a text by the type that is wanted: null, or a list or mapping that was quoted as a whole."""
    bare = without_none(hint)
    if text in (None, NO_VALUE) or (text == "null" and bare is not str):
        if bare is not hint:
            return None
        return declared.default if declared.default == "none" else text
    if get_origin(bare) in (list, dict) and str(text).strip()[:1] in ("[", "{", "("):
        given = re.sub(r"^\s*\((.*?),?\s*\)\s*$", r"[\1]", str(text), flags=re.DOTALL)  # a tuple of Python is a list
        if entry_type(bare):  # as Hydra reads them, which can't read every path
            given = re.sub(r"([{,]\s*\w+):(?=\S)", r"\1: ", given)
        with suppress(yaml.YAMLError):
            return yaml.load(given, yaml.loader.SafeLoader)  # libyaml's wants a space between `:` and `[`
    return text


@cache
def _slot(hint: Any) -> type[Any]:
    """Return a dataclass with one field `value` of the type."""
    return make_dataclass("Slot", [("value", hint)])


def expected(hint: Any) -> str:
    """Return a type hint in words, such as `an integer or null`."""
    bare = without_none(hint)
    kind, parts = get_origin(bare), get_args(bare)
    if entry := entry_type(hint):
        texts = "texts and of " if takes_texts(hint) else ""
        words = f"a list of {texts}mappings with {', '.join(map(key_of, fields(entry)))}"
    elif kind is list:
        words = f"a list of {MANY[parts[0]]}"
    elif kind is dict:
        words = f"a mapping of names to {MANY[parts[1]]}"
    else:
        words = KINDS.get(bare, getattr(bare, "__name__", str(bare)))
    return words if bare is hint else f"{words} or null"


_HINTS: dict[Any, dict[str, Any]] = {}


def hints_of(schema: type[Any]) -> dict[str, Any]:
    """Return the types of a dataclass's fields by name, evaluated once."""
    if schema not in _HINTS:
        _HINTS[schema] = get_type_hints(schema)
    return _HINTS[schema]


def without_none(hint: Any) -> Any:
    """Return `X` for the type hint `X | None`, any other hint as it is."""
    if get_origin(hint) in (UnionType, Union):
        rest = [part for part in get_args(hint) if part is not NoneType]
        return rest[0] if len(rest) == 1 else hint
    return hint


def _given(value: Any, hint: Any) -> str:
    """Return the kind of a value in words; of a list or a mapping, where one is wanted, also of what it holds."""
    inside: Any = ()
    if get_origin(without_none(hint)) is type(value):
        inside = value.values() if isinstance(value, dict) else value
    kinds = sorted({KINDS.get(type(each), type(each).__name__) for each in inside})
    return KINDS.get(type(value), type(value).__name__) + (f" with {' and '.join(kinds)} in it" if kinds else "")


def _name_problem(section: str, name: Any) -> str:
    valid = registry.names(section)
    if name is None:
        return f"{section}: has no name, so nothing is chosen. {did_you_mean('', valid)}"
    hint = "If a plugin adds it, give plugins=[<its module>] again."  # a run remembers names, never modules
    told = instead(f"{section}={name}") or f"{did_you_mean(str(name), valid)} {hint}"
    return f"{section}.name={name}: not registered. {told}"


def _suggest(section: str, key: str, schema: type[Any]) -> str:
    known = {key_of(declared) for declared in fields(schema)}
    rows = registry.rows()
    owners = [row.name for row in rows if row.group == section and key in row.config.__dataclass_fields__]
    if owners:
        return f"It belongs to {section} {', '.join(owners)}; here valid are: {', '.join(sorted(known))}."
    return did_you_mean(key, known)


def _suggest_root(key: str) -> str:
    """Return another section's key of the same name, else the nearest section."""
    owner = owner_of(key)
    return f"Did you mean '{owner}.{key}'?" if owner else did_you_mean(key, sections())


def owner_of(key: str) -> str | None:
    """Return the first section that has a key of that name, None where none has."""
    for section in sections():
        default = default_of(Config.__dataclass_fields__[section])
        if is_dataclass(default) and key in {declared.name for declared in fields(default)} and key != "name":
            return section
    return None
