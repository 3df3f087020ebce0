"""Problems of a config, found before anything is opened, and scarce resources, with the keys that help."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from ttrain.core.names import did_you_mean
from ttrain.device.info import Failed, OutOfResources
from ttrain.device.ttnn.planned import belongs
from ttrain.device.ttnn.runtime.environment import reason
from ttrain.device.ttnn.runtime.identity import BOARDS, DRAM, MOST_CORES, board
from ttrain.device.ttnn.settings import TenstorrentConfig


def problems(device: TenstorrentConfig, rows: int) -> Iterator[str]:
    """A sentence each, for micro-batches of `rows` sequences."""
    if device.host_resident and device.mesh != [1, 1]:
        told = f"device.host_resident={device.host_resident}: needs one chip, but device.mesh={device.mesh}"
        yield f"{told}. Give device.mesh=[1,1], or device.host_resident=[]."
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
        told = f"device.trace_region_mb={device.trace_region_mb}: is more than device={device.name} has in all"
        yield f"{told}. Give a smaller one; tens of MiB hold a step."


def _divided(device: TenstorrentConfig) -> Iterator[str]:
    """Yield problems with settings that do not go with a chip that replicas share."""
    count = device.subdevices
    checks = {
        f"needs a queue for each. Give device.command_queues={count} as well": device.command_queues != count,
        "one chip is divided. Give device.mesh=[1,1]": device.mesh != [1, 1],
        "each replica has its part of the cores. Give device.core_grid=null": device.core_grid is not None,
        "the host would make one replica wait for another. Give device.host_resident=[]": bool(device.host_resident),
    }
    yield from (f"device.subdevices={count}: {text}." for text, wrong in checks.items() if wrong)


def parameter_problems(device: TenstorrentConfig, paths: Sequence[str], tied: bool) -> list[str]:
    """Parts that the device can't compute, or names of host_resident that lead to no parameter."""
    names, known = device.host_resident, {path.partition(".")[0] for path in paths}
    if device.subdevices > 1 and any(path.endswith(".router.weight") for path in paths):
        told = f"model.experts: device.subdevices={device.subdevices}: ttnn sorts on the whole chip only"
        return [f"{told}. Give device.subdevices=1."]
    unknown = [name for name in names if not any(belongs(path, name) for path in paths)]
    if tied and len(unknown) < len(names):  # the head is the embedding, which is among the others
        unknown = [name for name in unknown if name != "head"]
    return [f"device.host_resident: {name!r} is no part of the model. {did_you_mean(name, known)}" for name in unknown]


# What ttnn says -> what is short. The first that matches counts.
CAUSES = (
    (r"trace buffers of size|allocated for trace region|TRACE buffer", "trace region"),
    (r"L1_SMALL|Reserved size must be less than bank size", "small buffers of L1"),
    (r"DRAM buffer|DRAM banks", "DRAM"),
    (r"allocator's L1 span|max L1 size|clash with L1|L1 buffer|dataflow buffers|circular buffers", "L1"),
    (r"out of bounds\. The compute worker grid|core grid|compute_with_storage_grid|grid size", "core grid"),
    (r"requires \d+ devices|Requested mesh shape|cluster_axis|uninitialized fabric", "chips"),
)


HOST_TABLES = "device.host_resident=[embedding,head]"


def smaller_keys(device: TenstorrentConfig, vocabulary: bool) -> list[str]:
    """Return keys of the device itself that make a run take less of its memory."""
    return [HOST_TABLES] if vocabulary and device.mesh == [1, 1] and not device.host_resident else []


def diagnose(device: TenstorrentConfig, error: BaseException, failed: Failed) -> OutOfResources | None:
    """Return the resource that an error says is short; None for another kind of error."""
    said = reason(error)
    cause = next((cause for pattern, cause in CAUSES if re.search(pattern, said, re.IGNORECASE)), None)
    if cause is None:
        return None
    found = re.search(r"trace buffers of size (\d+)", said)
    needed = math.ceil(int(found[1]) / 2**20) if found else 2 * max(device.trace_region_mb, 32)
    smaller = {
        "device.l1_small_kb=0 (kept from every core)": device.l1_small_kb > 0,
        "device.core_grid=null (more cores share the work)": device.core_grid is not None,
        "device.fused_kernels=false (smaller kernels)": device.fused_kernels is not False,
    }
    core = [*(key for key, helps in smaller.items() if helps), *failed.smaller]
    grid = ["device.core_grid=null"] if device.core_grid is not None else []
    keys = {  # overrides, the one that changes least first
        "DRAM": _dram(said, device, failed),
        "L1": core,
        "small buffers of L1": core,
        "trace region": [f"device.trace_region_mb={needed}", "engine=static (captures nothing)"],
        "core grid": [*grid, "device.dispatch=worker"] if device.dispatch == "eth" or not grid else grid,
        "chips": ["device.mesh=[1,1]"],
    }[cause]
    first = said.splitlines()[0].rstrip(".")[:300]
    if device.dispatch == "eth" and "compute worker grid" in said:
        # ttnn places programs on the cores that Ethernet dispatch leaves, but checks newer ones against those that
        # worker dispatch would leave.
        problem, cause = "dispatch=eth is refused by a fault of ttnn, not for want of cores", "dispatch"
    else:
        problem = f"does not fit: {cause}"
    where = f"device={device.name}, device.mode={device.mode}"
    return OutOfResources(f"{where}: {problem}. ttnn says: {first}. Give {', or '.join(keys)}.", cause, keys)


def _dram(said: str, device: TenstorrentConfig, failed: Failed) -> list[str]:
    smaller, last = failed.smaller[:-1], failed.smaller[-1:]
    state = []
    if failed.precision in ("fp32", "bf16", "bf8"):
        state.append("precision=bf16_true (weights and moments in bf16)")
    if not device.host_resident and failed.vocabulary:
        state.append(f"{HOST_TABLES} (tables and their state in host memory)")
    if failed.memory and failed.state > failed.memory:  # no smaller batch helps, and no idle region
        return [*(key for key in smaller if key.startswith(("precision", "optimizer"))), *state, *last]
    asked = re.search(r"allocate (\d+) B DRAM buffer across (\d+) banks.*?free: (\d+) B", said, re.DOTALL)
    lacking = int(asked[1]) - int(asked[2]) * int(asked[3]) if asked else 0
    idle, meshes = [], []
    if failed.engine != "traced" and 0 < lacking <= device.trace_region_mb * 2**20:
        idle.append(f"device.trace_region_mb=0 (nothing is captured, {device.trace_region_mb} MiB lie idle)")
    if board(device).chips > 1 and device.mesh == [1, 1] and not device.host_resident and failed.rows % 2 == 0:
        meshes.append("device.mesh=[1,2] (half of the batch on each chip)")
    return [*idle, *smaller, *state, *meshes, *last]
