"""From the command line's overrides to a typed config. Hydra composes; every problem becomes one sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import hydra.version
import yaml
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import ttrain
from ttrain.config import registry
from ttrain.config.components import BUILT_IN
from ttrain.config.loader import NULL_OPTION, SchemaLoader, ignored
from ttrain.config.overrides import parse
from ttrain.config.saved import with_model_folder
from ttrain.config.schema import Config
from ttrain.config.validate import Findings, typed_config
from ttrain.core.errors import ConfigError
from ttrain.core.folders import at_home
from ttrain.core.names import did_you_mean

MAIN_CONFIG = "config"
RECIPE_GROUP = "recipe"
YAML = ".yaml"


def packaged(folder: str) -> Path:
    """`conf` or `recipes`: inside the installed package, or beside it in a clone."""
    package = Path(ttrain.__file__).resolve().parent
    inside = package / folder
    return inside if inside.is_dir() else package.parent / folder


class Composer:
    """Composes configs for one command line. Use as a context manager: Hydra keeps global state while it is open."""

    def __init__(
        self, config_name: str | None = None, config_dir: str | Path | None = None, conf: str | Path | None = None
    ) -> None:
        hydra.version.setbase("1.3")
        given = {"--config-dir": config_dir, "--config-name": config_name, "--config-path": conf}
        flags = tuple(part for flag, value in given.items() if value is not None for part in (flag, str(value)))
        main = packaged("conf") if conf is None else _folder("--config-path", conf)
        own = None if config_dir is None else _added_folder(config_dir, main)
        self.config_name, folders = _config_name(MAIN_CONFIG if config_name is None else config_name, own, main)
        _store_recipes(packaged("recipes"))
        path = create_config_search_path(str(main))
        for folder in reversed(folders):
            path.prepend("command-line", f"file://{folder}")
        self.loader = SchemaLoader(path)
        self.loader.only_theirs, self.loader.flags = conf is not None, flags
        self.hydra = Hydra(task_name="ttrain", config_loader=self.loader)

    def __enter__(self) -> Composer:
        GlobalHydra.instance().clear()
        GlobalHydra.instance().initialize(self.hydra)
        return self

    def __exit__(self, *exception: object) -> None:
        GlobalHydra.instance().clear()
        HydraConfig.instance().cfg = None

    def compose(self, overrides: Sequence[str] = (), mode: RunMode = RunMode.RUN) -> DictConfig:
        """The composed and completed tree, Hydra's own node included. Not yet checked against the schema."""
        registry.load_installed_plugins()
        registry.load_plugins(self._plugins(overrides))
        _store_plugin_options()
        accepted, problems = self._options(overrides, mode)
        with one_sentence(self.loader):
            composed = self.hydra.compose_config(self.config_name, accepted, run_mode=mode)
        self.loader.problems[:0] = problems
        self.loader.bad_sections |= {problem.partition("=")[0] for problem in problems}
        return composed

    def typed(self, overrides: Sequence[str] = ()) -> Config:
        """Compose and check; raises ConfigError with every problem found."""
        return self.check(self.compose(overrides))

    def check(self, composed: DictConfig) -> Config:
        """The typed config of the tree composed last; raises ConfigError with every problem found."""
        HydraConfig.instance().set_config(composed)
        loader = self.loader
        findings = Findings(list(loader.problems), set(loader.bad_sections), loader.origins)
        with one_sentence(loader):
            job = OmegaConf.create({key: composed._get_node(key) for key in composed if key != "hydra"})
            values, source = _resolved(job, findings), loader.source()
            for group, name in loader.names.items():
                given = values.get(group, {})
                if isinstance(given, dict) and given.get("name") != name:
                    findings.add(
                        f"{group}.name={given.get('name')}: a component is chosen by its group; "
                        f"give {group}={given.get('name')}.",
                        group,
                    )
            model = values.get("model")
            if isinstance(model, dict) and model.get("from") not in (None, "???"):
                values, source = with_model_folder(values, source, findings)
            return typed_config(values, source, findings)

    def groups(self) -> dict[str, list[str]]:
        """Every config group of ours with its options."""
        found = [group for group in self.loader.list_groups("") if group != "hydra"]
        return {group: self.loader.get_group_options(group) for group in found}

    def _plugins(self, overrides: Sequence[str]) -> list[str]:
        modules: list[str] = []
        for override in overrides:
            if override.lstrip("+").startswith("plugins="):
                value = parse(override).value()
                modules += value if isinstance(value, list) else [str(value)]
        return modules

    def _options(self, overrides: Sequence[str], mode: RunMode) -> tuple[list[str], list[str]]:
        """The overrides that Hydra can compose, and one problem for each that it can't."""
        accepted: list[str] = []
        problems: list[str] = []
        for override in overrides:
            try:
                parsed = parse(override, sweep=mode == RunMode.MULTIRUN)
                if self.loader.repository.group_exists(parsed.key_or_group):  # `recipe=x.yaml` is recipe=x
                    parsed = parse(re.sub(r"\.yaml(?=,|$)", "", str(parsed.input_line)), mode == RunMode.MULTIRUN)
                problem = self._option_problem(parsed, mode)
            except ConfigError as error:
                problem = str(error)
            if problem:
                problems.append(problem)
            else:
                accepted.append(str(parsed.input_line))
        return accepted, problems

    def _option_problem(self, override: Override, mode: RunMode) -> str | None:
        key, line = override.key_or_group, str(override.input_line)
        if override.is_hydra_override():
            if "_target_" in line:
                return f"{line}: the key _target_ is refused."
            return next(iter(ignored([key])), None)
        if override.value_type == ValueType.SIMPLE_CHOICE_SWEEP and mode != RunMode.MULTIRUN:
            return f"{line}: a comma means a sweep, which needs -m. For a list write {key}=[...]; quote text twice."
        if override.is_delete() or not self.loader.repository.group_exists(key):
            return None
        valid = self.loader.get_group_options(key, ObjectType.CONFIG)
        override.config_loader = self.loader
        chosen = list(override.sweep_iterator()) if override.is_choice_sweep() else [override.value()]
        for option in chosen:
            name = NULL_OPTION if option is None else str(option)
            if name not in valid and not isinstance(option, list | dict):
                return f"{key}={name}: no such option. {self._option_hint(key, name, valid)}"
            if isinstance(option, dict):
                return f"{line}: {key} takes the name of an option. Set single keys as {key}.<key>=<value>."
        return None

    def _option_hint(self, group: str, name: str, valid: list[str]) -> str:
        """The nearest option; for a path, how an own file is chosen."""
        path = at_home(name)
        own = next((file for file in (path, path.with_name(f"{path.name}.yaml")) if file.is_file()), None)
        if own is not None and own.parent.name == group and own.stem not in valid:
            return f"For a file of yours give --config-dir {own.parent.parent} {group}={own.stem}."
        return did_you_mean(path.name, valid)


def load(overrides: Sequence[str] = (), config_name: str | None = None, config_dir: str | Path | None = None) -> Config:
    """Compose and check in one call: `load(["model=gpt2", "train.steps=10"])`."""
    with Composer(config_name, config_dir) as composer:
        return composer.typed(overrides)


def _resolved(node: DictConfig, findings: Findings) -> dict[Any, Any]:
    """Plain values with every interpolation resolved; one that can't be is reported and left out."""
    plain: dict[Any, Any] = {}
    for key in node:
        try:
            value = "???" if OmegaConf.is_missing(node, key) else node[key]
        except OmegaConfBaseException as error:
            findings.add(f"{error.full_key}: {str(error).splitlines()[0]}.", str(error.full_key).partition(".")[0])
            continue
        if isinstance(value, DictConfig):
            plain[key] = _resolved(value, findings)
        else:
            plain[key] = OmegaConf.to_container(value, resolve=True) if isinstance(value, ListConfig) else value
    return plain


@contextmanager
def one_sentence(loader: SchemaLoader) -> Iterator[None]:
    """Turn what Hydra, OmegaConf or the YAML reader raise about the user's input into a ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except MissingConfigException as error:
        raise ConfigError(_missing_problem(loader, error)) from error
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        where = f"{loader.reading}.yaml: " if loader.reading else ""
        raise ConfigError([*loader.problems, where + _flat(error)]) from error
    except RecursionError as error:
        raise ConfigError("the defaults list of a config file includes itself; break the circle.") from error


def _missing_problem(loader: SchemaLoader, error: MissingConfigException) -> str:
    missing = str(error.missing_cfg_file)
    group, _, name = missing.rpartition("/")
    valid = set(loader.get_group_options(group, ObjectType.CONFIG)) - {"_dummy_empty_config_"}
    hint = " --config-path stands for ttrain's own files; --config-dir adds to them." if loader.only_theirs else ""
    return f"there is no config {missing}.yaml. {did_you_mean(name, valid)}{hint}"


def _flat(error: BaseException) -> str:
    """The error and its causes as one line without Hydra's links."""
    parts: list[str] = []
    current: BaseException | None = error
    while current is not None:
        text = " ".join(re.sub(r"See https?://\S+.*|https?://\S+", "", str(current)).split())
        parts += [text] if text and text not in " ".join(parts) else []
        current = current.__cause__
    return ": ".join(parts) or type(error).__name__


def _folder(flag: str, given: str | Path) -> Path:
    """The folder that a flag names, absolute. Raises ConfigError where it is none."""
    path = at_home(given)
    if path.is_dir() and str(given):
        return path.resolve()
    if not path.exists():
        raise ConfigError(f"{flag} {given}: there is no such folder (looked for {path.absolute()}).")
    hint = f" For this file give --config-name {given}." if path.suffix == YAML else ""
    raise ConfigError(f"{flag} {given}: is a file; give the folder of your YAML files.{hint}")


def _added_folder(given: str | Path, ours: Path) -> Path:
    """The folder of `--config-dir`. Raises ConfigError where a file in it would be hidden by one of ours."""
    path = _folder("--config-dir", given)
    hidden = _shadowed(path, ours)
    if hidden:
        raise ConfigError(
            f"{given}: {', '.join(hidden)} has the name of a config that ttrain ships and would be ignored. Rename it."
        )
    return path


def _shadowed(directory: Path, ours: Path) -> list[str]:
    """YAML files of a user's folder that ours would hide, because Hydra takes the first of one name."""
    if directory == ours:
        return []
    files = sorted(path.relative_to(ours) for path in ours.rglob(f"*{YAML}"))
    return [str(path) for path in files if (directory / path).is_file()]


def _config_name(given: str, own: Path | None, ours: Path) -> tuple[str, list[Path]]:
    """Hydra's name of the config that `--config-name` means, and the folders to search before `ours`.

    The name may end in .yaml and lie in a folder below `own` or `ours`; else it is the path of a file. The folder of
    the file comes first, so that what it names beside it is found. Raises ConfigError with where it was looked for.
    """
    name = given.removesuffix(YAML)
    places = list(dict.fromkeys(place for place in (own, ours, Path.cwd()) if place is not None))
    for place in places if name else ():
        file = (place / at_home(f"{name}{YAML}")).resolve()
        if file.is_file():
            searched = [] if own is None else [own]
            if file.parent not in (own, ours):
                searched.insert(0, _added_folder(file.parent, ours))
            return file.stem, searched
    known = [path.stem for place in places[:-1] for path in place.glob(f"*{YAML}")]
    hint = did_you_mean(Path(name).name, known)
    if Path(given).suffix in (".yml", ".json"):
        hint = f"The name of a config ends in {YAML}; rename the file."
    raise ConfigError(f"--config-name {given}: there is no {name}{YAML} in {', '.join(map(str, places))}. {hint}")


@cache  # read once a process
def _store_recipes(folder: Path) -> None:
    for path in sorted(folder.glob("*.yaml")):
        node = OmegaConf.load(path)
        assert isinstance(node, DictConfig)
        ConfigStore.instance().store(
            group=RECIPE_GROUP, name=path.stem, node=node, package="_global_", provider="recipes"
        )


def _store_plugin_options() -> None:
    """A plugin's component needs no YAML: its registered name is an option of its group."""
    for row in registry.rows():
        if (row.group, row.name) not in BUILT_IN:
            ConfigStore.instance().store(group=row.group, name=row.name, node={"name": row.name}, provider="plugin")
