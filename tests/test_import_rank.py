"""Folder order = data flow = import order: a file imports only from rows below its own, or from its own row."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import ttrain

PACKAGE = Path(ttrain.__file__).parent
ROWS = [
    ("core",),
    ("device",),
    ("graph", "ops"),
    ("plan", "autodiff", "cost"),
    ("engine",),
    ("nn", "optim", "data"),
    ("models",),
    ("train",),
    ("bench", "config", "verify"),
    ("api", "cli", "sweep", "tasks", "__main__"),
]
RANK = {folder: rank for rank, row in enumerate(ROWS) for folder in row}
FREE = {"__init__"}  # holds the version, and loads what it offers when that is first used


def imported_modules(source: str, module: str) -> Iterator[str]:
    """Every module that a source imports anywhere in it: top level, inside functions, under TYPE_CHECKING."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*parent, *([node.module] if node.module else [])])
            yield base
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


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import ttrain.train.loop", {"train"}),
        ("def f():\n    from ttrain.engine import static", {"engine"}),
        ("if TYPE_CHECKING:\n    from ttrain import models", {"models"}),
        ("from ..plan import arena", {"plan"}),
        ("import numpy, torch", set()),
    ],
)
def test_every_form_of_import_is_seen(source: str, expected: set[str]) -> None:
    assert folders_imported(source, "ttrain.graph.node") == expected
