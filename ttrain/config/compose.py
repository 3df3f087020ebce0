"""Make a typed config from the command line's overrides. Hydra composes; every problem becomes one sentence."""

from __future__ import annotations

import re
import sys
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from functools import cache, cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import hydra
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import IntervalSweep, Override, QuotedString, ValueType
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf, read_write
from omegaconf.errors import OmegaConfBaseException

from ttrain.config import registry
from ttrain.config.files import YAML, ConfigFiles, store_options
from ttrain.config.overrides import parse
from ttrain.config.renamed import instead, instead_of_hydras
from ttrain.config.saved import with_model_folder, with_saved_options
from ttrain.config.schema import Config, Given, sections
from ttrain.config.validate import Findings, section_type, typed_config
from ttrain.core.errors import ConfigError
from ttrain.core.folders import at_home
from ttrain.core.names import did_you_mean
from ttrain.core.options import default_of, key_of
from ttrain.train.runs.record import as_text
from ttrain.train.settings import superseded

_HEEDED = re.compile(  # of Hydra's keys
    r"hydra(\.(mode|sweeper\.params(\..+)?|job\.(num|id|override_dirname)"
    r"|job\.config\.override_dirname(\..+)?))?"  # what ${hydra:job.override_dirname} is made of
)
NULL_OPTION = "null"  # the name of a device, which YAML reads as no value
ON_COMMAND_LINE = {  # keys that run code of the user's choice, so that no file may give them
    "plugins": ("a config file can't name a plugin", "plugins=[...]"),
    "supervise.on_restart": ("a config file can't name a command to run", "it"),
}


@dataclass
class Composed:
    """A tree that is not yet checked against the schema, and where it came from."""

    job: DictConfig  # ttrain's part, with every key of the schema
    root: DictConfig  # as Hydra composed it, with its own part under `hydra`
    overrides: list[Override]
    problems: list[str]  # of the overrides that were left out

    @property
    def choices(self) -> dict[str, str]:
        """Group -> option."""
        chosen = self.root.hydra.runtime.choices.items()
        return {group: option for group, option in chosen if option is not None and not group.startswith("hydra")}


class Composer:
    """Composes configs for one command line. Use as a context manager: Hydra keeps global state while it is open."""

    def __init__(
        self, config_name: str | None = None, config_dir: str | Path | None = None, conf: str | Path | None = None
    ) -> None:
        self.files = ConfigFiles(config_name, config_dir, conf)

    def __enter__(self) -> Composer:
        GlobalHydra.instance().clear()
        self._hydra = hydra.initialize_config_dir(str(self.files.folders[0]), job_name="ttrain", version_base="1.3")
        return self

    def __exit__(self, *exception: object) -> None:
        self._hydra.__exit__(*exception)
        GlobalHydra.instance().clear()
        HydraConfig.instance().cfg = None

    def compose(self, overrides: Sequence[str] = (), sweep: bool = False) -> Composed:
        """Compose the tree of these overrides; in a `sweep` those with several values are parsed and left out."""
        registry.load_plugins(_plugins(overrides))
        parsed, problems = self.parsed(overrides, sweep)
        store_options()
        with self.one_sentence(problems):
            single = [override for override in parsed if not override.is_sweep_override()]
            root = self._compose(self._lines(single))
            job = _completed(root)
            job.train.update(dict.fromkeys(superseded([override.key_or_group for override in single])))
            for override in single:
                if not self._is_hydras(override):
                    _apply(job, override)
        composed = Composed(job, root, parsed, problems)
        _name_overrides(composed)
        problems += self._problems_of_files(composed)
        return composed

    def typed(self, overrides: Sequence[str] = ()) -> Config:
        """Compose and check; raises ConfigError with every problem found."""
        return self.check(self.compose(overrides))

    def check(self, composed: Composed) -> Config:
        """Return the typed config of a tree; raises ConfigError with every problem found."""
        HydraConfig.instance().cfg = cast(Any, composed.root)  # which set_config would copy
        bad = {problem.partition("=")[0] for problem in composed.problems}
        findings = Findings(list(composed.problems), bad, cache(lambda: self._origins(composed)))
        with self.one_sentence(composed.problems):
            values, source = _resolved(composed.job, findings), self._source(composed)
            values, source = with_saved_options(values, source)
            model = values.get("model")
            if isinstance(model, dict) and model.get("from") not in (None, "???"):
                values, source = with_model_folder(values, source, findings)
            return typed_config(values, source, findings)

    def job_flags(self, composed: Composed) -> tuple[str, ...]:
        """The flags with which one job is started; where a file may ask for a sweep they say that this is none."""
        asks = self.files.flags and composed.root.hydra.mode is not None
        return (*self.files.flags, *(["hydra.mode=RUN"] if asks else []))

    def _compose(self, lines: list[str]) -> DictConfig:
        root = hydra.compose(self.files.name, lines, return_hydra_config=True)
        unchosen = [group for group, option in root.hydra.runtime.choices.items() if option is None]
        named = [group for group in unchosen if NULL_OPTION in self.files.options(group)]
        if named:
            lines = [*lines, *(f"{group}={as_text(NULL_OPTION)}" for group in named)]
            root = hydra.compose(self.files.name, lines, return_hydra_config=True)
        self._join(root, lines)
        return root

    def _join(self, root: DictConfig, lines: list[str]) -> None:
        """Let logger=[a,b] choose both: the one with the most keys, which has those of the other, and that beside it.

        Raises ConfigError for several options of another group.
        """
        for group in {*registry.groups()} - {*root.hydra.runtime.choices}:  # a list is not among the choices
            listed = _defaults_list(self.files.name, lines).defaults
            options = [path.rpartition("/") for each in listed if (path := str(each.config_path))]
            names = list(dict.fromkeys(self.files.component(*each[::2]) for each in options if each[0] == group))
            if len(names) > 1 and group != "logger":
                raise ConfigError(f"{group}=[{','.join(names)}]: takes one option. Give one of them.")
            if len(names) > 1:
                name = max(names, key=lambda each: len(fields(registry.component(group, each).config)))
                several = {"name": name, "beside": [each for each in names if each != name]}
                OmegaConf.update(root, group, several, force_add=True)

    def parsed(self, overrides: Sequence[str], sweep: bool) -> tuple[list[Override], list[str]]:
        """The overrides that can be composed, and one problem for each that can't."""
        accepted: list[Override] = []
        problems: list[str] = []
        for override in overrides:
            try:
                parsed = parse(override, sweep)
                if self.files.is_group(parsed.key_or_group):  # `recipe=x.yaml` is recipe=x
                    parsed = parse(re.sub(r"\.yaml(?=,|$)", "", str(parsed.input_line)), sweep)
                problem = self._problem(parsed, sweep)
            except ConfigError as error:
                problem = str(error)
            if problem:
                problems.append(problem)
            else:
                accepted.append(parsed)
        return accepted, problems

    def _problem(self, override: Override, sweep: bool) -> str | None:
        key, line = override.key_or_group, str(override.input_line)
        if override.is_hydra_override():
            return _ignored(key)
        if override.is_sweep_override() and not sweep:
            how = "a comma means a sweep, which" if override.value_type == ValueType.SIMPLE_CHOICE_SWEEP else "a sweep"
            return f"{line}: {how} needs -m. For a list write {key}=[...]; quote text twice."
        loader = SimpleNamespace(get_group_options=lambda group, results_filter=None: self.files.options(group))
        override.config_loader = cast(Any, loader)
        if override.is_sweep_override() and not _has_values(override):
            how = "Give an interval from low to high (above 0 with the tag log), a range with a step from its start"
            return f"{line}: has no values. {how} towards its end, a glob that matches options of the group."
        group, _, name = key.rpartition(".")
        if name == "name" and group in registry.groups() and not override.is_sweep_override():
            return f"{line}: a component is chosen by its group; give {group}={override.value()}."
        if override.is_delete() or not self.files.is_group(key):
            return None
        valid = self.files.options(key)
        chosen = list(override.sweep_iterator()) if override.is_choice_sweep() else [override.value()]
        for option in chosen:
            name = NULL_OPTION if option is None else str(option)
            if name not in valid and not isinstance(option, list | dict):
                hint = instead(f"{key}={name}") or self._option_hint(key, name, valid)
                return f"{key}={name}: no such option. {hint}"
            if isinstance(option, dict) or (isinstance(option, list) and {*map(type, option)} - {str}):
                return f"{line}: {key} takes the name of an option. Set single keys as {key}.<key>=<value>."
        return None

    def _option_hint(self, group: str, name: str, valid: list[str]) -> str:
        """Name the nearest option; for a path, tell how an own file is chosen."""
        path = at_home(name)
        own = next((file for file in (path, Path(f"{path}{YAML}")) if file.is_file()), None)
        if own is not None and own.parent.name == group and own.stem not in valid:
            return f"For a file of yours give --config-dir {own.parent.parent} {group}={own.stem}."
        return did_you_mean(path.name, valid)

    def _is_hydras(self, override: Override) -> bool:
        """True for what Hydra has to know while it composes; other keys are set once the schema is below them."""
        return override.is_hydra_override() or self.files.is_group(override.key_or_group)

    def _lines(self, overrides: Sequence[Override]) -> list[str]:
        """The arguments that Hydra is given."""
        search = ", ".join(as_text(f"file://{folder}") for folder in self.files.folders[1:])
        return [f"hydra.searchpath=[{search}]", *map(self._for_hydra, filter(self._is_hydras, overrides))]

    @cached_property
    def _named(self) -> Container[str]:
        """Groups that the defaults list of the main config names, directly or not."""
        named: Container[str] = _defaults_list(self.files.name, self._lines(())).overrides.known_choices_per_group
        return named

    def _for_hydra(self, override: Override) -> str:
        """The override as Hydra's grammar has it: `+` for a group that no defaults list names, `null` as a name."""
        if override.is_hydra_override() or override.is_delete() or override.package is not None:
            return str(override.input_line)
        group, option = override.key_or_group, override.value()
        if option is None and NULL_OPTION in self.files.options(group):
            option = NULL_OPTION
        value = as_text(str(option)) if isinstance(option, str | QuotedString) else override.get_value_element_as_str()
        return f"{'' if group in self._named else '+'}{group}={value}"

    def _problems_of_files(self, composed: Composed) -> list[str]:
        """List what files give that only the command line may give, or that would do nothing."""
        given = {override.key_or_group for override in composed.overrides}
        problems = []
        for key, (why, advice) in ON_COMMAND_LINE.items():
            value = OmegaConf.select(composed.job, key, throw_on_missing=False)
            if value and key not in given:
                where = self._origins(composed).get(key)
                problems.append(f"{key}={value!r}: {why} (set in {where}). Give {advice} on the command line.")
        for key, file in self._set_by_files(composed) if self.files.flags else ():
            if re.match("hydra[./]", key) and (problem := _ignored(key, f" (set in {file})")):
                problems.append(problem)
        return problems

    def _source(self, composed: Composed) -> Given:
        explicit: set[str] = set()
        mine = [override for override in composed.overrides if not override.is_hydra_override()]
        for override in mine:
            group = override.key_or_group
            if not self.files.is_group(group):
                explicit.add(group)
                continue
            explicit |= {group} & {*sections()}
            if isinstance(option := composed.choices.get(group), str):
                explicit |= {*self.files.sets(group, option)}
        explicit -= {f"train.{name}" for name in superseded([override.key_or_group for override in mine])}
        lines = tuple(str(override.input_line) for override in mine)
        return Given(composed.choices, lines, self.job_flags(composed), frozenset(explicit), files=self.files)

    def _origins(self, composed: Composed) -> dict[str, str]:
        """Dotted key or section -> the file that set it last; empty for what the command line gave."""
        origins: dict[str, str] = {}
        for key, file in self._set_by_files(composed):
            parts = key.split(".")
            origins.update(dict.fromkeys((".".join(parts[:length]) for length in range(1, len(parts) + 1)), file))
        given = [override.key_or_group for override in composed.overrides if not self._is_hydras(override)]
        return {key: file for key, file in origins.items() if not any(f"{key}.".startswith(f"{own}.") for own in given)}

    def _set_by_files(self, composed: Composed) -> Iterator[tuple[str, str]]:
        """Yield the keys that files set, and Hydra's own groups of which they choose an option, each with its file."""
        for default in _defaults_list(self.files.name, self._lines(composed.overrides)).defaults:
            for key in self.files.keys(default.config_path, default.package):
                yield key, f"{default.config_path}{YAML}"

    @contextmanager
    def one_sentence(self, problems: Sequence[str] = ()) -> Iterator[None]:
        """Turn what Hydra, OmegaConf or the YAML reader raise about the user's input into a ConfigError."""
        try:
            yield
        except ConfigError:
            raise
        except MissingConfigException as error:
            raise ConfigError(self._missing_problem(error)) from error
        except (HydraException, OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
            raise ConfigError([*problems, _flat(error)]) from error
        except RecursionError as error:
            why = "the defaults list of a config file includes itself, or brackets stand too deep inside each other"
            raise ConfigError(f"{why}. Mend the file.") from error

    def _missing_problem(self, error: MissingConfigException) -> str:
        missing = str(error.missing_cfg_file)
        group, _, name = missing.rpartition("/")
        theirs = " --config-path stands for ttrain's own files; --config-dir adds to them."
        hint = theirs if self.files.only_theirs else ""
        return f"there is no config {missing}{YAML}. {did_you_mean(name, self.files.options(group))}{hint}"


def load(overrides: Sequence[str] = (), config_name: str | None = None, config_dir: str | Path | None = None) -> Config:
    """Compose and check in one call: `load(["model=gpt2", "train.steps=10"])`."""
    with Composer(config_name, config_dir) as composer:
        return composer.typed(overrides)


def _defaults_list(name: str, lines: list[str]) -> Any:
    """Return what a main config chooses with these arguments, as Hydra resolves it."""
    return GlobalHydra.instance().config_loader().compute_defaults_list(name, lines, RunMode.MULTIRUN)


def _has_values(override: Override) -> bool:
    """Return True if a swept override has at least one value to try."""
    sweep = override.value()
    if isinstance(sweep, IntervalSweep):
        start, end = cast("tuple[float, float]", (sweep.start, sweep.end))
        lowest = sys.float_info.min if "log" in sweep.tags else -sys.float_info.max
        return lowest <= start <= end <= sys.float_info.max
    with suppress(HydraException, ValueError):  # such as a step of 0
        return next(override.sweep_string_iterator(), None) is not None
    return False


def _ignored(key: str, origin: str = "") -> str | None:
    """Return the problem of a key of Hydra, such as `hydra.run.dir` or `hydra/launcher`, that would do nothing."""
    key = key.lstrip("+~")
    name = key.replace("/", ".")
    if _HEEDED.fullmatch(name):
        return None
    return f"{key}: has no effect with ttrain{origin}. {instead_of_hydras(name)}"


def _plugins(overrides: Sequence[str]) -> list[str]:
    modules: list[str] = []
    for override in overrides:
        if override.lstrip("+").startswith("plugins="):
            value = parse(override).value()
            modules += map(str, value) if isinstance(value, list) else [str(value)]
    return modules


def _completed(root: DictConfig) -> DictConfig:
    """The tree with every key of the schema that files left out, in the schema's order, and without Hydra's part."""
    given = cast("dict[str, Any]", OmegaConf.to_container(root, resolve=False))
    del given["hydra"]
    whole: dict[str, Any] = {}
    for section in sections():
        node = given.pop(section, None)
        schema = section_type(section, node.get("name") if isinstance(node, dict) else None)
        if schema is None:  # a single option, or a group of which nothing that is registered is chosen
            single = section not in registry.groups() and node is None
            whole[section] = default_of(Config.__dataclass_fields__[section]) if single else node
        elif isinstance(node, dict | None):
            whole[section] = {key_of(declared): default_of(declared) for declared in fields(schema)} | (node or {})
        else:
            whole[section] = node
    return OmegaConf.create({**whole, **given})


def _apply(tree: DictConfig, override: Override) -> None:
    """Set or delete one key of the command line."""
    key = override.key_or_group
    if not override.is_delete():
        value, mappings = override.value(), isinstance(OmegaConf.select(tree, key), DictConfig)
        OmegaConf.update(tree, key, value, merge=mappings and isinstance(value, dict), force_add=True)
        return
    parent, _, name = key.rpartition(".")
    node = OmegaConf.select(tree, parent) if parent else tree
    if not isinstance(node, DictConfig) or name not in node:
        raise ConfigError(f"~{key}: there is no such key.")
    del node[name]


def _name_overrides(composed: Composed) -> None:
    """Fill in what ${hydra:job.override_dirname} stands for."""
    job = composed.root.hydra.job
    how = job.config.override_dirname
    lines = [
        str(override.input_line).lstrip("+")
        for override in composed.overrides
        if not override.is_hydra_override() and override.key_or_group not in how.exclude_keys
    ]
    with read_write(composed.root):
        job.override_dirname = how.item_sep.join(sorted(lines)).replace("=", how.kv_sep)


def _resolved(node: DictConfig, findings: Findings) -> dict[Any, Any]:
    """Plain values with every interpolation resolved; one that can't be is reported and left out."""
    with suppress(OmegaConfBaseException):
        return cast("dict[Any, Any]", OmegaConf.to_container(node, resolve=True))
    plain: dict[Any, Any] = {}
    for key in node:
        try:
            value = "???" if OmegaConf.is_missing(node, key) else node[key]
            value = OmegaConf.to_container(value, resolve=True) if isinstance(value, ListConfig) else value
            plain[key] = _resolved(value, findings) if isinstance(value, DictConfig) else value
        except OmegaConfBaseException as error:
            findings.add(f"{error.full_key}: {str(error).splitlines()[0]}.", str(error.full_key).partition(".")[0])
    return plain


def _flat(error: BaseException) -> str:
    """The error and its causes as one line without Hydra's links."""
    parts: list[str] = []
    current: BaseException | None = error
    while current is not None:
        text = " ".join(re.sub(r"See https?://\S+.*|https?://\S+", "", str(current)).split())
        parts += [text] if text and text not in " ".join(parts) else []
        current = current.__cause__
    return ": ".join(parts) or type(error).__name__
