"""The cache of compiled libraries, and what happens without a compiler."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.forked import ForkedChild
from tests.native.conftest import require_compiler
from ttrain.core import processor
from ttrain.core.errors import UserError
from ttrain.device.torch.native import toolchain
from ttrain.device.torch.native.codegen import function_name, library_sources
from ttrain.device.torch.native.toolchain import CompileError, Toolchain

BODY = "*out<float>(a, 0) = 42.0f;"
SOURCES = library_sources([BODY], 1)


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.so"))


def answer(library: ctypes.CDLL, body: str = BODY) -> float:
    number = ctypes.c_float(0)
    block = (ctypes.c_void_p * 1)(ctypes.addressof(number))
    function = getattr(library, function_name(body))
    function.argtypes, function.restype = [ctypes.c_void_p], None
    function(ctypes.addressof(block))
    return number.value


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    require_compiler()
    return tmp_path / "cache"


@pytest.mark.parametrize("damage", ["truncated", "changed", "empty"])
def test_a_damaged_entry_is_built_again(cache: Path, damage: str) -> None:
    Toolchain(cache).load(SOURCES)
    (entry,) = entries(cache)
    content = bytearray(entry.read_bytes())
    content[len(content) // 2] ^= 1
    entry.unlink()  # the loaded file itself stays as it is
    entry.write_bytes(
        {"truncated": bytes(content[: len(content) // 2]), "changed": bytes(content), "empty": b""}[damage]
    )
    again = Toolchain(cache)
    assert answer(again.load(SOURCES)) == 42
    assert again.compilations == 1
    (entry,) = entries(cache)
    assert Toolchain(cache)._cached(entry.name.split(".")[0]) == entry


CHANGES: dict[str, tuple[str, Any]] = {
    "flags": ("FLAGS", (*toolchain.FLAGS, "-O2")),
    "headers": ("_headers", lambda: b"others"),
    "processor": ("processor_features", lambda: "another machine"),
}


@pytest.mark.parametrize("change", ["source", *CHANGES, "march"])
def test_what_the_code_depends_on_is_part_of_the_key(cache: Path, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(processor.VARIABLE, raising=False)
    Toolchain(cache).load(SOURCES)
    if change == "march":
        monkeypatch.setenv(processor.VARIABLE, "x86-64" if processor.is_x86() else "armv8-a")
    elif change != "source":
        monkeypatch.setattr(toolchain, *CHANGES[change])
    again = Toolchain(cache)
    assert answer(again.load([*SOURCES[:-1], SOURCES[-1] + "\n" * (change == "source")])) == 42
    assert again.compilations == 1


def test_code_for_a_kind_of_processor_is_that_of_every_machine(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One folder serves machines that have different processors, and none runs what its processor does not have."""
    kind, width = ("x86-64", 4) if processor.is_x86() else ("armv8-a", 4)
    monkeypatch.setenv(processor.VARIABLE, kind)
    body = "*out<float>(a, 0) = W;"
    code, version = library_sources([body], 1), toolchain.code_version()
    assert answer(Toolchain(cache).load(code), body) == width
    monkeypatch.setattr(toolchain, "processor_features", lambda: "another machine")
    again = Toolchain(cache)
    assert answer(again.load(code), body) == width and again.compilations == 0
    monkeypatch.delenv(processor.VARIABLE)
    assert toolchain.code_version() != version
    monkeypatch.setenv(processor.VARIABLE, "i486")
    with pytest.raises(UserError, match="TTRAIN_MARCH=i486 is not known on"):
        Toolchain(cache).load(code)


def test_two_may_build_the_same_library_at_once_and_a_third_finds_it(cache: Path) -> None:
    with ThreadPoolExecutor(2) as threads:
        libraries = list(threads.map(lambda made: made.load(SOURCES), [Toolchain(cache), Toolchain(cache)]))
    assert [answer(library) for library in libraries] == [42, 42]
    checked = Toolchain(cache)
    assert answer(checked.load(SOURCES)) == 42 and checked.compilations == 0
    assert {path.suffix for path in cache.iterdir()} == {".so"}, "nothing else is left behind"


@pytest.mark.parametrize("command", ["/nonexistent/g++", "no-such-compiler -m64", '"g++', None])
def test_no_compiler_is_one_message_that_offers_the_static_engine(
    tmp_path: Path, command: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    if command is not None:
        monkeypatch.setenv("CXX", command)
    looked = "none of g.., c.., clang.. can" if command is None else "CXX=.* can't"
    with pytest.raises(UserError, match=f"{looked} be run.*Install g.. or clang.*engine=static"):
        Toolchain(tmp_path).load(SOURCES)


def test_a_compiler_that_fails_names_the_log(cache: Path) -> None:
    with pytest.raises(CompileError, match="could not compile the generated kernels") as caught:
        Toolchain(cache).load(library_sources(["no_such_function();"], 1))
    (log,) = cache.glob("*.log")
    assert str(log) in str(caught.value) and "engine=static" in str(caught.value)
    assert "no_such_function" in log.read_text("utf-8")
    assert not entries(cache)


def test_messages_of_a_compiler_need_not_be_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "g++"
    program.write_bytes(b"#!/bin/sh\nprintf 'error: \\377' >&2\nexit 1\n")
    program.chmod(0o700)
    monkeypatch.setenv("CXX", str(program))
    with pytest.raises(CompileError, match="could not compile the generated kernels: error: "):
        Toolchain(tmp_path).load(SOURCES)


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("owner", "name", "error", "said"),
    [
        (Path, "mkdir", NotADirectoryError(errno.ENOTDIR, "Not a directory"), "can't be kept in .*Set TTRAIN_CACHE"),
        (Path, "write_text", FULL, "can't be kept in .*: No space left on device. Set TTRAIN_CACHE"),
        (os, "replace", FULL, "can't be kept in .*: No space left on device. Set TTRAIN_CACHE"),
        (toolchain.ctypes, "CDLL", OSError("failed to map segment"), "can't be loaded .*failed to map.*TTRAIN_CACHE"),
    ],
)
def test_a_cache_that_can_not_be_used_is_told(
    cache: Path, owner: Any, name: str, error: OSError, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mkdir()
    monkeypatch.setattr(owner, name, Mock(side_effect=error))
    with pytest.raises(UserError, match=said):
        Toolchain(cache).load(SOURCES)
    monkeypatch.undo()
    assert not list(cache.glob("build-*"))


def test_a_disk_that_is_full_for_the_compiler_is_told(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho 'ld: final link failed: No space left on device' >&2\nexit 1\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(UserError, match=r"can't be kept in .*: No space left on device. Set TTRAIN_CACHE"):
        Toolchain(cache).load(library_sources(["(void)a;"], 1))


def test_ctrl_c_does_not_end_the_compiler(cache: Path) -> None:
    """A terminal sends it to all programs of the run, which finishes its step and may have to compile for that."""
    script = (
        "import signal, sys; signal.signal(signal.SIGINT, lambda *_: None)\n"
        "from pathlib import Path; from tests.native.test_toolchain import SOURCES, Toolchain, answer\n"
        "print(answer(Toolchain(Path(sys.argv[1])).load(SOURCES)))"
    )
    child = ForkedChild([sys.executable, "-c", script, str(cache)], log=cache.with_name("said"))
    while not list(cache.glob("build-*/*.cpp")):
        assert child.poll() is None
        time.sleep(0.01)
    os.killpg(child.pid, signal.SIGINT)
    assert child.wait(150) == 0 and cache.with_name("said").read_text().split() == ["42.0"]
