"""The environment record of an attempt: what to compare when two runs differ."""

from __future__ import annotations

import platform
import shlex
import subprocess
from collections.abc import Iterable
from datetime import datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import ttrain
from ttrain.core.cores import core_limits
from ttrain.core.files import sha256_json

PACKAGES = ("numpy", "torch", "safetensors", "tokenizers", "hydra-core", "omegaconf", "wandb")
_GIT_SECONDS = 5


def environment_record(
    config: dict[str, Any], device: Any, data: dict[str, Any], tokenizer_hash: str | None, arguments: list[str]
) -> dict[str, Any]:
    """Versions, device, hashes, git state and command line of a run, as JSON values."""
    return {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": command_line(arguments),
        "versions": {"ttrain": ttrain.__version__, "python": platform.python_version(), **package_versions()},
        "platform": platform.platform(),
        "cores": core_limits(),
        "device": device,
        "data": data,
        "config_hash": sha256_json(config),
        "tokenizer_hash": tokenizer_hash,
        "git": own_state(),
    }


def command_line(arguments: Iterable[str]) -> str:
    """The command for a shell that starts ttrain with these arguments."""
    return shlex.join(["python", "-m", "ttrain", *arguments])


@cache
def package_versions() -> dict[str, str]:
    """Version of every package of PACKAGES that is installed, without importing it."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


@cache  # what runs was imported once, whatever becomes of the folder meanwhile
def own_state() -> dict[str, Any] | None:
    """Git state of what runs."""
    return git_state(Path(ttrain.__file__).parent)


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit of the checkout that a folder is in, and whether tracked files differ from it; None outside of one."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ".")
    return {"commit": commit, "changed": bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
