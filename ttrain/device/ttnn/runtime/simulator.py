"""Check that ttnn can open device.simulator before it tries: it fails with a stack of C++.

ttnn takes a library, `*.so`, beside its soc_descriptor.yaml, or the folder of a simulated netlist with a run.sh.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from ttrain.core.errors import ConfigError, DeviceUnavailable
from ttrain.core.folders import at_home
from ttrain.device.ttnn.runtime.identity import require_board
from ttrain.device.ttnn.settings import TenstorrentConfig

DESCRIPTOR = "soc_descriptor.yaml"
_ENTRY = b"libttsim_init"  # that every such library exports
_WANTED = f"Give a simulator's library (libttsim.so), which lies beside its {DESCRIPTOR}"


def checked_simulator(config: TenstorrentConfig) -> Path:
    """The path to hand to ttnn. Raises ConfigError or DeviceUnavailable for what is no simulator of the board named."""
    if config.simulator is None:
        raise ConfigError("device.mode=simulator: needs device.simulator=<path of the simulator library>.")
    # Not resolved: ttnn goes by the ending of the name, and looks for the descriptor beside the link.
    given = Path(os.path.abspath(at_home(config.simulator)))
    problem = _problem(given)
    if problem is not None:
        raise DeviceUnavailable(f"device.simulator={config.simulator}: {problem}.")
    require_board(config, _arch(_descriptor(given)))
    return given


def _descriptor(given: Path) -> Path:
    return (given if given.is_dir() else given.parent) / DESCRIPTOR


def _problem(given: Path) -> str | None:
    """Return the problem of the path and how to mend it; None where ttnn can open it."""
    try:
        if not given.exists():
            return f"there is no such file. {_WANTED}"
        if given.is_dir():
            return _folder_problem(given)
        with open(given, "rb") as file:
            content = file.read()
    except OSError as error:
        return f"can't be read ({error.strerror}). {_WANTED}"
    if given.suffix != ".so" or not content.startswith(b"\x7fELF") or _ENTRY not in content:
        return f"is no library of a simulator. {_WANTED}"
    return _descriptor_problem(given)


def _folder_problem(given: Path) -> str | None:
    if not (given / "run.sh").is_file():
        inside = sorted(given.glob("*ttsim*.so"))
        return f"is a folder. Give {inside[0]}" if inside else f"is a folder that holds no simulator. {_WANTED}"
    return _descriptor_problem(given)


def _descriptor_problem(given: Path) -> str | None:
    path = _descriptor(given)
    try:
        known = _arch(path) != ""
    except OSError as error:
        return f"{path} can't be read ({error.strerror}). Copy the chip's descriptor there"
    return None if known else f"{path} names no arch_name. Copy the chip's descriptor there"


def _arch(descriptor: Path) -> str:
    """The architecture that a descriptor names, such as wormhole_b0; empty where it names none."""
    found = re.search(r"^arch_name:\s*(\w+)", descriptor.read_text("utf-8", "replace"), re.MULTILINE)
    return "" if found is None else found[1].lower()
