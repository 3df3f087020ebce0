"""Check that the opened board is the one that a config names: its chips, or a simulator of them.

A simulator is checked before ttnn tries to open it: it fails with a stack of C++. ttnn takes a library, `*.so`, beside
its soc_descriptor.yaml, or the folder of a simulated netlist with a run.sh.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttrain.core.errors import DeviceUnavailable
from ttrain.core.folders import at_home
from ttrain.device.ttnn.settings import TenstorrentConfig


@dataclass(frozen=True)
class Board:
    """Chips of a board. `clusters` are the names under which ttnn knows machines that have one."""

    arch: str
    chips: int
    clusters: tuple[str, ...]


BOARDS = {
    "n150": Board("wormhole_b0", 1, ("N150",)),
    "n300": Board("wormhole_b0", 2, ("N300", "N300_2x2", "T3K")),
    "t3000": Board("wormhole_b0", 8, ("T3K",)),
    "p150": Board("blackhole", 1, ("P150", "P150_X2", "P150_X4", "P150_X8")),
}
# Bytes of DRAM of a chip (banks times bytes a bank, as ttnn reports them), and [rows, columns] of a die with all cores.
DRAM = {"wormhole_b0": 12 * 1072693184, "blackhole": 8 * 4277141376}
MOST_CORES = {"wormhole_b0": (10, 8), "blackhole": (10, 14)}
MANY = 1 << 16  # chips, where their number is not known
_UNNAMED = ("CUSTOM", "INVALID", "SIMULATOR")  # machines that ttnn knows no name of


def board(config: TenstorrentConfig) -> Board:
    """Return the board of a config; what `tt` finds is taken for an N150 until it is open."""
    return BOARDS.get(config.name, BOARDS["n150"])


def memory(config: TenstorrentConfig) -> tuple[int, str]:
    """Return the bytes of a chip's memory, and where the number is from."""
    return DRAM[board(config).arch], "the board's DRAM"


def arch_of(handle: Any) -> str:
    """The architecture of an open mesh, such as wormhole_b0."""
    return str(handle.arch()).rpartition(".")[2].lower()


def check_board(tt: Any, handle: Any, config: TenstorrentConfig) -> None:
    """Check the chips of an open mesh."""
    if config.name in BOARDS:
        cluster = str(tt.cluster.get_cluster_type()).rpartition(".")[2]
        require_board(config, arch_of(handle), int(tt.get_num_devices()), cluster)


def require_board(config: TenstorrentConfig, arch: str, chips: int = MANY, cluster: str = "CUSTOM") -> None:
    """Raise DeviceUnavailable where chips are no part of the board that is named, as far as known; `tt` takes any."""

    def fits(board: Board) -> bool:
        named = cluster in board.clusters or cluster.startswith(_UNNAMED)
        return arch == board.arch and named and chips >= board.chips

    wanted = BOARDS.get(config.name)
    if wanted is None or fits(wanted):
        return
    what = "the simulator" if config.mode == "simulator" else "this machine"
    known = arch if chips == MANY else f"{chips} {arch} ({cluster})"
    advice = " or ".join(f"device={name}" for name in [*(name for name in BOARDS if fits(BOARDS[name])), "tt"])
    told = f"device={config.name}: has {wanted.chips} {wanted.arch} chip(s), but {what} has {known}"
    raise DeviceUnavailable(f"{told}. Give {advice}; tt takes what is there.")


DESCRIPTOR = "soc_descriptor.yaml"
_ENTRY = b"libttsim_init"  # that every such library exports


def checked_simulator(config: TenstorrentConfig) -> Path:
    """The path to hand to ttnn. Raises DeviceUnavailable for what is no simulator of the board named."""
    # Not resolved: ttnn goes by the ending of the name, and looks for the descriptor beside the link.
    given = Path(os.path.abspath(at_home(config.simulator or "")))
    folder, problem = given if given.is_dir() else given.parent, "is no simulator"
    found: re.Match[str] | None = None
    try:
        content = b"" if given.is_dir() else given.read_bytes()
        library = given.suffix == ".so" and content.startswith(b"\x7fELF") and _ENTRY in content
        if library or (given / "run.sh").is_file():
            descriptor, problem = folder / DESCRIPTOR, f"its {DESCRIPTOR} names no arch_name"
            found = re.search(r"^arch_name:\s*(\w+)", descriptor.read_text("utf-8", "replace"), re.MULTILINE)
    except OSError as error:
        problem = f"{error.filename} can't be read ({error.strerror})"
    if found is None:
        raise DeviceUnavailable(
            f"device.simulator={config.simulator}: {problem}. Give a simulator's library (libttsim.so), which lies "
            f"beside the chip's {DESCRIPTOR}."
        )
    require_board(config, found[1].lower())
    return given
