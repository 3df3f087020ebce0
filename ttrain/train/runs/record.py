"""The environment record of an attempt, to compare when two runs differ."""

from __future__ import annotations

import platform
import re
import shlex
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString

import ttrain
from ttrain.core.cores import core_limits
from ttrain.core.files import sha256_json

PACKAGES = ("numpy", "torch", "safetensors", "tokenizers", "hydra-core", "omegaconf", "wandb")
START = "python -m ttrain"  # what a command begins with
_GIT_SECONDS = 5
_PLAIN = re.compile(r"(?!(null|true|false)$)[^\s,'\"\\$=(){}\[\]]([^,'\"\\$=(){}\[\]]*[^\s,'\"\\$=(){}\[\]])?")


def environment_record(
    config: dict[str, Any], device: Any, data: dict[str, Any], tokenizer_hash: str | None, command: str
) -> dict[str, Any]:
    """Versions, device, hashes, git state and command of a run, as JSON values."""
    return {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": command,
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
    """Return the command for a shell that starts ttrain with these arguments."""
    return " ".join([START, *map(shlex.quote, arguments)])


def continue_command(start: str, run: Path) -> str:
    """Return the command that continues a run; `start` is its beginning."""
    return f"{start} resume=auto {shlex.quote(override('run.dir', run))}"


def override(key: str, value: object) -> str:
    """Return `key=value`, quoted where the command line would read text as a list, a sweep or null."""
    text = str(value)
    if isinstance(value, str | Path) and not _PLAIN.fullmatch(text):
        text = as_text(text)
    return f"{key}={text}"


def as_text(text: str) -> str:
    """Quote text for an override; `${...}` in it is no interpolation."""
    return QuotedString(text.replace("${", r"\${"), Quote.double).with_quotes()


@cache
def package_versions() -> dict[str, str]:
    """Version of every package of PACKAGES that is installed, without importing it."""
    versions = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


@cache  # what runs was imported once, whatever becomes of the folder meanwhile
def own_state() -> dict[str, Any] | None:
    """Git state of what runs."""
    return git_state(Path(ttrain.__file__).parent)


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit of the checkout that a folder is in, and whether tracked files differ from it; None outside of one."""
    settings: Any = {"capture_output": True, "text": True, "timeout": _GIT_SECONDS, "check": True}
    with suppress(OSError, subprocess.SubprocessError):
        commit, changes = (
            subprocess.run(["git", "-C", str(folder), *words.split()], **settings).stdout.strip()
            for words in ("rev-parse HEAD", "status --porcelain --untracked-files=no -- .")
        )
        return {"commit": commit, "changed": bool(changes)}
    return None
