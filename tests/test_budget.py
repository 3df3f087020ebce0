"""Sizes that keep the code readable: of functions, modules, folders, the core and the whole. Growth is a decision."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import ttrain
from tests.conftest import LONGEST, TESTS
from tests.test_import_rank import parsed

PACKAGE = Path(ttrain.__file__).parent
REPO = PACKAGE.parent
FUNCTION_LINES = 60
MODULE_LINES = 420
FOLDER_FILES = 15
LARGER_FOLDERS = {  # how many each may have: lower a figure when its folder shrinks
    "tests/ttnn": 20,
}
# Lines of code: neither blank, nor comment, nor docstring. To raise one needs a reason in the commit that does.
PYTHON_LINES = 35_117
TEMPLATE_LINES = 2_296  # the C++ that kernels are generated from
OPTIONS = 440  # fields that a config declares with `option`
CORE = ("graph", "ops", "autodiff", "plan", "engine")
CORE_LINES = 3_611
WITHOUT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
MODULES = sorted(PACKAGE.rglob("*.py"))
Function = ast.FunctionDef | ast.AsyncFunctionDef


def python_lines(source: str) -> int:
    """Lines that hold code; a text over several lines counts each of them unless it is a docstring."""
    docstrings: set[int] = set()
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(node, clean=False) is not None:
            docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    tokens = (
        token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type not in WITHOUT_CODE
    )
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - docstrings)


def template_lines(source: str) -> int:
    """Lines of C++ that hold code. No text of ours has `//` or `/*` in it."""
    without = re.sub(r"//[^\n]*|/\*.*?\*/", lambda comment: "\n" * comment[0].count("\n"), source, flags=re.DOTALL)
    return sum(bool(line.strip()) for line in without.splitlines())


def long_functions(path: Path) -> Iterator[str]:
    for node in ast.walk(parsed(path.read_text("utf-8"))):
        if isinstance(node, Function) and (length := (node.end_lineno or 0) - node.lineno + 1) > FUNCTION_LINES:
            yield f"{path.relative_to(REPO)}:{node.lineno} {node.name}: {length} lines"


def test_functions_are_short() -> None:
    assert not [found for path in MODULES for found in long_functions(path)]


def test_modules_are_short() -> None:
    lengths = {str(path.relative_to(REPO)): path.read_text("utf-8").count("\n") for path in MODULES}
    assert not {name: lines for name, lines in lengths.items() if lines > MODULE_LINES}


def test_folders_are_small() -> None:
    files = Counter(str(path.parent.relative_to(REPO)) for top in ("ttrain", "tests") for path in python_files(top))
    assert not {name: count for name, count in files.items() if count > LARGER_FOLDERS.get(name, FOLDER_FILES)}
    assert all(files[name] > FOLDER_FILES for name in LARGER_FOLDERS), "drop the folders that are small now"


RIDDLE = re.compile(r"(What|Whether|Of|How|Where|The same)\b")


def riddles(path: Path) -> Iterator[str]:
    """Docstrings without a verb, whose subject would be the name of what they describe."""
    for node in ast.walk(parsed(path.read_text("utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | Function):
            docstring = ast.get_docstring(node)
            if docstring is not None and RIDDLE.match(docstring):
                yield f"{path.relative_to(REPO)}:{node.body[0].lineno} {docstring.splitlines()[0]}"


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    assert [found for path in MODULES for found in riddles(path)] == []


def python_files(top: str) -> list[Path]:
    return sorted((REPO / top).rglob("*.py"))


def test_the_code_stays_within_its_budget() -> None:
    lines = Counter[str]()
    for path in MODULES:
        lines[path.relative_to(PACKAGE).parts[0]] += python_lines(path.read_text("utf-8"))
    core = {folder: lines[folder] for folder in CORE}
    assert sum(core.values()) <= CORE_LINES, core
    assert lines.total() <= PYTHON_LINES, dict(lines.most_common())
    assert sum(len(re.findall(r"= option\(", path.read_text("utf-8"))) for path in MODULES) <= OPTIONS
    templates = {path.name: template_lines(path.read_text("utf-8")) for path in PACKAGE.rglob("*.h")}
    assert sum(templates.values()) <= TEMPLATE_LINES, templates


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ('"""Of the\nmodule."""\n\nx = 1  # one\n# none\n', 1),
        ('def f():\n    """Of f."""\n    return (\n        1,\n\n    )\n', 4),
        ('class A:\n    """Of A."""\n    text = """\na\n"""\n    "no docstring"\n', 5),
        ("", 0),
    ],
)
def test_lines_of_python_are_counted(source: str, lines: int) -> None:
    assert python_lines(source) == lines


def test_lines_of_templates_are_counted() -> None:
    assert template_lines("// a\n\nint f() {  /* b\n c */\n  return 1;  // d\n}\n/* e */\n") == 3


def test_the_files_that_are_dealt_out_first_exist() -> None:
    assert [name for name in LONGEST if not (TESTS / name).is_file()] == []
