"""A file by which a supervised process tells its supervisor of its run and its end.

The time of the file tells that the process lives.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path
from typing import Any

from ttrain.core.files import read_json, replace_file, to_json

VARIABLE = "TTRAIN_HEARTBEAT"  # path of the file; set where a supervisor watches


class Heartbeat:
    """Does nothing in a process that nobody watches."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._told: dict[str, Any] = {}

    @classmethod
    def of_process(cls) -> Heartbeat:
        """Make the heartbeat that the environment asks for. SIGUSR2 then prints where every thread is."""
        path = os.environ.get(VARIABLE)
        if path and hasattr(signal, "SIGUSR2"):
            faulthandler.register(signal.SIGUSR2, all_threads=True)
        return cls(Path(path) if path else None)

    def beat(self) -> None:
        """Show that the process is alive; cheap enough for every step."""
        if self._path is not None:
            try:
                os.utime(self._path)
            except OSError:  # the supervisor is gone, and its file with it
                self._path = None

    def tell(self, **facts: Any) -> None:
        """Add JSON values to what the supervisor knows."""
        if self._path is not None:
            self._told = {**read_json(self._path), **self._told, **facts}  # other ranks tell as well
            try:
                replace_file(self._path, to_json(self._told))
            except OSError:
                self._path = None
