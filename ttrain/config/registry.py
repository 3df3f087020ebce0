"""Closed table of names: the only place where a name in the config becomes a class.

A row holds the group, the name, the small config dataclass that the name's keys are checked against, and the target.
Targets of ours are constant `module:attribute` strings, imported when first used, so that composing a config imports
nothing heavy. Third parties add rows with `register` from a module named by `plugins=[module]` on the command line or
by an entry point of the group `ttrain.plugins`. Nothing in a config file can name a module.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass
from importlib.metadata import entry_points
from pkgutil import resolve_name
from typing import Any

from ttrain.core.errors import ConfigError
from ttrain.core.names import did_you_mean
from ttrain.core.waiting import Waiting
from ttrain.device.info import DeviceInfo, info_of

ENTRY_POINT_GROUP = "ttrain.plugins"


@dataclass(frozen=True)
class Component:
    """One registered name of one config group."""

    group: str
    name: str
    config: type[Any]
    target: str | Callable[..., Any]

    def load(self) -> Callable[..., Any]:
        """The class or function behind the name; imports its module on first use."""
        with Waiting(f"Importing what {self.group}={self.name} needs"):
            return resolve_name(self.target) if isinstance(self.target, str) else self.target


_ROWS: dict[tuple[str, str], Component] = {}
_LOADED_PLUGINS: set[str] = set()


def register(group: str, name: str, *, config: type[Any], target: str | Callable[..., Any]) -> None:
    """Add a name to a group. `config` is a dataclass with a `name` field; `target` builds the component from it.

    A plugin needs no YAML file: the name becomes an option of the group (`<group>=<name>`) with the dataclass's
    defaults. Registering a taken name raises ConfigError, unless the row is the same.
    """
    if not is_dataclass(config) or "name" not in config.__dataclass_fields__:
        raise ConfigError(f"{group}={name}: its config must be a dataclass with a field `name`, got {config!r}.")
    row = Component(group, name, config, target)
    if _ROWS.setdefault((group, name), row) != row:
        raise ConfigError(f"{group}={name} is registered twice: {_ROWS[group, name].target} and {target}.")


def find(group: str, name: str) -> Component | None:
    """The row of a name, or None."""
    return _ROWS.get((group, name))


def component(group: str, name: str) -> Component:
    """The row of a name; raises ConfigError with the nearest valid name."""
    row = find(group, name)
    if row is None:
        raise ConfigError(f"{group}.name={name}: not registered. {did_you_mean(name, names(group))}")
    return row


def names(group: str) -> list[str]:
    """All registered names of a group, in the order of registration."""
    return [name for row_group, name in _ROWS if row_group == group]


def groups() -> list[str]:
    """All groups that have at least one row."""
    return list(dict.fromkeys(group for group, _ in _ROWS))


def rows() -> list[Component]:
    """Every row."""
    return list(_ROWS.values())


def infos() -> list[DeviceInfo]:
    """List the families of the registered devices, each once."""
    return list(dict.fromkeys(info_of(row.config) for row in rows() if row.group == "device"))


def info_that(answers: Callable[[DeviceInfo], object]) -> DeviceInfo:
    """The first family of devices that has something, for messages that tell where it is to be had."""
    return next((info for info in infos() if answers(info)), DeviceInfo())


def load_plugins(modules: Sequence[str]) -> None:
    """Import the modules that the command line named, and those that installed packages offer.

    Importing one registers its rows. Packages offer modules under the entry-point group `ttrain.plugins`.
    """
    named = [*(entry.module for entry in entry_points(group=ENTRY_POINT_GROUP)), *modules]
    for module in (name for name in named if name not in _LOADED_PLUGINS):
        if not re.fullmatch(r"[\w-]+(\.[\w-]+)*", module):
            raise ConfigError(f"plugins=[{module}]: is no name of a module, such as package.module.")
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not (module == error.name or module.startswith(error.name + ".")):
                raise
            told = f"plugins=[{module}]: there is no module {error.name!r} on Python's path"
            raise ConfigError(f"{told}. Install it, or put its folder into PYTHONPATH.") from error
        _LOADED_PLUGINS.add(module)
