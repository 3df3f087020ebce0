"""Sizes that keep the code readable."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ttrain

PACKAGE = Path(ttrain.__file__).parent
MODULE_LINES = 420
FUNCTION_LINES = 60
MODULES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_module_and_functions_are_short(path: Path) -> None:
    source = path.read_text("utf-8")
    assert source.count("\n") <= MODULE_LINES
    functions = (
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    lengths = {node.name: (node.end_lineno or 0) - node.lineno + 1 for node in functions}
    assert not {name: lines for name, lines in lengths.items() if lines > FUNCTION_LINES}
