"""Training under a supervisor: this process only watches, and starts `python -m ttrain` again where it must."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ttrain.config.schema import Given
from ttrain.parallel.settings import ParallelConfig, place
from ttrain.train.settings import SuperviseConfig
from ttrain.train.supervise.child import PROGRAM, VARIABLE, say
from ttrain.train.supervise.supervisor import Supervisor, continuing

_ENOUGH_FAILURES = 2  # in a row, to try fewer ranks


def wanted(task: str, config: SuperviseConfig, source: Given) -> bool:
    """Return whether this process should supervise: the config asks for it, and it is no child of a supervisor."""
    alone = not os.environ.get(VARIABLE) and place() is None
    return task == "train" and alone and config.wanted(source.explicit)


def run(config: SuperviseConfig, parallel: ParallelConfig, overrides: Sequence[str], flags: Sequence[str]) -> int:
    """Supervise the training that the overrides ask for. Return its exit code."""

    def command(run: Path | None) -> list[str]:
        return [*PROGRAM, *flags, *continuing(overrides, run), *_fewer(parallel, supervisor.failures)]

    supervisor = Supervisor(config, command, say)
    return supervisor.run()


def _fewer(parallel: ParallelConfig, failures: int) -> list[str]:
    """Return overrides that halve the ranks after several failures in a row; the slices stay those of the run."""
    if parallel.processes is None or failures < _ENOUGH_FAILURES or parallel.processes == 1:
        return []
    fewer = max(parallel.processes >> (failures + 1 - _ENOUGH_FAILURES), 1)
    say(f"Going on with {fewer} of {parallel.processes} ranks.")
    return [f"parallel.processes={fewer}"]
