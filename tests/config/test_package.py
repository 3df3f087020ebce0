"""The wheel and the reference page."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

from benchmarks.config_page import reference
from ttrain.config.files import packaged

REPO = Path(__file__).parents[2]


def test_the_wheel_carries_conf_and_works_from_any_folder(tmp_path: Path) -> None:
    build = "import sys, hatchling.build as backend; print(backend.build_wheel(sys.argv[1]))"
    made = subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)], cwd=REPO, check=True, capture_output=True, text=True, timeout=170
    )
    wheel = tmp_path / made.stdout.split()[-1]
    unpacked = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    folders = unpacked / "ttrain" / "conf", packaged()
    carried, ours = ({str(path.relative_to(folder)) for path in folder.glob("*/*.yaml")} for folder in folders)
    assert carried == ours and {"model/gpt2.yaml", "recipe/gpt2-124m.yaml"} <= carried
    assert (unpacked / "ttrain" / "py.typed").exists()
    metadata = next(unpacked.glob("*.dist-info/METADATA")).read_text("utf-8")
    assert "License-Expression: Apache-2.0" in metadata
    assert next(unpacked.glob("*.dist-info/licenses/LICENSE")).read_bytes() == (REPO / "LICENSE").read_bytes()
    entry_points = next(unpacked.glob("*.dist-info/entry_points.txt")).read_text()
    assert "ttrain = ttrain.__main__:main" in entry_points
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); from ttrain.cli import main; sys.exit(main())"
    overrides = ["recipe=char-10.7m", "--cfg", "job", "-p", "train.batch_size"]
    done = subprocess.run(
        [sys.executable, "-c", code, str(unpacked), *overrides], cwd=tmp_path, capture_output=True, timeout=170
    )
    assert (done.returncode, done.stdout) == (0, b"64\n"), done.stderr.decode()


def test_code_is_checked_for_the_oldest_python_that_is_allowed() -> None:
    project = (REPO / "pyproject.toml").read_text("utf-8")
    ((major, minor),) = re.findall(r'^requires-python = ">=(\d+)[.](\d+)"$', project, re.MULTILINE)
    assert f'\npython_version = "{major}.{minor}"' in project, "mypy: what the library of that Python lacks"
    assert f'\ntarget-version = "py{major}{minor}"' in project, "ruff: what its syntax lacks"


def test_the_reference_page_is_current() -> None:
    page = (REPO / "docs" / "config.md").read_text("utf-8")
    assert page == reference(), "run: python -m benchmarks.config_page > docs/config.md"
