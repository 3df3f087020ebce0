"""Problems of the config of a Tenstorrent device, told before anything is opened."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ttrain.core.names import did_you_mean
from ttrain.device.ttnn.offload import belongs
from ttrain.device.ttnn.runtime.identity import BOARDS, DRAM, MOST_CORES, board
from ttrain.device.ttnn.settings import TenstorrentConfig


def problems(device: TenstorrentConfig, rows: int) -> Iterator[str]:
    """A sentence each, for micro-batches of `rows` sequences."""
    if device.host_resident and device.mesh != [1, 1]:
        yield (
            f"device.host_resident={device.host_resident}: needs one chip, but device.mesh={device.mesh}. Give "
            "device.mesh=[1,1], or device.host_resident=[]."
        )
    for key in ("mesh", "core_grid"):
        size = getattr(device, key)
        if size is not None and (len(size) != 2 or min(size) < 1):
            yield f"device.{key}={size}: must be [rows, columns], both 1 or more."
            return
    yield from _chip(device)
    if device.profile is not None and device.mode == "mock":
        yield f"device.profile={device.profile}: a mocked board runs no program. Use silicon or simulator, or null."
    if device.mode == "simulator" and device.simulator is None:
        yield "device.mode=simulator: needs device.simulator=<path of the simulator library>."
    chips = device.mesh[0] * device.mesh[1]
    if device.name in BOARDS and chips > board(device).chips:
        yield f"device.mesh={device.mesh}: {chips} chips, but device={device.name} has {board(device).chips}."
    if rows % chips:
        yield f"device.mesh={device.mesh}: {chips} chips must divide the {rows} sequences of a micro-batch."
    if device.subdevices > 1:
        yield from _divided(device)


def _chip(device: TenstorrentConfig) -> Iterator[str]:
    """Yield problems with settings that no chip of the board has."""
    arch = board(device).arch
    most = MOST_CORES[arch]
    if device.core_grid is not None and (device.core_grid[0] > most[0] or device.core_grid[1] > most[1]):
        yield (
            f"device.core_grid={device.core_grid}: a chip of device={device.name} has at most {most[0]} rows and "
            f"{most[1]} columns of cores. Give at most that, or null for all."
        )
    if device.trace_region_mb * 2**20 >= DRAM[arch]:
        yield (
            f"device.trace_region_mb={device.trace_region_mb}: is more than device={device.name} has in all. Give a "
            "smaller one; tens of MiB hold a step."
        )


def _divided(device: TenstorrentConfig) -> Iterator[str]:
    """Yield problems with settings that do not go with a chip that replicas share."""
    count = device.subdevices
    if device.command_queues != count:
        yield f"device.subdevices={count}: needs a queue for each. Give device.command_queues={count} as well."
    others = {
        "mesh": (device.mesh != [1, 1], "[1,1]", "one chip is divided"),
        "core_grid": (device.core_grid is not None, "null", "each replica has its part of the cores"),
        "host_resident": (bool(device.host_resident), "[]", "the host would make one replica wait for another"),
    }
    for key, (wrong, instead, why) in others.items():
        if wrong:
            yield f"device.subdevices={count}: {why}. Give device.{key}={instead}."


def parameter_problems(device: TenstorrentConfig, paths: Sequence[str], tied: bool) -> list[str]:
    """Names of host_resident that lead to no parameter."""
    names, known = device.host_resident, {path.partition(".")[0] for path in paths}
    unknown = [name for name in names if not any(belongs(path, name) for path in paths)]
    if tied and len(unknown) < len(names):  # the head is the embedding, which is among the others
        unknown = [name for name in unknown if name != "head"]
    return [f"device.host_resident: {name!r} is no part of the model. {did_you_mean(name, known)}" for name in unknown]
