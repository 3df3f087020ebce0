"""A stub for the compiler of Tenstorrent kernels, for mocked boards only.

A mocked board runs no kernel, yet metal compiles one for every program. `runtime_root` makes a folder that links to the
installed ttnn and holds a compiler of its own: a shell script that writes a program of one instruction.
It needs neither a C compiler nor root rights, and it refuses to work for a process that has not asked for a mocked
board, so that such a kernel can never reach a card.
"""

from __future__ import annotations

import importlib.util
import os
import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

from ttrain.core.errors import DeviceUnavailable

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
    version = ".".join(map(str, sys.version_info[:2]))
    if version in ("3.10", "3.12") and sys.platform.startswith("linux"):
        return "ttnn is not installed. Run pip install 'ttrain[tt]'."
    here = f"Python {version} on {sys.platform}"
    return f"ttnn is not installed, and has no wheel for {here}: use Python 3.12 on Linux x86-64."


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


DATA_ADDRESS = 0xFFB00800  # start of a core's local memory
MARK = b"ttrain stub kernel, mocked boards only\0"

_RETURN = struct.pack("<I", 0x00008067)  # jalr x0, 0(ra)
_ET_EXEC, _EM_RISCV = 2, 243
_PROGBITS, _SYMTAB, _STRTAB, _RELA = 1, 2, 3, 4
_START = 52 + 2 * 32  # bytes of the header and of two segments' headers


def return_only(text_address: int) -> bytes:
    """Return an executable whose text is one return at `text_address`."""
    end = text_address + len(_RETURN)
    symbols = {  # value, info, section
        b"_start": (text_address, 0x12, 1),
        b"__fw_export_text_end": (end, 0x10, 0xFFF1),
        b"__fw_export_ldm_end": (DATA_ADDRESS, 0x10, 0xFFF1),
    }
    sections = {  # kind, flags, address, linked section, info, alignment, bytes of an entry
        b".text": (_PROGBITS, 6, text_address, 0, 0, 4, 0),
        b".rela.text": (_RELA, 0, 0, 4, 1, 4, 12),
        b".data": (_PROGBITS, 3, DATA_ADDRESS, 0, 0, 4, 0),
        b".symtab": (_SYMTAB, 0, 0, 5, 1, 4, 16),
        b".strtab": (_STRTAB, 0, 0, 0, 0, 1, 0),
    }
    strings, names = b"\0" + MARK, dict[bytes, int]()
    for name in (*symbols, *sections):
        names[name] = len(strings)
        strings += name + b"\0"
    relocation, entries = struct.pack("<III", text_address, 0, 0), bytes(16)
    for name, (value, info, section) in symbols.items():
        entries += struct.pack("<IIIBBH", names[name], value, 0, info, 0, section)
    content, table = b"", bytes(40)
    bodies = (_RETURN, relocation, b"", entries, strings)
    for body, (name, (kind, flags, address, *rest)) in zip(bodies, sections.items(), strict=True):
        table += struct.pack("<10I", names[name], kind, flags, address, _START + len(content), len(body), *rest)
        content += body + bytes(-len(body) % 4)
    text = struct.pack("<8I", 1, _START, text_address, text_address, len(_RETURN), len(_RETURN), 5, 4)
    data = struct.pack("<8I", 1, _START + len(_RETURN) + len(relocation), DATA_ADDRESS, end, 0, 0, 6, 4)
    identity = b"\x7fELF\x01\x01\x01" + bytes(9)
    header = (identity, _ET_EXEC, _EM_RISCV, 1, text_address, 52, _START + len(content), 0, 52, 32, 2, 40, 6, 5)
    return struct.pack("<16sHHIIIIIHHHHHH", *header) + text + data + content + table
