"""Training under a supervisor: this process only watches, and starts `python -m ttrain` again where it must."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ttrain.config.checks.device import supervised
from ttrain.config.schema import Config
from ttrain.train.supervise.heartbeat import VARIABLE
from ttrain.train.supervise.supervisor import Supervisor, continuing

PROGRAM = (sys.executable, "-m", "ttrain")


def wanted(config: Config) -> bool:
    """Whether this process should supervise: asked for, and not itself the child of a supervisor."""
    if config.task.name != "train" or os.environ.get(VARIABLE):
        return False
    return supervised(config.supervise, config.source)


def run(config: Config, overrides: Sequence[str], flags: Sequence[str]) -> int:
    """Supervises the training that the overrides ask for; its exit code."""

    def command(run: Path | None) -> list[str]:
        return [*PROGRAM, *flags, *continuing(overrides, run)]

    return Supervisor(config.supervise, command, _say).run()


def _say(text: str) -> None:
    print(f"ttrain: {text}", file=sys.stderr, flush=True)
