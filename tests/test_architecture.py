"""docs/architecture.md stays true: its layers, the examples it shows, and every name it uses."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.test_docs import Command, blocks, spans
from tests.test_import_rank import PACKAGE, RANK
from ttrain.cli import main
from ttrain.config import registry
from ttrain.graph import REGISTRY

PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
PLANS = [index for index, (_, text) in enumerate(blocks(PAGE)) if "task=plan" in text]


def test_the_table_of_layers_is_the_one_that_imports_are_held_to() -> None:
    rows = re.findall(r"^\| (\d+) \| ([^|]*) \|", PAGE.read_text("utf-8"), re.MULTILINE)
    assert {name: int(number) for number, names in rows for name in re.findall(r"`(\w+)`", names)} == RANK


@pytest.mark.parametrize("index", PLANS)
def test_what_a_command_prints_is_what_the_page_shows(index: int, capsys: pytest.CaptureFixture[str]) -> None:
    command, (_, shown) = blocks(PAGE)[index][1], blocks(PAGE)[index + 1]
    overrides = Command(command.replace("\\\n", " ")).overrides
    assert overrides is not None and main(overrides) == 0
    printed = capsys.readouterr().out
    assert printed[printed.index("step train\n") :].strip() == shown.strip()


def identifiers() -> set[str]:
    """Every name that the package defines: classes, functions, fields, arguments and members of enums."""
    found: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.Name | ast.arg):
                found.add(node.id if isinstance(node, ast.Name) else node.arg)
            elif isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                found.add(str(node.value.value))  # the name of a step input
    return found


def test_every_name_exists() -> None:
    """Paths, modules and config keys are checked in tests/test_docs.py."""
    known = identifiers() | RANK.keys() | {op.name for op in REGISTRY.values()} | {row.name for row in registry.rows()}
    names = {span for span in spans(PAGE) if re.fullmatch(r"[A-Za-z_]+", span)}
    assert len(names) > 40 and not names - known


def test_the_engines_are_all_there() -> None:
    text = PAGE.read_text("utf-8")
    listed = re.findall(r"^\| `(\w+)` \| (?!`)[^|]*\| [^|]* \|$", text, re.MULTILINE)
    assert listed == registry.names("engine")
