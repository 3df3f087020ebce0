"""docs/architecture.md stays true: its layers, the examples it shows, and every name it uses."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

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


def names_of(frame: FrameType) -> set[str]:
    """Names of a function that runs: of a method with its class, and with those that inherit it."""
    code, owner = frame.f_code, type(frame.f_locals.get("self"))
    for place in owner.__mro__:
        if getattr(vars(place).get(code.co_name), "__code__", None) is code:
            return {f"{each.__name__}.{code.co_name}" for each in owner.__mro__ if issubclass(each, place)}
    return {code.co_name}


def ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(str(PACKAGE))


def stack(frame: FrameType | None) -> Iterator[set[str]]:
    """Names of the package's functions on a call stack, innermost first."""
    while frame is not None:
        if ours(frame):
            yield names_of(frame)
        frame = frame.f_back


def test_a_batch_and_a_rate_pass_the_functions_that_the_page_lists(inside: Path) -> None:
    """A batch passes at most 10 from the reader to its buffer; a rate at most 14, the kernel with them."""
    calls: list[set[str]] = []
    stacks: list[list[set[str]]] = []

    def listen(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and ours(frame):
            calls.append(names_of(frame))
            if "TorchDevice.upload_inputs" in calls[-1] and "lr" in frame.f_locals["arrays"]:
                stacks.append([*stack(frame)][::-1])

    (inside / "book.txt").write_text("a text of few words\n" * 200, "utf-8")
    sizes = "model.preset=null model.layers=1 model.heads=1 model.width=8 model.context=8 train.batch_size=2"
    command = f"data.path=book.txt device=cpu engine=static schedule.warmup=0 train.steps=2 {sizes}"
    sys.setprofile(listen)
    try:
        assert main(command.split()) == 0
    finally:
        sys.setprofile(None)
    text = PAGE.read_text("utf-8")
    passed = re.findall(r"^\| `(\w+\.\w+)` \|", text, re.MULTILINE)
    assert len(passed) == 10
    heard = iter(calls)
    missing = [name for name in passed if not any(name in names for names in heard)]
    assert not missing
    listed = re.search(r"on the call stack when `optimizer.lr` [^:]*: (.*?)\. The kernel", text, re.DOTALL)
    assert listed is not None
    named = re.findall(r"`([\w.]+)`", listed[1])
    assert len(named) + 1 <= 14 and len(stacks) == 2
    for found in stacks:
        assert len(found) == len(named) and all(map(set[str].__contains__, found, named)), found
