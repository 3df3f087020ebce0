"""The place of this process among those that torchrun, SLURM or ttrain itself started, by the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass

from ttrain.core.errors import ConfigError

_PORTS = (20_000, 30_000)  # of which a SLURM job takes one by its number


@dataclass(frozen=True)
class Place:
    """One process of `count`, the `local_rank`th of `local_count` on its machine; rank 0 listens at the address."""

    rank: int
    count: int
    local_rank: int
    local_count: int
    address: str
    port: int


@contextmanager
def rank_zero_only() -> Iterator[None]:
    """Silence all ranks but the leading one; how they end is told outside of this."""
    if not rank_here():
        yield
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def rank_here() -> int | None:
    """The number of this process among several; None where it stands alone."""
    with suppress(ConfigError, ValueError):
        here = place()
        return here.rank if here is not None and here.count > 1 else None
    return None


def place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """Return the process's place; None where it stands alone. Raises ConfigError for an incomplete environment."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return _of_torchrun(environment)
    if int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1 and "SLURM_PROCID" in environment:
        return _of_slurm(environment)
    return None


def _of_torchrun(environment: Mapping[str, str]) -> Place:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if missing:
        raise ConfigError(f"RANK is set but not {' and '.join(missing)}. Start ttrain with torchrun, or unset RANK.")
    rank, count = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    local = int(environment.get("LOCAL_RANK", "0")), int(environment.get("LOCAL_WORLD_SIZE", "1"))
    return Place(rank, count, *local, environment["MASTER_ADDR"], int(environment["MASTER_PORT"]))


def _of_slurm(environment: Mapping[str, str]) -> Place:
    rank, count = int(environment["SLURM_PROCID"]), int(environment["SLURM_STEP_NUM_TASKS"])
    local = int(environment.get("SLURM_LOCALID", "0"))
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", "1")  # such as 2(x3),1
    first, last = _PORTS
    port = first + int(environment.get("SLURM_JOB_ID", "0")) % (last - first)
    address = environment.get("MASTER_ADDR") or first_host(environment.get("SLURM_STEP_NODELIST", "127.0.0.1"))
    local_count = int(re.split(r"[(,]", tasks)[0])
    return Place(rank, count, local, local_count, address, int(environment.get("MASTER_PORT", port)))


def first_host(names: str) -> str:
    """The first of SLURM's list of hosts, such as node[03-05,9],other."""
    found = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", names)
    return "".join(part or "" for part in found.groups()) if found else names
