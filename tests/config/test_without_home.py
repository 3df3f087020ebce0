"""A machine that gives the user no home: libraries stay quiet, and what is kept goes to a folder that is told."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from ttrain.cli import main
from ttrain.core.errors import EXIT_USER, ConfigError
from ttrain.core.folders import cache_folder, settle_without_home
from ttrain.device.torch.native.toolchain import Toolchain

REPO = Path(__file__).parents[2]
MOVED = (
    "HOME", "XDG_CACHE_HOME", "TTRAIN_CACHE", "MPLCONFIGDIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR", "TRITON_CACHE_DIR",
)  # fmt: skip


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An environment without any of the folders, which is as before afterwards; the folder of temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with mock.patch.dict(os.environ):
        for name in MOVED:
            os.environ.pop(name, None)
        yield tmp_path / f"ttrain-{os.getuid()}"


@pytest.mark.parametrize("home", ["/dev/null", "/nonexistent", ""])
def test_no_home_is_settled_and_told_once(temporary: Path, home: str) -> None:
    os.environ["HOME"] = home
    told = settle_without_home()
    assert told is not None and str(temporary / "ttrain") in told and "TTRAIN_CACHE=<folder>" in told
    assert cache_folder() == temporary / "ttrain"
    assert os.environ["HOME"] == str(temporary)
    assert temporary.stat().st_mode & 0o777 == 0o700
    assert Path(os.environ["MPLCONFIGDIR"]).parent == temporary
    assert settle_without_home() is None
    assert not Path("/nonexistent").exists()


def test_a_home_that_can_only_be_read_stays_the_home(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.environ["HOME"] = str(temporary.parent)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    told = settle_without_home()
    assert told is not None and f"{temporary.parent} can't be written" in told
    assert os.environ["HOME"] == str(temporary.parent)
    assert cache_folder() == temporary / "ttrain"


def test_nothing_is_settled_where_there_is_a_home_or_folders_are_given(temporary: Path, tmp_path: Path) -> None:
    os.environ["HOME"] = str(tmp_path)
    assert settle_without_home() is None
    assert cache_folder() == tmp_path / ".cache" / "ttrain"
    os.environ["XDG_CACHE_HOME"] = str(tmp_path / "xdg")
    assert cache_folder() == tmp_path / "xdg" / "ttrain" == Toolchain().folder.parent
    del os.environ["XDG_CACHE_HOME"]
    assert not temporary.exists()
    os.environ |= {"HOME": "/dev/null", "TTRAIN_CACHE": "/somewhere", "MPLCONFIGDIR": "/else"}
    assert settle_without_home() is None
    assert (cache_folder(), os.environ["MPLCONFIGDIR"]) == (Path("/somewhere"), "/else")


def test_a_folder_that_others_can_write_is_not_taken(temporary: Path) -> None:
    temporary.mkdir()
    temporary.chmod(0o777)
    os.environ["HOME"] = "/dev/null"
    settle_without_home()
    taken = cache_folder().parent
    assert taken != temporary
    assert taken.stat().st_mode & 0o777 == 0o700


def test_a_command_without_a_home_says_one_line_of_ours(tmp_path: Path) -> None:
    overrides = ["task=plan", "model=mlp", "model.width=8", "plan.picture=p.png", "plan.time=false", "device=null"]
    kept = {name: value for name, value in os.environ.items() if name not in MOVED}
    environment = {**kept, "HOME": "/dev/null", "TMPDIR": str(tmp_path), "PYTHONPATH": str(REPO)}
    command = [sys.executable, "-m", "ttrain", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=170)
    assert done.returncode == 0
    assert (tmp_path / "p.png").exists()
    # A slow machine says first what it imports.
    (line,) = (each for each in done.stderr.splitlines() if not each.startswith("Importing "))
    assert line.startswith("ttrain: the home folder /dev/null is no folder, so compiled kernels and timings are kept ")


@pytest.mark.parametrize("given", ["data=text data.path={}", "run.dir={}", "--config-dir={}", "--config-name={}"])
def test_the_home_of_a_user_whom_nobody_knows(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["task=plan", *given.format("~nobody-knows/x").split()]) == EXIT_USER
    assert "~nobody-knows is no user's home folder here; write the path in full." in capsys.readouterr().err


def test_a_cache_in_the_home_of_a_user_whom_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTRAIN_CACHE", "~nobody-knows/x")
    with pytest.raises(ConfigError, match="~nobody-knows is no user's home folder"):
        cache_folder()
