"""Keys of Hydra that do anything with ttrain, and what to give instead of the others, so that none is ignored."""

from __future__ import annotations

import re
from collections.abc import Iterable

_HEEDED = re.compile(
    r"hydra\.(mode|sweep\.dir|sweeper\.params(\..+)?|job\.(num|id|override_dirname)"
    r"|job\.config\.override_dirname(\..+)?)"  # what ${hydra:job.override_dirname} is made of
)
_INSTEAD = {
    "hydra.run.dir": "Give run.dir=<folder>.",
    "hydra.output_subdir": "Give run.dir=<folder>; the config lies in it.",
    "hydra.searchpath": "Give --config-dir <folder>.",
    "hydra.sweep": "Give sweep.dir=<folder>.",
    "hydra.sweeper": "ttrain runs sweeps itself: see sweep.search=tpe, sweep.trials, sweep.parallel.",
    "hydra.launcher": "ttrain starts jobs itself; give sweep.parallel=<jobs>, under SLURM sweep.srun.",
    "hydra.job.name": "Give logger.run_name=<name>, or run.dir=<folder>.",
    "hydra.job.chdir": "ttrain never changes the folder; paths are those of the folder it is started in.",
    "hydra.job.env_set": "Set the variable in the shell, before the command.",
    "hydra.job_logging": "What a run tells is in its folder: log.txt, metrics.jsonl and events.jsonl.",
    "hydra.verbose": "HYDRA_FULL_ERROR=1 shows tracebacks.",
}


def ignored(keys: Iterable[str], origin: str = "") -> list[str]:
    """One problem for each of Hydra's keys, such as `hydra.run.dir` or `hydra/launcher`, that would do nothing.

    `origin` says which file set them.
    """
    problems = []
    for key in keys:
        name = key.lstrip("+~").replace("/", ".")
        if name != "hydra" and not _HEEDED.fullmatch(name):
            problems.append(f"{key.lstrip('+~')}: has no effect with ttrain{origin}. {_instead(name)}")
    return problems


def refused(key: str, file: str) -> list[str]:
    """Return the problem of a key of Hydra that a file sets: code is refused, and what would do nothing."""
    if key.rpartition(".")[2] in ("_target_", "()", "class"):
        return [f"{key}: refused (set in {file}); a config file can't name code."]
    return ignored([key], f" (set in {file})")


def _instead(name: str) -> str:
    while name and name not in _INSTEAD:
        name = name.rpartition(".")[0]
    return _INSTEAD.get(name, "Leave it out.")
