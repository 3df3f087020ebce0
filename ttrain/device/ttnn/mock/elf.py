"""The smallest RISC-V program that metal's kernel loader accepts: one return instruction.

The loader wants a 32-bit little-endian executable whose first loadable segment starts at the entry point, a second
(empty) one right behind its text, and a relocation section for `.text` (kernels that run in place have to be movable).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

DATA_ADDRESS = 0xFFB00800  # start of a core's local memory
MARK = b"ttrain stub kernel, mocked boards only\0"

_RETURN = struct.pack("<I", 0x00008067)  # jalr x0, 0(ra)
_ET_EXEC, _EM_RISCV = 2, 243
_PROGBITS, _SYMTAB, _STRTAB, _RELA = 1, 2, 3, 4
_EHDR, _PHDR = 52, 32  # sizes of the headers in bytes


@dataclass(frozen=True)
class _Section:
    name: bytes
    kind: int
    body: bytes
    flags: int = 0
    address: int = 0
    link: int = 0
    info: int = 0
    entry: int = 0


def return_only(text_address: int) -> bytes:
    """An executable whose text is one return at `text_address`."""
    symbols, names = _symbols(
        {
            b"_start": (text_address, 0x12, 1),
            b"__fw_export_text_end": (text_address + len(_RETURN), 0x10, 0xFFF1),
            b"__fw_export_ldm_end": (DATA_ADDRESS, 0x10, 0xFFF1),
        }
    )
    sections = [
        _Section(b".text", _PROGBITS, _RETURN, flags=6, address=text_address),
        _Section(b".rela.text", _RELA, struct.pack("<III", text_address, 0, 0), link=5, info=1, entry=12),
        _Section(b".data", _PROGBITS, b"", flags=3, address=DATA_ADDRESS),
        _Section(b".comment", _PROGBITS, MARK),
        _Section(b".symtab", _SYMTAB, symbols, link=6, info=1, entry=16),
        _Section(b".strtab", _STRTAB, names),
    ]
    return _linked(sections, text_address)


def _symbols(table: dict[bytes, tuple[int, int, int]]) -> tuple[bytes, bytes]:
    """Symbol and string table of name -> (value, info, section)."""
    symbols, names = bytes(16), b"\0"
    for name, (value, info, section) in table.items():
        symbols += struct.pack("<IIIBBH", len(names), value, 0, info, 0, section)
        names += name + b"\0"
    return symbols, names


def _linked(sections: list[_Section], entry: int) -> bytes:
    strings, name_offsets = b"\0", []
    for name in [*(section.name for section in sections), b".shstrtab"]:
        name_offsets.append(len(strings))
        strings += name + b"\0"
    sections = [*sections, _Section(b".shstrtab", _STRTAB, strings)]
    start = _EHDR + 2 * _PHDR
    content, offsets = b"", []
    for section in sections:
        offsets.append(start + len(content))
        content += section.body + bytes(-len(section.body) % 4)
    text, data = sections[0], sections[2]
    headers = struct.pack("<8I", 1, offsets[0], entry, entry, len(text.body), len(text.body), 5, 4)
    headers += struct.pack("<8I", 1, offsets[2], DATA_ADDRESS, entry + len(text.body), len(data.body), 0, 6, 4)
    table = bytes(40)
    for section, at, offset in zip(sections, name_offsets, offsets, strict=True):
        size = len(section.body)
        fields = (at, section.kind, section.flags, section.address, offset, size, section.link, section.info)
        table += struct.pack("<10I", *fields, 4 if section.kind != _STRTAB else 1, section.entry)
    identity = b"\x7fELF\x01\x01\x01" + bytes(9)
    header = struct.pack(
        "<16sHHIIIIIHHHHHH", identity, _ET_EXEC, _EM_RISCV, 1, entry, _EHDR, start + len(content),
        0, _EHDR, _PHDR, 2, 40, len(sections) + 1, len(sections),
    )  # fmt: skip
    return header + headers + content + table
