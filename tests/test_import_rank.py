"""Folder order = data flow = import order: imports go down the rows, and never run in a circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import ttrain

PACKAGE = Path(ttrain.__file__).parent
ROWS = [
    ("core",),
    ("device",),
    ("graph", "ops"),
    ("plan", "autodiff"),
    ("engine", "parallel"),
    ("nn", "optim", "data"),
    ("models", "objectives"),
    ("train",),
    ("bench", "config", "testing"),
    ("api", "cli", "sweep", "tasks", "__main__"),
]
RANK = {folder: rank for rank, row in enumerate(ROWS) for folder in row}
ROOMS = [  # of train
    ("settings", "task_settings", "protocols"),
    ("steps", "logging"),
    ("checkpoint",),
    ("runs", "sampling"),
    ("supervise", "forecast"),
    ("loop",),
]
ROOM_RANK = {room: rank for rank, row in enumerate(ROOMS) for room in row}
parsed = cache(ast.parse)
FREE = {"__init__"}  # holds the version, and loads what it offers when that is first used


def imported_modules(source: str, module: str) -> Iterator[str]:
    """Modules, or names in modules, that a source imports: top level, inside functions, under TYPE_CHECKING."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*parent, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def folders_imported(source: str, module: str) -> set[str]:
    parts = (name.split(".") for name in imported_modules(source, module))
    return {part[1] for part in parts if part[0] == "ttrain" and len(part) > 1 and part[1] in RANK}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return ".".join(["ttrain", *path.relative_to(PACKAGE).with_suffix("").parts])


def imported_from_above(path: Path) -> set[str]:
    """Folders of rows above the file's own that it imports from."""
    own = RANK[name_of(path).split(".")[1]]
    return {folder for folder in folders_imported(path.read_text("utf-8"), name_of(path)) if RANK[folder] > own}


def test_every_file_has_a_row() -> None:
    missing = {name for path in modules() if (name := name_of(path).split(".")[1]) not in RANK.keys() | FREE}
    assert not missing, "add these to the table here and in docs/architecture.md"


def test_a_file_imports_only_from_its_row_and_below() -> None:
    ranked = [path for path in modules() if name_of(path).split(".")[1] in RANK]
    assert len(ranked) > 100
    above = {name_of(path): sorted(found) for path in ranked if (found := imported_from_above(path))}
    assert not above, "these files import from rows above their own"


def test_train_is_built_in_the_order_of_its_rooms() -> None:
    names = [name.split(".") for path in modules() if (name := name_of(path)).startswith("ttrain.train.")]
    assert {name[2] for name in names} - FREE == ROOM_RANK.keys()
    above = [
        (importer, imported)
        for importer, found in import_graph().items()
        for imported in found
        if importer.startswith("ttrain.train.") and imported.startswith("ttrain.train.")
        if ROOM_RANK[imported.split(".")[2]] > ROOM_RANK[importer.split(".")[2]]
    ]
    assert not above, "these files import from rooms above their own"


@cache
def import_graph() -> dict[str, set[str]]:
    """Return the modules of ours that each module imports, in any form. `ttrain` itself loads the others when asked."""
    sources = {name_of(path): path.read_text("utf-8") for path in modules()}
    names = {name.removesuffix(".__init__"): name for name in sources}
    found = {
        name: {names.get(it) or names.get(it.rpartition(".")[0], name) for it in imported_modules(source, name)}
        for name, source in sources.items()
    }
    return {name: imported - {name, "ttrain.__init__"} for name, imported in found.items()}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that reach each other."""
    reached = {name: reach(graph, name) for name in graph}
    within = {name: sorted(other for other in reached[name] if name in reached[other]) for name in graph}
    return sorted({tuple(group): group for group in within.values() if group}.values())


def reach(graph: dict[str, set[str]], start: str) -> set[str]:
    """All that `start` imports, directly or through others; itself only if it is part of a circle."""
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph.get(waiting.pop(), set()) - reached
        reached |= new
        waiting += new
    return reached


def test_no_imports_run_in_a_circle() -> None:
    assert not circles(import_graph()), "modules that import each other, directly or through others"


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}, [["b", "c"]]),
        ({"a": {"b"}, "b": {"a", "c"}, "c": {"d"}, "d": {"e"}, "e": {"d"}}, [["a", "b"], ["d", "e"]]),
        ({"a": {"b"}, "b": {"a"}, "c": {"b", "d"}, "d": {"c"}}, [["a", "b"], ["c", "d"]]),
        ({"a": {"b", "c"}, "b": {"d"}, "c": {"d"}, "d": {"a"}}, [["a", "b", "c", "d"]]),
    ],
)
def test_every_circle_is_found(graph: dict[str, set[str]], expected: list[list[str]]) -> None:
    assert circles(graph) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import ttrain.train.loop.loop", {"train"}),
        ("def f():\n    from ttrain.engine import static", {"engine"}),
        ("if TYPE_CHECKING:\n    from ttrain import models", {"models"}),
        ("from ..plan import arena", {"plan"}),
        ("import numpy, torch", set()),
    ],
)
def test_every_form_of_import_is_seen(source: str, expected: set[str]) -> None:
    assert folders_imported(source, "ttrain.graph.node") == expected
