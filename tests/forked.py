"""`python -m` or `-c` as a fork of a process that has imported torch and ttrain: it starts at once, in a hurry.

ttnn is not among what is imported, because it reads the environment as it is.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.hurry import hurry

ROOT = Path(__file__).parents[1]
IMPORTED = [
    "tests.parallel.forks", "tests.parallel.ranks_worker", "tests.ttnn.runs", "ttrain.cli", "ttrain.tasks.train",
    "ttrain.train.loop.loop",
]  # fmt: skip
SECONDS = 170.0


def forks() -> Any:
    """Return the fork server of the processes of tests; each process that runs tests has one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


def run(
    module: str, *words: str, cwd: Path = ROOT, seconds: float = SECONDS, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `python -m module words` or `python -c words` in a folder, with more variables in its environment."""
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder, name) for name in ("stdout", "stderr")]
        process = forks().Process(target=run_as_main, args=(module, words, cwd, {**os.environ, **environment}, said))
        process.start()
        process.join(seconds)
        code = process.exitcode
        if code is None:
            process.kill()
        assert code is not None, f"{module} {words} ran for over {seconds} s"
        return subprocess.CompletedProcess([module, *words], code, *(file.read_text("utf-8") for file in said))


def run_as_main(
    module: str, words: Sequence[str], cwd: Path, environment: Mapping[str, str], said: Sequence[Path]
) -> None:
    """Run a module in such a process, which appends its two streams to the files `said`."""
    for number, file in enumerate(said, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(environment)
    if "OMP_NUM_THREADS" in environment:  # which OpenMP has read long before
        import torch

        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    hurry()
    os.chdir(cwd)
    sys.path[:0] = [str(cwd), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv = [module, *words]
    if module == "-c":
        return exec(sys.argv.pop(1), {"__name__": "__main__"})
    runpy.run_module(module, run_name="__main__", alter_sys=True)
