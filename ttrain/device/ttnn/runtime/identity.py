"""Check that the chips that were opened are those of the board that a config names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ttrain.core.errors import DeviceUnavailable
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
_UNNAMED = ("CUSTOM", "INVALID", "SIMULATOR")  # machines that ttnn knows no name of


def board(config: TenstorrentConfig) -> Board:
    """Return the board of a config; what `tt` finds is taken for an N150 until it is open."""
    return BOARDS.get(config.name, BOARDS["n150"])


def arch_of(handle: Any) -> str:
    """The architecture of an open mesh, such as wormhole_b0."""
    return str(handle.arch()).rpartition(".")[2].lower()


def check_board(tt: Any, handle: Any, config: TenstorrentConfig) -> None:
    """Raises DeviceUnavailable where the chips are no part of the board that is named; `tt` takes any."""
    if config.name not in BOARDS:
        return
    cluster = str(tt.cluster.get_cluster_type()).rpartition(".")[2]
    require_board(config, arch_of(handle), int(tt.get_num_devices()), cluster)


def require_board(config: TenstorrentConfig, arch: str, chips: int | None = None, cluster: str | None = None) -> None:
    """Check facts instead: chips and cluster, None where they are not known."""
    board = BOARDS.get(config.name)
    if board is None:
        return
    named = cluster is None or cluster in board.clusters or cluster.startswith(_UNNAMED)
    if arch == board.arch and named and (chips is None or chips >= board.chips):
        return
    fitting = [name for name, each in BOARDS.items() if each.arch == arch and (chips is None or each.chips <= chips)]
    fitting = [name for name in fitting if cluster is None or cluster in BOARDS[name].clusters] or fitting
    what = "the simulator" if config.mode == "simulator" else "this machine"
    count = "" if chips is None else f"{chips} "
    known = f" ({cluster})" if cluster else ""
    advice = " or ".join(f"device={name}" for name in [*fitting, "tt"])
    raise DeviceUnavailable(
        f"device={config.name}: has {board.chips} {board.arch} chip(s), but {what} has {count}{arch}{known}. Give "
        f"{advice}; tt takes what is there."
    )
