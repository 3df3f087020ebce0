"""`python -m` or `-c` as a fork of a process that has imported torch and ttrain: it starts at once, in a hurry.

ttnn is not among what is imported, because it reads the environment as it is.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.hurry import hurry
from ttrain.train.supervise.child import Child

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


def start(
    module: str, words: Sequence[str], cwd: Path, environment: Mapping[str, str], files: Mapping[int, int]
) -> Any:
    """Start such a process, which has files of ours: by the number there the one here."""
    passed = {there: Connection(os.dup(here)) for there, here in files.items()}  # as it can be sent
    process = forks().Process(target=run_as_main, args=(module, words, cwd, environment, passed))
    process.start()
    return process


def run(
    module: str, *words: str, cwd: Path = ROOT, seconds: float = SECONDS, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `python -m module words` or `python -c words` in a folder, with more variables in its environment."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        said = {1: out.fileno(), 2: err.fileno()}
        process = start(module, words, cwd, {**os.environ, **environment}, said)
        process.join(seconds)
        code = process.exitcode
        if code is None:
            process.kill()
        assert code is not None, f"{module} {words} ran for over {seconds} s"
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess([module, *words], code, out.read(), err.read())


class ForkedChild(Child):
    """A `Child` that is such a fork, of a command `python -m module words` or `python -c code`."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
        orphaned: Any = None,
        inherited: Sequence[int] = (),
    ) -> None:
        _, flag, *words = command
        module = flag if flag == "-c" else words.pop(0)
        with ExitStack() as stack:
            files = {number: number for number in (1, 2, *inherited)}
            if log is not None:
                files |= dict.fromkeys((1, 2), stack.enter_context(open(log, "ab")).fileno())
            self.process = start(module, words, Path.cwd(), {**os.environ, **(environment or {})}, files)
        self.pid, self.args = self.process.pid, command

    def poll(self) -> int | None:
        return self.process.exitcode  # type: ignore[no-any-return]

    def wait(self, timeout: float | None = None) -> int | None:
        self.process.join(timeout)
        return self.poll()

    def send(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def __del__(self) -> None: ...


def run_as_main(
    module: str, words: Sequence[str], cwd: Path, environment: Mapping[str, str], files: Mapping[int, Connection]
) -> None:
    """Run a module in such a process, which leads a session."""
    os.setsid()
    apart = {number: fcntl.fcntl(file.fileno(), fcntl.F_DUPFD, 512) for number, file in files.items()}
    for number, file in apart.items():
        os.dup2(file, number)
        os.close(file)
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
