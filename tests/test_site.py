"""The site of docs/, and the commands that contributors type. The build runs where the extra `docs` is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

import ttrain

REPO = Path(__file__).parents[1]
DOCS = REPO / "docs"


def pages(nav: list[Any]) -> Iterator[str]:
    """Files of a nav, whose entries are titles with a file or with a nav of their own."""
    for entry in nav:
        for inner in entry.values():
            yield from [inner] if isinstance(inner, str) else pages(inner)


def test_the_nav_has_every_page_once() -> None:
    nav = yaml.safe_load((REPO / "mkdocs.yml").read_text("utf-8"))["nav"]
    assert sorted(pages(nav)) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


def test_what_pages_take_from_docstrings_is_there_and_documented() -> None:
    found = 0
    for page in DOCS.glob("*.md"):
        for name, options in re.findall(r"^::: (\S+)\n((?:    .*\n)*)", page.read_text("utf-8"), re.MULTILINE):
            members = ((yaml.safe_load(options) or {}).get("options") or {}).get("members", [])
            for path in [f"{name}.{member}" for member in members] or [name]:
                assert documented(path), f"{page.name} takes {path}"
                found += 1
    assert found > 10


def documented(path: str) -> bool:
    """True if a module, or a member of it, has a docstring."""
    module, _, attribute = path.rpartition(".")
    try:
        return bool(import_module(path).__doc__)
    except ModuleNotFoundError:
        return bool(getattr(import_module(module), attribute).__doc__)


def test_links_stay_inside_the_site() -> None:
    outside = [path.name for path in DOCS.glob("*.md") if "](../" in path.read_text("utf-8")]
    assert not outside, "a page of the site can't link to files above docs/; name them as code instead"


@pytest.mark.skipif(not all(map(find_spec, ("zensical", "mkdocstrings"))), reason="zensical or mkdocstrings is missing")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    config = (REPO / "mkdocs.yml").read_text("utf-8")
    assert "docs_dir: docs\nsite_dir: site\n" in config
    shutil.copytree(DOCS, tmp_path / "docs")
    (tmp_path / "mkdocs.yml").write_text(config.replace("paths: [.]", f"paths: ['{REPO}']"), "utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert ttrain.Training.step.__doc__.splitlines()[0] in (tmp_path / "site" / "api" / "index.html").read_text("utf-8")


def test_contributing_names_every_target_of_the_makefile() -> None:
    targets = re.findall(r"^(\w+):", (REPO / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert targets == ["fast", "test", "ci", "docs"]
    assert re.findall(r"^\| `make (\w+)` ", (REPO / "CONTRIBUTING.md").read_text("utf-8"), re.MULTILINE) == targets


def test_the_readme_is_short() -> None:
    assert (REPO / "README.md").read_text("utf-8").count("\n") <= 110
