"""Where ttrain keeps what it can make again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`$TTRAIN_CACHE`, else `$XDG_CACHE_HOME/ttrain`, else `~/.cache/ttrain`. It may not exist yet."""
    given = os.environ.get("TTRAIN_CACHE")
    if given:
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ttrain"
