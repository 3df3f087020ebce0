"""From the command line's words to a typed config. Hydra composes; every problem becomes one sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import hydra.version
import yaml
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import ttrain
from ttrain.config import registry
from ttrain.config.components import BUILT_IN
from ttrain.config.loader import NULL_OPTION, SchemaLoader, shadowed
from ttrain.config.schema import Config
from ttrain.config.words import parse
from ttrain.core.errors import ConfigError
from ttrain.core.names import did_you_mean

MAIN_CONFIG = "config"
RECIPE_GROUP = "recipe"


def packaged(folder: str) -> Path:
    """`conf` or `recipes`: inside the installed package, or beside it in a clone."""
    package = Path(ttrain.__file__).resolve().parent
    inside = package / folder
    return inside if inside.is_dir() else package.parent / folder


class Composer:
    """Composes configs for one command line. Use as a context manager: Hydra keeps global state while it is open."""

    def __init__(
        self, config_name: str = MAIN_CONFIG, config_dir: str | Path | None = None, conf: str | Path | None = None
    ) -> None:
        hydra.version.setbase("1.3")
        self.config_name = config_name
        main = Path(conf).resolve() if conf is not None else packaged("conf")
        _store_recipes(packaged("recipes"))
        path = create_config_search_path(str(main))
        if config_dir is not None:
            path.prepend("command-line", f"file://{_own_folder(Path(config_dir), main)}", SearchPathQuery("schema"))
        self.loader = SchemaLoader(path)
        self.hydra = Hydra(task_name="ttrain", config_loader=self.loader)

    def __enter__(self) -> Composer:
        GlobalHydra.instance().clear()
        GlobalHydra.instance().initialize(self.hydra)
        return self

    def __exit__(self, *exception: object) -> None:
        GlobalHydra.instance().clear()
        HydraConfig.instance().cfg = None

    def compose(self, words: Sequence[str] = (), mode: RunMode = RunMode.RUN) -> DictConfig:
        """The composed and completed tree, Hydra's own node included. Not yet checked against the schema."""
        registry.load_installed_plugins()
        registry.load_plugins(self._plugins(words))
        _store_plugin_options()
        accepted, problems = self._options(words, mode)
        with one_sentence(self.loader):
            composed = self.hydra.compose_config(self.config_name, accepted, run_mode=mode)
        self.loader.problems[:0] = problems
        self.loader.bad_sections |= {problem.partition("=")[0] for problem in problems}
        return composed

    def typed(self, words: Sequence[str] = ()) -> Config:
        """Compose and check; raises ConfigError with every problem found."""
        return self.check(self.compose(words))

    def check(self, composed: DictConfig) -> Config:
        """The typed config of the tree composed last; raises ConfigError with every problem found."""
        HydraConfig.instance().set_config(composed)
        with one_sentence(self.loader):
            return self.loader.typed(composed)

    def groups(self) -> dict[str, list[str]]:
        """Every config group of ours with its options."""
        found = [group for group in self.loader.list_groups("") if group != "hydra"]
        return {group: self.loader.get_group_options(group) for group in found}

    def _plugins(self, words: Sequence[str]) -> list[str]:
        modules: list[str] = []
        for word in words:
            if word.lstrip("+").startswith("plugins="):
                value = parse(word).value()
                modules += value if isinstance(value, list) else [str(value)]
        return modules

    def _options(self, words: Sequence[str], mode: RunMode) -> tuple[list[str], list[str]]:
        """The words that Hydra can compose, and one problem for each that it can't."""
        accepted: list[str] = []
        problems: list[str] = []
        for word in words:
            try:
                override = parse(word, sweep=mode == RunMode.MULTIRUN)
                problem = self._option_problem(override, mode)
            except ConfigError as error:
                problem = str(error)
            if problem:
                problems.append(problem)
            else:
                accepted.append(str(override.input_line))
        return accepted, problems

    def _option_problem(self, override: Override, mode: RunMode) -> str | None:
        key, line = override.key_or_group, str(override.input_line)
        if override.is_hydra_override():
            return f"{line}: the key _target_ is refused." if "_target_" in line else None
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
                return f"{key}={name}: no such option. {did_you_mean(name, valid)}"
            if isinstance(option, dict):
                return f"{line}: {key} takes the name of an option. Set single keys as {key}.<key>=<value>."
        return None


def load(words: Sequence[str] = (), config_name: str = MAIN_CONFIG, config_dir: str | Path | None = None) -> Config:
    """Compose and check in one call: `load(["model=gpt2", "train.steps=10"])`."""
    with Composer(config_name, config_dir) as composer:
        return composer.typed(words)


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
    valid = loader.get_group_options(group, ObjectType.CONFIG)
    return f"there is no config {missing}.yaml. {did_you_mean(name, valid)}"


def _flat(error: BaseException) -> str:
    """The error and its causes as one line without Hydra's links."""
    parts: list[str] = []
    current: BaseException | None = error
    while current is not None:
        text = " ".join(re.sub(r"See https?://\S+.*|https?://\S+", "", str(current)).split())
        parts += [text] if text and text not in " ".join(parts) else []
        current = current.__cause__
    return ": ".join(parts) or type(error).__name__


def _own_folder(directory: Path, conf: Path) -> Path:
    if not directory.is_dir():
        raise ConfigError(f"--config-dir {directory}: there is no such folder.")
    hidden = shadowed(directory, conf)
    if hidden:
        raise ConfigError(
            f"--config-dir {directory}: {', '.join(hidden)} has the name of a config that ttrain ships and would be "
            "ignored. Rename it."
        )
    return directory.resolve()


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
