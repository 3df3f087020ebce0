"""Training under a supervisor: this process only watches, and starts `python -m ttrain` again where it must."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ttrain.config.checks import supervised
from ttrain.config.schema import Config
from ttrain.train.supervise.heartbeat import VARIABLE
from ttrain.train.supervise.supervisor import Supervisor, continuing

PROGRAM = (sys.executable, "-m", "ttrain")


def wanted(config: Config) -> bool:
    """Whether this process should supervise: asked for, and not itself the child of a supervisor."""
    if config.task.name != "train" or os.environ.get(VARIABLE):
        return False
    return supervised(config.supervise, config.source)


def run(config: Config, words: Sequence[str], flags: Sequence[str]) -> int:
    """Supervises the training that the words of the command line ask for; its exit code."""

    def command(run: Path | None) -> list[str]:
        return [*PROGRAM, *flags, *continuing(words, run)]

    return Supervisor(config.supervise, command, _say).run()


def _say(text: str) -> None:
    print(f"ttrain: {text}", file=sys.stderr, flush=True)
