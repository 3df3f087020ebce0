"""Config files by name: ours, those of --config-dir, and the options that plugins add."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore

import ttrain
from ttrain.config import registry
from ttrain.config.components import BUILT_IN
from ttrain.core.errors import ConfigError
from ttrain.core.folders import at_home
from ttrain.core.names import did_you_mean
from ttrain.core.options import leaves

MAIN_CONFIG = "config"
YAML = ".yaml"


def packaged() -> Path:
    """Return `conf`: inside the installed package, or beside it in a clone."""
    package = Path(ttrain.__file__).resolve().parent
    return next(folder for folder in (package / "conf", package.parent / "conf") if folder.is_dir())


class ConfigFiles:
    """The files that one command line can name. They lie in `folders`, the main config `name` in the first of them."""

    def __init__(self, name: str | None, own: str | Path | None, main: str | Path | None) -> None:
        """The arguments are those of --config-name, --config-dir and --config-path. Raises ConfigError."""
        given = {"--config-dir": own, "--config-name": name, "--config-path": main}
        self.flags = tuple(part for flag, value in given.items() if value is not None for part in (flag, str(value)))
        self.only_theirs = main is not None
        ours = packaged() if main is None else _folder("--config-path", main)
        added = None if own is None else _added_folder(own, ours)
        file = _find_config(MAIN_CONFIG if name is None else name, added, ours)
        self.name, self.folders = file.stem, list(dict.fromkeys(filter(None, (file.parent, added, ours))))

    def groups(self) -> list[str]:
        """Every group of ours and of the user's folders."""
        folders = {path.name for folder in self.folders for path in folder.iterdir() if path.is_dir()}
        return sorted(group for group in folders if self.options(group))

    def is_group(self, name: str) -> bool:
        """True if a folder or plugins hold options of that name."""
        return name in registry.groups() or any((folder / name).is_dir() for folder in self.folders)

    def options(self, group: str) -> list[str]:
        """Options of a group; for the empty one the configs that --config-name may name."""
        found = {path.stem for folder in self.folders for path in (folder / group).glob(f"*{YAML}")}
        return sorted(found | {row.name for row in registry.rows() if row.group == group and _is_added(row)})

    def component(self, group: str, option: str) -> str:
        """Return the name that an option gives its component; a plugin's option is the name."""
        return str(self._read(f"{group}/{option}")[0].get("name", option))

    def sets(self, group: str, option: str) -> Iterator[str]:
        """Dotted keys that an option sets, and groups of which it chooses another option."""
        path = f"{group}/{option}"
        for named, chosen, overrides in self._defaults(path):
            if overrides:
                yield named
            elif not named and chosen != option:
                yield from self.sets(group, str(chosen))
        yield from self.keys(path)

    def keys(self, path: str, package: str | None = None) -> Iterator[str]:
        """Dotted keys that a file sets, and Hydra's groups of which it chooses an option.

        `package` is where Hydra puts them, None for what the file says.
        """
        yield from (group for group, _, _ in self._defaults(path) if group.startswith("hydra/"))
        values, declared = self._read(path)
        package = (declared or path.rpartition("/")[0].replace("/", ".")) if package is None else package
        own = {key: value for key, value in values.items() if key != "defaults"}
        yield from dict(leaves(own, "" if package == "_global_" else package)) if own else ()

    def _defaults(self, path: str) -> Iterator[tuple[str, Any, bool]]:
        """Yield the defaults list of a file: a group with its option, or a config of no group; and if it overrides."""
        entries = self._read(path)[0].get("defaults")
        for entry in entries if isinstance(entries, list) else ():
            for key, option in entry.items() if isinstance(entry, dict) else [("", entry)]:
                group = str(key).rpartition(" ")[2].partition("@")[0].lstrip("/")
                if option != "_self_":
                    yield group, option, str(key).startswith("override ")

    def _read(self, path: str) -> tuple[dict[Any, Any], str | None]:
        """The values of a file and the package that it declares; nothing where there is none."""
        for folder in self.folders:
            if (found := folder / f"{path}{YAML}").is_file():
                text = found.read_text("utf-8")
                values, package = yaml.safe_load(text), re.match(r"#\s*@package\s+(\S+)", text)
                return values if isinstance(values, dict) else {}, package and package[1]
        return {}, None


def _is_added(row: registry.Component) -> bool:
    return (row.group, row.name) not in BUILT_IN


def store_options() -> None:
    """Tell Hydra of plugins' components, which are options and no files."""
    for row in filter(_is_added, registry.rows()):
        ConfigStore.instance().store(group=row.group, name=row.name, node={"name": row.name}, provider="plugin")


def _folder(flag: str, given: str | Path) -> Path:
    """Return the folder that a flag names, absolute. Raises ConfigError where it is none."""
    path = at_home(given)
    if path.is_dir() and str(given):
        return path.resolve()
    hint = f" For this file give --config-name {given}." if path.is_file() else ""
    raise ConfigError(f"{flag} {given}: there is no such folder (looked for {path.absolute()}).{hint}")


def _added_folder(given: str | Path, ours: Path) -> Path:
    """Return the folder of --config-dir. Raises ConfigError where a file in it has the name of one of ours."""
    path = _folder("--config-dir", given)
    files = [] if path == ours else sorted(file.relative_to(ours) for file in ours.rglob(f"*{YAML}"))
    hidden = [str(file) for file in files if (path / file).is_file()]
    if hidden:
        raise ConfigError(
            f"{given}: {', '.join(hidden)} has the name of a config that ttrain ships and would be ignored. Rename it."
        )
    return path


def _find_config(given: str, own: Path | None, ours: Path) -> Path:
    """Return the file that --config-name means.

    The name may end in .yaml and lie in a folder below `own` or `ours`; else it is the path of a file. Raises
    ConfigError with where it was looked for.
    """
    name = given.removesuffix(YAML)
    places = list(dict.fromkeys(place for place in (own, ours, Path.cwd()) if place is not None))
    for place in places if name else ():
        file = (place / at_home(f"{name}{YAML}")).resolve()
        if file.is_file():
            if file.parent not in (own, ours):
                _added_folder(file.parent, ours)
            return file
    known = [path.stem for place in places[:-1] for path in place.glob(f"*{YAML}")]
    hint = did_you_mean(Path(name).name, known)
    if Path(given).suffix in (".yml", ".json"):
        hint = f"The name of a config ends in {YAML}; rename the file."
    raise ConfigError(f"--config-name {given}: there is no {name}{YAML} in {', '.join(map(str, places))}. {hint}")
