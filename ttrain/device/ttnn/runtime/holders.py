"""Find the processes that hold a Tenstorrent card."""

from __future__ import annotations

import os
from pathlib import Path

DEVICE_NODES = Path("/dev/tenstorrent")


def holders(nodes: Path = DEVICE_NODES, processes: Path = Path("/proc")) -> dict[int, str]:
    """Process id -> command of every process that has a card open, as far as this user may see."""
    found: dict[int, str] = {}
    for entry in processes.glob("[0-9]*"):
        try:
            links = [os.readlink(link) for link in (entry / "fd").iterdir()]
            if any(link.startswith(f"{nodes}/") for link in links):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
                found[int(entry.name)] = command[:80]
        except OSError:
            continue
    return {pid: command for pid, command in found.items() if pid != os.getpid()}


def holders_text() -> str:
    """A sentence that names them."""
    found = holders()
    if not found:
        return "No other process of this user holds it; it may hang (tt-smi -r resets it)."
    return "It is held by " + ", ".join(f"process {pid} ({command})" for pid, command in found.items()) + "."
