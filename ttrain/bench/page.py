"""Puts the results of benchmarks into a page of documentation: `python -m ttrain.bench.page PAGE RESULTS.md...`.

A result stands between `<!-- bench:NAME -->` and `<!-- /bench:NAME -->`; what stood there before is replaced. A page
that has no such marks gets them at its end.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from ttrain.core.errors import UserError
from ttrain.core.files import write_chosen


def check_page(path: Path, name: str) -> None:
    """Raises UserError where a page can't take a result, before anything is measured."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UserError(f"bench.markdown={path}: is no file in a folder that exists. Give a file such as results.md.")
    _parts(path, name)


def insert(path: Path, name: str, text: str) -> None:
    """Put one result into a page, which is written anew as a whole. Raises UserError where that is not possible."""
    before, after = _parts(path, name)
    first, last = _marks(name)
    write_chosen("bench.markdown", path, f"{before}{first}\n\n{text.strip()}\n\n{last}{after}")


def _marks(name: str) -> tuple[str, str]:
    return f"<!-- bench:{name} -->", f"<!-- /bench:{name} -->"


def _parts(path: Path, name: str) -> tuple[str, str]:
    """What stands before and after a result."""
    try:
        page = path.read_text("utf-8") if path.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"bench.markdown={path}: can't be read ({error}). Give another file.") from None
    first, last = _marks(name)
    if first not in page and last not in page:
        return (f"{page.rstrip()}\n\n" if page.strip() else ""), "\n"
    if page.count(first) != 1 or page.count(last) != 1 or page.index(first) > page.index(last):
        raise UserError(f"bench.markdown={path}: must hold {first} and after it {last}, each once.")
    return page[: page.index(first)], page[page.index(last) + len(last) :]


def mark_name(label: str, device: str) -> str:
    """What marks a result on a page: its study, its size, and a device that is not the usual one."""
    return re.sub(r"\W+", "_", label if device in ("auto", "cpu") else f"{label}_{device}")


def main(page: str, results: list[str]) -> None:
    """Insert results.md files that runs have written. Each begins with its own mark."""
    for file in results:
        text = Path(file).read_text("utf-8")
        found = re.match(r"<!-- bench:(\w+) -->\n", text)
        if found is None:
            raise UserError(f"{file}: is no results.md of task=bench.")
        insert(Path(page), found[1], text[found.end() :])


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2:])
    except (UserError, OSError) as error:
        sys.exit(f"ttrain: {error}")
