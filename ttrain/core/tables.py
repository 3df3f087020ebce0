"""Tables of text that fit the window they are printed in."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import zip_longest

_GAP = 2


@dataclass(frozen=True)
class Table:
    """Rows of text under a title. The first column is a name, the others are numbers with their unit."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    notes: tuple[str, ...] = ()


def window() -> int:
    """Columns of the terminal that the standard output is; no bound for a file or a pipe, whose lines may be long."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize


def fitted(rows: Sequence[Sequence[str]], width: int, left: Collection[int]) -> list[str]:
    """The lines of a table, at most `width` long; columns `left` go to the left.

    A table that is wider goes on below, with its first column again; a cell that is wider than a line can be is folded.
    """
    natural = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths, blocks = natural, [list(range(len(natural)))]
    if sum(natural) + _GAP * (len(natural) - 1) > width:
        first = min(natural[0], width // 2)
        widths, blocks = [first, *(max(1, min(each, width - first - _GAP)) for each in natural[1:])], [[0]]
        for column in range(1, len(widths)):
            if len(blocks[-1]) > 1 and sum(widths[each] + _GAP for each in blocks[-1]) + widths[column] > width:
                blocks.append([0])
            blocks[-1].append(column)
    lines: list[str] = []
    for block in blocks:
        lines += [""] if lines else []
        for row in rows:
            folded = [textwrap.wrap(row[each], max(widths[each], 1), break_on_hyphens=False) for each in block]
            for parts in zip_longest(*(cell or [""] for cell in folded), fillvalue=""):
                pairs = zip(block, parts, strict=True)
                cells = [cell.ljust(widths[at]) if at in left else cell.rjust(widths[at]) for at, cell in pairs]
                lines.append((" " * _GAP).join(cells).rstrip())
    return lines


def plain_table(table: Table) -> str:
    """A table as text that fits the window: names to the left, numbers to the right."""
    lines = fitted([table.columns, *table.rows], window() - 2, {0})
    return "\n".join([table.title, *(f"  {line}".rstrip() for line in lines), *table.notes, ""])
