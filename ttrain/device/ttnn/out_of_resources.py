"""Recognize from ttnn's error what does not fit on a board, and name the config keys that would make it fit."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from ttrain.device.info import Failed, OutOfResources
from ttrain.device.ttnn.runtime.environment import reason
from ttrain.device.ttnn.runtime.identity import board
from ttrain.device.ttnn.settings import TenstorrentConfig

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


@dataclass(frozen=True)
class Run:
    """The device and the failed step, by which keys are chosen."""

    device: TenstorrentConfig
    failed: Failed


def diagnose(error: BaseException, run: Run) -> OutOfResources | None:
    """Return the resource that an error says is short; None for another kind of error."""
    said = reason(error)
    cause = next((cause for pattern, cause in CAUSES if re.search(pattern, said, re.IGNORECASE)), None)
    if cause is None:
        return None
    keys = fixing_keys(cause, said, run)
    where = f"device={run.device.name}, device.mode={run.device.mode}"
    first = said.splitlines()[0].rstrip(".")[:300]
    if run.device.dispatch == "eth" and "compute worker grid" in said:
        # The open board reports the rows that Ethernet dispatch leaves, and ttnn's own ops place programs on them, but
        # its check of newer programs counts those that worker dispatch would leave.
        return OutOfResources(
            f"{where}: dispatch=eth is refused by a fault of ttnn, not for want of cores: it places programs on "
            f"the cores that it leaves, but checks them against those that worker dispatch leaves. ttnn "
            f"says: {first}. Give {', or '.join(keys)}.", "dispatch", keys,
        )  # fmt: skip
    return OutOfResources(
        f"{where}: does not fit: {cause}. ttnn says: {first}. To fit, give {', or '.join(keys)}.", cause, keys
    )


def fixing_keys(cause: str, said: str, run: Run) -> list[str]:
    """Overrides, the one that changes least first."""
    chosen = {"DRAM": _dram, "L1": _l1, "small buffers of L1": _l1, "trace region": _trace, "core grid": _grid}
    return chosen[cause](said, run) if cause in chosen else ["device.mesh=[1,1]"]


def _dram(said: str, run: Run) -> list[str]:
    device, failed = run.device, run.failed
    keys, last = list(failed.smaller[:-1]), list(failed.smaller[-1:])
    if failed.memory and failed.state > failed.memory:  # no smaller batch helps, and no idle region
        keys = [key for key in keys if key.startswith(("precision", "optimizer"))]
        return [*keys, *_smaller_state(run), *last]
    if failed.engine != "traced" and 0 < _lacking(said) <= device.trace_region_mb * 2**20:
        keys.insert(0, f"device.trace_region_mb=0 (nothing is captured, {device.trace_region_mb} MiB lie idle)")
    keys += _smaller_state(run)
    if board(device).chips > 1 and device.mesh == [1, 1] and not device.host_resident and failed.rows % 2 == 0:
        keys.append("device.mesh=[1,2] (half of the batch on each chip)")
    return keys + last


def _lacking(said: str) -> int:
    """Bytes that were asked for beyond what is free; 0 where it is not told."""
    found = re.search(r"allocate (\d+) B DRAM buffer across (\d+) banks.*?free: (\d+) B", said, re.DOTALL)
    return int(found[1]) - int(found[2]) * int(found[3]) if found else 0


def _smaller_state(run: Run) -> list[str]:
    keys = []
    if run.failed.precision in ("fp32", "bf16", "bf8"):
        keys.append("precision=bf16_true (weights and moments in bf16)")
    if not run.device.host_resident and run.failed.vocabulary:
        keys.append(f"{HOST_TABLES} (tables and their state in host memory)")
    return keys


def _l1(said: str, run: Run) -> list[str]:
    device, keys = run.device, []
    if device.l1_small_kb:
        keys.append("device.l1_small_kb=0 (kept from every core)")
    if device.core_grid is not None:
        keys.append("device.core_grid=null (more cores share the work)")
    if device.fused_kernels is not False:
        keys.append("device.fused_kernels=false (smaller kernels)")
    return [*keys, *run.failed.smaller]


def _trace(said: str, run: Run) -> list[str]:
    found = re.search(r"trace buffers of size (\d+)", said)
    needed = math.ceil(int(found[1]) / 2**20) if found else 2 * max(run.device.trace_region_mb, 32)
    return [f"device.trace_region_mb={needed}", "engine=static (captures nothing)"]


def _grid(said: str, run: Run) -> list[str]:
    keys = [] if run.device.core_grid is None else ["device.core_grid=null"]
    return keys + (["device.dispatch=worker"] if run.device.dispatch == "eth" else []) or ["device.dispatch=worker"]
