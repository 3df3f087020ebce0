"""Make a loaded library of C++ source: find the machine's compiler, compile once, and keep the result on disk.

A cache entry is one file, `<key>.<digest>.so`. The key covers everything that the machine code depends on: the source
with its headers, the flags, the compiler, and the processor, be it this one or the kind that TTRAIN_MARCH names. The
digest is that of the file itself, so an entry that was cut off or changed is rebuilt instead of loaded. Entries appear
by a rename within the folder, so processes that build the same entry at once do not disturb each other.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

from ttrain.core.cores import usable_cores
from ttrain.core.errors import TtrainError, UserError
from ttrain.core.folders import cache_folder
from ttrain.core.processor import NATIVE, is_x86, march, processor_features
from ttrain.core.waiting import Waiting

HEADERS = Path(__file__).parent / "kernels"
CANDIDATES = ("g++", "c++", "clang++")
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fno-exceptions",
    "-fno-rtti",
    "-fvisibility=hidden",
    "-fno-math-errno",  # lets square roots be one instruction; NaN and infinity keep their meaning
    "-fno-trapping-math",
    "-ffp-contract=fast",  # a multiply-add rounds once
    "-fschedule-insns",  # operations of neighbouring vectors alternate
    "-Wno-ignored-optimization-argument",  # clang has no such flag and warns of it
    "-Wno-psabi",  # vectors are never passed between libraries
)


class CompileError(TtrainError):
    """The machine's compiler refused the generated source."""


def find_compiler() -> tuple[list[str], str]:
    """Return (command, identity) of the compiler named by $CXX, else of g++, c++ or clang++.

    The identity changes when the compiler is exchanged; it is found without running it. Raises UserError where there is
    no compiler.
    """
    given = os.environ.get("CXX", "").strip()
    try:
        commands = [shlex.split(given)] if given else [[name] for name in CANDIDATES]
    except ValueError:  # a quotation mark that is not closed
        commands = []
    for command in commands:
        if found := shutil.which(command[0]):
            executable = Path(found).resolve()
            facts = executable.stat()
            return command, f"{' '.join(command)} {executable} {facts.st_size} {facts.st_mtime_ns}"
    looked = f"CXX={given} can't" if given else f"none of {', '.join(CANDIDATES)} can"
    raise UserError(
        f"engine=traced compiles its kernels with the machine's C++ compiler, and {looked} be run. Install g++ or "
        "clang++ (or set CXX to one), or use engine=static, which needs no compiler."
    )


@lru_cache(maxsize=1)
def _headers() -> bytes:
    return b"".join(path.name.encode() + path.read_bytes() for path in sorted(HEADERS.glob("*.h")))


def code_version() -> str:
    """Changes with the sources of the kernels, the compiler and its flags: how fast kernels are holds for one."""
    command, identity = find_compiler()
    facts = "\n".join([*command, *FLAGS, _machine_flag(), identity])
    return _digest(facts.encode() + _headers())[:12]


class Toolchain:
    """Builds libraries, or takes them from the cache. `compilations` counts the libraries that had to be built."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = cache_folder() / "native" if folder is None else folder
        self.compilations = 0
        self.processes = usable_cores()  # how many compilers may run at once

    def load(self, sources: Sequence[str]) -> ctypes.CDLL:
        """The library that these translation units make.

        Raises UserError where there is no compiler or the cache can't be written, CompileError where it fails.
        """
        compiler, identity = find_compiler()
        command = [*compiler, *FLAGS, _machine_flag()]
        facts = "\n".join([*sources, *command, identity, _target()])
        key = _digest(facts.encode() + _headers())
        path = self._cached(key) or self._build(command, key, sources)
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:  # such as a file system mounted without permission to execute
            raise UserError(
                f"compiled kernels can't be loaded from {self.folder}: {error}. Set TTRAIN_CACHE to a folder that "
                "programs may run from, or use engine=static."
            ) from None

    def _cached(self, key: str) -> Path | None:
        """The entry of a key, if it is whole; damaged ones are removed."""
        for path in sorted(self.folder.glob(f"{key}.*.so")):
            try:
                if path.name == f"{key}.{_digest(path.read_bytes())}.so":
                    return path
                path.unlink()
            except OSError:  # another process has just removed or replaced it
                continue
        return None

    def _build(self, command: Sequence[str], key: str, sources: Sequence[str]) -> Path:
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.TemporaryDirectory(prefix="build-", dir=self.folder, ignore_cleanup_errors=True) as work:
                return self._build_in(Path(work), command, key, sources)
        except OSError as error:  # such as a disk that is full by now
            raise UserError(
                f"compiled kernels can't be kept in {self.folder}: {error.strerror}. Set TTRAIN_CACHE to a folder that "
                "can be written, or use engine=static."
            ) from None

    def _build_in(self, work: Path, command: Sequence[str], key: str, sources: Sequence[str]) -> Path:
        self.compilations += 1
        texts, built = [work / f"{number}.cpp" for number in range(len(sources))], work / "kernels.so"

        kernels, done = [source.count("(void* const* a) {") for source in sources], list[int]()

        def compiled(text: Path, source: str, count: int) -> str:
            text.write_text(source, "utf-8")
            self._run([*command, f"-I{HEADERS}", "-c", str(text), "-o", f"{text}.o"], key, source)
            done.append(count)
            waiting.at(sum(done), sum(kernels))
            return f"{text}.o"

        with Waiting("Compiling kernels") as waiting, ThreadPoolExecutor(len(sources)) as pool:
            waiting.at(0, sum(kernels))
            objects = list(pool.map(compiled, texts, sources, kernels))
        self._run([*command, "-shared", *objects, "-o", str(built)], key)
        path = self.folder / f"{key}.{_digest(built.read_bytes())}.so"
        os.replace(built, path)
        return path

    def _run(self, arguments: Sequence[str], key: str, source: str = "") -> None:
        """Run a compiler, which never sees Ctrl-C: a run finishes its step then, and may have to compile for that.

        A session of its own would come too late: a signal that comes while one is made is met without a handler.
        """
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            done = subprocess.run(arguments, capture_output=True, text=True, errors="replace", check=False)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if done.returncode:
            raise self._failure(key, arguments, source, done.stderr)

    def _failure(self, key: str, arguments: Sequence[str], source: str, messages: str) -> Exception:
        """Return the error to raise. A full disk counts as one that this process could not write to itself."""
        if (full := os.strerror(errno.ENOSPC)) in messages:
            return OSError(errno.ENOSPC, full)
        log = self.folder / f"{key[:16]}.log"
        log.write_text("\n".join([shlex.join(arguments), messages, source]), "utf-8")
        first = next((line for line in messages.splitlines() if "error" in line), messages.strip()[:200])
        return CompileError(
            f"{arguments[0]} could not compile the generated kernels: {first}\n"
            f"Command, messages and source are in {log}. "
            "Another compiler can be named by CXX; engine=static needs none."
        )


def _machine_flag() -> str:
    """Return the compiler's flag for the processor that kernels are for. Raises UserError for a wrong TTRAIN_MARCH."""
    if (kind := march()) != NATIVE:
        return f"-march={kind}"
    return "-march=native" if is_x86() else "-mcpu=native"


def _target() -> str:
    """Return what the machine code depends on beside the flags: nothing of this processor where a kind is named."""
    return processor_features() if march() == NATIVE else platform.machine()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]
