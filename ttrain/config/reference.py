"""The reference page of every config key: `python -m ttrain.config.reference > docs/config.md`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from ttrain.config import components, registry
from ttrain.config.help import shown
from ttrain.config.schema import Config, sections
from ttrain.config.validate import expected, hints_of
from ttrain.core.options import default_of, key_of

HEAD = """# Config

A run is described by groups and keys. `group=option` takes a whole file, such as `model=gpt2` for
`conf/model/gpt2.yaml`; `key=value` sets one value, such as `train.steps=500`. `ttrain --help` lists the groups,
`ttrain --cfg job` prints everything that a command would use. A key or value that does not fit is refused before
anything runs.

**Own files.** `--config-dir <folder>` adds a folder of your own: `<folder>/optimizer/mine.yaml` is `optimizer=mine`.
Such a file may start from ours with `defaults: [adamw]`. A whole experiment is `<folder>/mine.yaml` with
`defaults: [config, _self_]`, run with `--config-name mine`, or from anywhere with the path of the file; to choose
options in it, add `override model: gpt2` to its defaults. A file holds names and values only: `_target_` and plugins
are refused there. The `.yaml` of a name may be left out or given.

**Flags.** `--help` (`-h`), `--version` (`-V`), `--multirun` (`-m`), `--cfg job` (`-c`) with `--package <key>` (`-p`),
`--config-name` (`-cn`), `--config-dir` (`-cd`) and `--config-path` (`-cp`), which stands for the folder of ttrain's own
files. Other flags of Hydra are refused: `--hydra-help`, `--info`, `--resolve`, `--run`, `--shell-completion`,
`--experimental-rerun`, and `--cfg hydra` or `all`. `--cfg job` resolves everything. `hydra.searchpath` is refused too;
`--config-dir` adds a folder.

**Text.** A value that only text can be is taken as text, and `sample.prompt` exactly as the shell passes it. Elsewhere
the rules are Hydra's: a list is `[a,b]`, a mapping `{a: 1}`, and text with commas is quoted twice, as in
`'run.dir="a,b"'`. `null` as a value means none; `device=null` is the device of that name.
`None`, `True` and `{'a': 1}`, as agents of W&B write them, are read by the type of their key; where text is wanted they
are text. `hydra.run.dir` and whatever else of Hydra would do nothing here is refused with the key to give instead.

**Sweeps.** `-m engine=dynamic,static run.seed=1,2` runs every combination, each in a process of its own, one after the
other or `sweep.parallel` at once. All of them are checked before the first one starts; one that does not fit, or fails,
does not stop the others, and an interrupt stops them all. The same command again runs what is missing.

**Plugins.** `plugins=[my_module]` imports a module of yours, on the command line only, which may add components to any
group. [Extending](extending.md) shows how. Installed packages can offer such a module under the entry-point group
`ttrain.plugins`.

# Reference

Made from the schema by `python -m ttrain.config.reference`. The defaults are the schema's; a file under `conf/` may
set another one.
"""


def reference() -> str:
    """The page as Markdown."""
    parts = [HEAD]
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
