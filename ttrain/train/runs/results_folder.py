"""New folders below outputs/ for the results of a benchmark, an evaluation or a search of a learning rate."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from ttrain.core.errors import UserError
from ttrain.core.folders import dated_folder

RESULTS = "results.json"


def claim(key: str, wanted: str | None, root: Path, label: str, now: datetime) -> Path:
    """Makes the folder that `key` of the config names, or one below `root`.

    Raises UserError where it can't be made or holds results already.
    """
    try:
        if wanted is not None:
            folder = Path(wanted)
            folder.mkdir(parents=True, exist_ok=True)
            if (folder / RESULTS).exists():
                raise UserError(f"{key}={wanted}: holds results already. Give another folder, or move them away.")
            (folder / RESULTS).touch()  # shows now whether files can be written
            (folder / RESULTS).unlink()
            return folder
        return dated_folder(root, label, now)
    except OSError as error:
        raise UserError(f"{key}={wanted or root}: can't be written ({error.strerror}). Give {key}=<folder>.") from error
