"""The sentences that tell mistakes on the command line: messages.txt holds each command, and below it what is said.

python -m tests.config.messages    writes the sentences anew; git shows which have changed
"""

from __future__ import annotations

import shlex
from pathlib import Path

from ttrain.cli import parse_arguments
from ttrain.config.compose import load
from ttrain.core.errors import EXIT_USER, ConfigError

FILE = Path(__file__).with_name("messages.txt")


def sentences() -> dict[str, list[str]]:
    """Return the sentences of the file by command."""
    blocks = [block.splitlines() for block in FILE.read_text("utf-8").strip("\n").split("\n\n")]
    return {command: told for command, *told in blocks}


def said(command: str) -> list[str]:
    """Return what is said of a command that is refused."""
    try:
        load(parse_arguments(shlex.split(command))[1])
    except ConfigError as error:
        assert error.exit_code == EXIT_USER
        return error.problems
    raise AssertionError(f"{command} is not refused")


if __name__ == "__main__":
    written = "\n\n".join("\n".join([command, *said(command)]) for command in sentences())
    FILE.write_text(written + "\n", "utf-8")
