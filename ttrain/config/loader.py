"""Hydra's config loader with our schema behind it.

Hydra composes; this adds what a typed, closed config needs. Every key of the schema is there before the command line is
applied, so `optimizer.eps=1e-9` works although no YAML mentions it and tab completion knows it. A key that no schema
has is not refused by Hydra one at a time, but kept for `validate`, which reports all of them with the nearest name.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository, IConfigRepository
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.default_element import ConfigDefault, GroupDefault, InputDefault, ResultDefault
from hydra.core.override_parser.types import Override, OverrideType, ValueType
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, ListConfig, OmegaConf

from ttrain.config import registry
from ttrain.config.schema import Config, Source, sections
from ttrain.config.validate import section_type
from ttrain.core.errors import ConfigError
from ttrain.core.options import default_of, key_of

NULL_OPTION = "null"
SILENT = {
    "hydra/launcher": "basic",
    "hydra/sweeper": "basic",
    "hydra/job_logging": "none",
    "hydra/hydra_logging": "none",
}
OWN_HYDRA = "hydra/default"  # the file of ours that silences what Hydra would do itself
# Keys of Hydra that do anything with ttrain, and what to give instead of the others, so that none is ignored.
_HEEDED = re.compile(
    r"hydra\.(mode|searchpath(\[\d+\])?|sweep\.dir|sweeper\.params(\..+)?|job\.(num|id)"
    r"|job\.config\.override_dirname(\..+)?)"  # what ${hydra:job.override_dirname} is made of
)
_INSTEAD = {
    "hydra.run.dir": "Give run.dir=<folder>.",
    "hydra.output_subdir": "Give run.dir=<folder>; the config lies in it.",
    "hydra.sweep": "Give sweep.dir=<folder>.",
    "hydra.sweeper": "ttrain runs sweeps itself: see sweep.search=tpe, sweep.trials, sweep.parallel.",
    "hydra.launcher": "ttrain starts jobs itself; give sweep.parallel=<jobs>, under SLURM sweep.srun.",
    "hydra.job.name": "Give logger.run_name=<name>, or run.dir=<folder>.",
    "hydra.job.chdir": "ttrain never changes the folder; paths are those of the folder it is started in.",
    "hydra.job.env_set": "Set the variable in the shell, before the command.",
    "hydra.job_logging": "What a run tells is in its folder: log.txt, metrics.jsonl and events.jsonl.",
    "hydra.verbose": "HYDRA_FULL_ERROR=1 shows tracebacks.",
}


class NullAwareRepository(ConfigRepository):
    """A repository in which an option named `null` can be chosen: YAML reads the bare word as no value."""

    def __deepcopy__(self, memo: dict[int, Any]) -> NullAwareRepository:
        """Shallow: Hydra copies it for every question, and only ever gives the copy another list of sources."""
        return copy.copy(self)

    def _create_defaults_list(self, config_path: str, defaults: ListConfig) -> list[InputDefault]:
        listed: list[InputDefault] = super()._create_defaults_list(config_path, defaults)
        for item in listed:
            if isinstance(item, GroupDefault) and item.value is None and self._has_null(str(item.group)):
                item.value = NULL_OPTION
        return listed

    def _has_null(self, group: str) -> bool:
        return self.config_exists(f"{group.lstrip('/')}/{NULL_OPTION}")


class SchemaLoader(ConfigLoaderImpl):
    """Composes, completes from the schema, and remembers where each value came from."""

    def __init__(self, search_path: ConfigSearchPath) -> None:
        self.config_search_path = search_path
        self.repository = NullAwareRepository(search_path)
        self.only_theirs = False  # whether `--config-path` stands for the files of ours
        self.flags: tuple[str, ...] = ()  # of the command line, which name files
        self._forget()

    def _forget(self) -> None:
        self.problems: list[str] = []
        self.bad_sections: set[str] = set()  # groups whose option could not be composed
        self.origins: dict[str, str] = {}  # dotted key or section -> file that set it last
        self.files: dict[str, list[str]] = {}  # file -> dotted keys it sets
        self.names: dict[str, Any] = {}  # group -> name before the command line was applied
        self.reading = ""  # the file being read, for errors that don't name it
        self.parsed: list[Override] = []
        self.choices: dict[str, str] = {}
        self.config_name: str | None = None

    def load_configuration(self, *args: Any, **kwargs: Any) -> DictConfig:
        self._forget()
        composed = super().load_configuration(*args, **kwargs)
        chosen = composed.hydra.runtime.choices.items()
        self.problems += ignored(group for group, option in chosen if SILENT.get(group, option) != option)
        self.choices = {
            group: option for group, option in chosen if option is not None and not group.startswith("hydra")
        }
        self.config_name = composed.hydra.job.config_name
        for key in {override.key_or_group for override in self.parsed} - self.choices.keys():
            self.origins = {k: file for k, file in self.origins.items() if k != key and not k.startswith(f"{key}.")}
        return composed

    def source(self) -> Source:
        """Where the tree composed last came from."""
        choices = self.choices
        explicit: set[str] = set()
        for override in self.parsed:
            if override.is_hydra_override():
                continue
            group = override.key_or_group
            if group not in choices:
                explicit.add(group)
                continue
            explicit |= {group} if group in sections() else set()
            for file, keys in self.files.items():
                explicit |= set(keys) if file.startswith(f"{group}/") else set()
        default = self._default_choices(self.config_name)
        explicit |= {group for group in sections() if group in default and choices.get(group) != default[group]}
        overrides = tuple(str(o.input_line) for o in self.parsed if not o.is_hydra_override())
        return Source(choices, overrides, self.job_flags, frozenset(explicit))

    @property
    def job_flags(self) -> tuple[str, ...]:
        """The flags with which one job is started; where a file asks for a sweep they say that this is none."""
        asks = any("hydra.mode" in keys for keys in self.files.values())
        return (*self.flags, *(["hydra.mode=RUN"] if asks else []))

    def _default_choices(self, config_name: str | None, seen: frozenset[str] = frozenset()) -> dict[str, Any]:
        """Group -> option of the primary config's defaults list and of the configs that it includes."""
        loaded = self.repository.load_config(config_name) if config_name and config_name not in seen else None
        choices: dict[str, Any] = {}
        for item in (loaded.defaults_list if loaded else None) or []:
            if isinstance(item, GroupDefault):
                choices[str(item.group).lstrip("/")] = item.value
            elif isinstance(item, ConfigDefault):
                choices.update(self._default_choices(str(item.path).lstrip("/"), seen | {str(config_name)}))
        return choices

    def _parse_overrides_and_create_caching_repo(
        self, config_name: str | None, overrides: list[str]
    ) -> tuple[list[Override], CachingConfigRepository]:
        parsed, repository = super()._parse_overrides_and_create_caching_repo(config_name, overrides)
        listed = self._default_choices(config_name)
        for override in parsed:
            if not override.is_hydra_override() and override.package is None and not override.is_delete():
                _adapt(override, repository, listed)
        self.parsed = parsed
        return parsed, repository

    def _load_single_config(self, default: ResultDefault, repo: IConfigRepository) -> ConfigResult:
        self.reading = default.config_path or ""
        loaded = super()._load_single_config(default, repo)
        if loaded.provider in ("hydra", "schema"):
            return loaded
        values = OmegaConf.to_container(loaded.config, resolve=False)
        if not isinstance(values, dict):
            raise ConfigError(f"{self.reading}.yaml: must hold keys and values, got {type(values).__name__}.")
        keys = list(_flat_keys(values, ""))
        self.files[self.reading] = keys
        for key in keys:
            parts = key.split(".")
            parents = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
            self.origins.update(dict.fromkeys(parents, f"{self.reading}.yaml"))
        self._refuse_code(values, keys)
        return loaded

    def _refuse_code(self, values: dict[Any, Any], keys: list[str]) -> None:
        """Nothing in a file may name code: our own part is checked by `validate`, Hydra's part here."""
        for key in keys:
            if not key.startswith("hydra."):
                continue
            if key.rpartition(".")[2] in ("_target_", "()", "class"):
                self.problems.append(f"{key}: refused (set in {self.reading}.yaml); a config file can't name code.")
            elif self.reading != OWN_HYDRA:
                self.problems += ignored([key], f" (set in {self.reading}.yaml)")
        supervise = values.get("supervise")
        if isinstance(supervise, dict) and supervise.get("on_restart"):
            self.problems.append(
                f"supervise.on_restart={supervise['on_restart']!r}: a config file can't name a command to run (set in "
                f"{self.reading}.yaml). Give it on the command line."
            )
        if values.get("plugins"):
            self.problems.append(
                f"plugins={values['plugins']}: a config file can't name a plugin (set in {self.reading}.yaml). "
                f"Give it on the command line: plugins=[...]."
            )

    def _compose_config_from_defaults_list(self, defaults: list[ResultDefault], repo: IConfigRepository) -> DictConfig:
        composed = super()._compose_config_from_defaults_list(defaults, repo)
        self.reading = ""
        if "hydra" in composed:  # the whole: every key of the schema that files left out, in the schema's order
            given = {key: composed._get_node(key) for key in list(composed)}
            for key in given:
                del composed[key]
            for section in sections():
                composed[section] = self._with_defaults(section, given.pop(section, None))
            for key, node in given.items():  # keys that no schema has, and Hydra's own
                composed[key] = node
        return composed

    def _with_defaults(self, section: str, node: Any) -> Any:
        default = default_of(Config.__dataclass_fields__[section])
        name = None
        if section in registry.groups():
            if not isinstance(node, DictConfig) or node._is_none() or node._is_interpolation():
                return node
            name = self.names[section] = node.get("name")
        schema = section_type(section, name)
        if schema is None:
            return node if section in registry.groups() or node is not None else default
        if node is not None and (not isinstance(node, DictConfig) or node._is_interpolation()):
            return node
        completed = OmegaConf.create({key_of(declared): default_of(declared) for declared in fields(schema)})
        assert isinstance(completed, DictConfig)
        if node is not None:
            completed.merge_with(node)
            for key in node:
                if OmegaConf.is_missing(node, key):  # a merge would let the default win over `???`
                    completed[key] = "???"
        return completed


def _adapt(override: Override, repository: IConfigRepository, listed: dict[str, Any]) -> None:
    """Let `+debug=x` and `debug=x` mean the same, let `null` choose an option of that name, accept any new key."""
    group = override.key_or_group
    if not repository.group_exists(group):
        override.type = OverrideType.FORCE_ADD
        return
    override.type = OverrideType.CHANGE if group in listed else OverrideType.ADD
    nothing = override.value_type == ValueType.ELEMENT and override.value() is None
    if nothing and repository.config_exists(f"{group}/{NULL_OPTION}"):
        override._value = NULL_OPTION


def _flat_keys(values: Any, prefix: str) -> Iterator[str]:
    for key, value in values.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, dict) and value:
            yield from _flat_keys(value, path)
        else:
            yield path


def ignored(keys: Iterable[str], origin: str = "") -> list[str]:
    """One problem for each of Hydra's keys, such as `hydra.run.dir` or `hydra/launcher`, that would do nothing.

    `origin` says which file set them.
    """
    problems = []
    for key in keys:
        name = key.lstrip("+~").replace("/", ".")
        if name != "hydra" and not _HEEDED.fullmatch(name):
            problems.append(f"{key.lstrip('+~')}: has no effect with ttrain{origin}. {_instead(name)}")
    return problems


def _instead(name: str) -> str:
    while name and name not in _INSTEAD:
        name = name.rpartition(".")[0]
    return _INSTEAD.get(name, "Leave it out.")
