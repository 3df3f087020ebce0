"""Folders of results, the cache folder of ttrain, and a replacement for a home folder that can't be written."""

from __future__ import annotations

import os
import stat
import tempfile
from datetime import datetime
from pathlib import Path

from ttrain.core.errors import ConfigError, UserError, raised_as

# Where libraries write by themselves, unless told otherwise; with XDG_CACHE_HOME it is all of them.
_LIBRARIES = {
    "MPLCONFIGDIR": "matplotlib", "WANDB_CONFIG_DIR": "wandb", "WANDB_DATA_DIR": "wandb", "TRITON_CACHE_DIR": "triton",
}  # fmt: skip


def dated_folder(root: Path, label: str) -> Path:
    """Make `root/<date>/<time>_<label>`, with a number appended where others took that name first. Raises OSError."""
    now = datetime.now()
    day = root / now.strftime("%Y-%m-%d")
    day.mkdir(parents=True, exist_ok=True)
    name = "_".join(filter(None, (now.strftime("%H-%M-%S"), label)))
    path, number = day / name, 1
    while True:
        try:
            path.mkdir()  # fails where it exists: of many processes exactly one gets it
            return path
        except FileExistsError:
            number += 1
            path = day / f"{name}_{number}"


def cache_folder() -> Path:
    """`$TTRAIN_CACHE`, else `$XDG_CACHE_HOME/ttrain`, else `~/.cache/ttrain`. It may not exist yet."""
    given = os.environ.get("TTRAIN_CACHE")
    if given:
        return at_home(given)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ttrain"


def at_home(path: str | Path) -> Path:
    """Return the path with a home folder for a leading `~`. Raises ConfigError for an unknown user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        name = Path(path).parts[0]
        raise ConfigError(f"{path}: {name} is no user's home folder here; write the path in full.") from None


def settle_without_home() -> str | None:
    """Give this process and its children another folder where the home folder is missing or can't be written.

    Return a sentence about it, once: a child finds it settled. Return None where there is nothing to settle.
    """
    home = os.path.expanduser("~") if os.environ.get("HOME", "set") else ""
    missing = not os.path.isdir(home)
    if not (missing or not os.access(home, os.W_OK | os.X_OK)) or os.environ.get("XDG_CACHE_HOME"):
        return None
    try:
        folder = _own_temporary_folder()
    except OSError:
        return None  # whoever needs one says so
    os.environ["XDG_CACHE_HOME"] = str(folder)
    for variable, name in _LIBRARIES.items():
        os.environ.setdefault(variable, str(folder / name))
        (folder / name).mkdir(exist_ok=True)
    if missing:
        os.environ["HOME"] = str(folder)
    if os.environ.get("TTRAIN_CACHE"):
        return None
    state = "is no folder" if missing else "can't be written"
    return (
        f"the home folder {home or '(HOME is empty)'} {state}, so compiled kernels and timings are kept in "
        f"{folder / 'ttrain'}. TTRAIN_CACHE=<folder> keeps them elsewhere."
    )


def _own_temporary_folder() -> Path:
    """A folder that nobody else can write, the same at every start: code is loaded from it."""
    folder = Path(tempfile.gettempdir()) / f"ttrain-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    own = found.st_uid == os.getuid() and not stat.S_IMODE(found.st_mode) & 0o077
    return folder if stat.S_ISDIR(found.st_mode) and own else Path(tempfile.mkdtemp(prefix="ttrain-"))


RESULTS = "results.json"


def claim_results(key: str, wanted: str | None, root: Path, label: str) -> Path:
    """Makes the folder that `key` of the config names, or one below `root`.

    Raises UserError where it can't be made or holds results already.
    """
    with raised_as(UserError, f"{key}={wanted or root}: can't be written", f"Give {key}=<folder>."):
        if wanted is not None:
            folder = Path(wanted)
            folder.mkdir(parents=True, exist_ok=True)
            if (folder / RESULTS).exists():
                raise UserError(f"{key}={wanted}: holds results already. Give another folder, or move them away.")
            (folder / RESULTS).touch()  # shows now whether files can be written
            (folder / RESULTS).unlink()
            return folder
        return dated_folder(root, label)
