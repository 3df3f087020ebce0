"""A stub for the compiler of Tenstorrent kernels, for mocked boards only.

A mocked board runs no kernel, yet metal compiles one for every program. `runtime_root` makes a folder that links to the
installed ttnn and holds a compiler of its own: a shell script that writes a program of one instruction (see elf.py).
It needs neither a C compiler nor root rights, and it refuses to work for a process that has not asked for a mocked
board, so that such a kernel can never reach a card.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path

from ttrain.core.errors import DeviceUnavailable
from ttrain.device.ttnn.mock.elf import return_only

COMPILER = "riscv-tt-elf-g++"
MOCK_VARIABLE = "TT_METAL_MOCK_CLUSTER_DESC_PATH"
_ANY_ADDRESS = 0x5000  # of programs that the loader places itself

_SCRIPT = """#!/bin/sh
# Stub compiler of ttrain for mocked boards. Uses builtins of the shell only.
output=a.out; script=; object=; depends=
while [ $# -gt 0 ]; do
  case $1 in
    --version) echo '{name} (stub of ttrain, mocked boards only) 0.0.0'; exit 0;;
    -o) output=$2; shift;;
    -MF) depends=$2; shift;;
    -T) script=$2; shift;;
    -T?*) script=${{1#-T}};;
    -c|-E|c++-header) object=1;;
  esac
  shift
done
if [ -z "{mock}" ]; then echo '{name}: this compiler is for mocked boards only' >&2; exit 1; fi
if [ -n "$depends" ]; then printf '%s:\\n' "$output" > "$depends"; fi
if [ -n "$object" ]; then printf '' > "$output"; exit 0; fi
case ${{script##*/}} in
{cases}
esac
"""


def installed_ttnn() -> Path:
    """Folder of the installed ttnn, found without importing it. Raises DeviceUnavailable."""
    found = importlib.util.find_spec("ttnn")
    if found is None or not found.submodule_search_locations:
        raise DeviceUnavailable(missing_ttnn())
    return Path(next(iter(found.submodule_search_locations)))


def missing_ttnn() -> str:
    """Return in one line why there is no ttnn here."""
    import sys

    version = ".".join(map(str, sys.version_info[:2]))
    if version not in ("3.10", "3.12") or not sys.platform.startswith("linux"):
        return (
            f"ttnn is not installed, and has no wheel for Python {version} on {sys.platform}: use Python 3.12 on Linux "
            "(x86-64) and pip install 'ttrain[tt]'."
        )
    return "ttnn is not installed. Run pip install 'ttrain[tt]'."


def runtime_root(folder: Path, wheel: Path | None = None) -> Path:
    """Fills `folder` with links to the installed ttnn and the stub compiler; may run twice, also at once.

    Raises DeviceUnavailable where that ttnn lacks its runtime.
    """
    wheel = installed_ttnn() if wheel is None else wheel
    if not (wheel / "runtime").is_dir():
        raise DeviceUnavailable(
            f"ttnn in {wheel} is not whole: it has no runtime/, which a mocked board needs. Run pip install "
            "--force-reinstall 'ttrain[tt]'."
        )
    tools = folder / "runtime" / "sfpi" / "compiler" / "bin"
    tools.mkdir(parents=True, exist_ok=True)
    for inside in ("", "runtime"):
        for source in (wheel / inside).iterdir():
            if source.name not in ("runtime", "sfpi", "__pycache__") and source.suffix != ".py":
                _link(folder / inside / source.name, source)
    compiler, draft = tools / COMPILER, tools / f"{COMPILER}.{os.getpid()}"
    draft.write_text(script_text(wheel / "runtime" / "hw" / "toolchain"), "ascii")
    draft.chmod(0o755)
    draft.replace(compiler)
    return folder


def _link(link: Path, source: Path) -> None:
    """A symbolic link, made anew where it leads elsewhere."""
    if link.is_symlink() and Path(os.readlink(link)) == source:
        return
    draft = link.with_name(f"{link.name}.{os.getpid()}")
    draft.symlink_to(source)
    draft.replace(link)


def script_text(toolchain: Path) -> str:
    """The compiler as a shell script: per linker script a program whose text lies where that script puts it."""
    cases = [
        f"  {name}) printf '{_quoted(return_only(address))}' > \"$output\";;"
        for name, address in sorted(_fixed_addresses(toolchain))
    ]
    cases.append(f"  *) printf '{_quoted(return_only(_ANY_ADDRESS))}' > \"$output\";;")
    return _SCRIPT.format(name=COMPILER, mock=f"${MOCK_VARIABLE}", cases="\n".join(cases))


def _fixed_addresses(toolchain: Path) -> Iterator[tuple[str, int]]:
    """Linker scripts that fix where text lies, with the address."""
    for path in toolchain.rglob("*.ld"):
        found = re.search(r"^\s*\.text\s+(0x[0-9A-Fa-f]+)", path.read_text("utf-8", "replace"), re.MULTILINE)
        if found:
            yield path.name, int(found.group(1), 16)


def _quoted(program: bytes) -> str:
    """Bytes as a format of the shell's printf."""
    plain = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_. ,-"
    return "".join(chr(byte) if byte in plain else f"\\{byte:03o}" for byte in program)
