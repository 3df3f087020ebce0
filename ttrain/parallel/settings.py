"""Small config of training by several processes, and the rank of this process, from the environment.

Torchrun, SLURM or ttrain itself starts them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from typing import Any

from ttrain.core.errors import ConfigError
from ttrain.core.options import option, rule
from ttrain.parallel.ranks import BUCKET_MB, Ranks

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


def gpu_index(here: Place, visible: int) -> int:
    """Return the number of a rank's GPU among the visible ones: its local rank, or 0 where it sees a GPU of its own."""
    return 0 if visible == 1 else here.local_rank


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


TASKS = ("train", "trial", "plan")  # that are of several ranks
SEVERAL, AUTO = ("ddp", "zero1", "zero3"), "auto"  # modes of several ranks, and what lets task=plan choose one
STEPPING = (*TASKS, "lr_finder", "profile")  # that divide a batch into slices


@dataclass
class ParallelConfig:
    """Options of several processes, the ranks, that train one model."""

    name: str = option(
        "none",
        "each rank updates, and keeps the state of, the whole model (ddp) or its shard (zero1); or keeps no more than "
        "its shard of the weights either (zero3); auto lets task=plan choose",
        choices=("none", *SEVERAL, AUTO),
    )  # fmt: skip
    processes: int | None = option(None, "ranks to start here; null takes torchrun's or SLURM's, else one", minimum=1)
    slices: int | None = option(
        None, "parts of a batch, divided among ranks; equal slices keep the bits; null is one a rank", minimum=1
    )
    world: int | None = option(None, "ranks that task=plan plans for; null takes parallel.processes", minimum=1)
    link_gbps: float = option(10.0, "speed of the link between ranks in Gbit/s, for task=plan", above=0)
    bucket_mb: float = option(BUCKET_MB, "MiB of fp32 gradients sent at a time", minimum=0.01)
    prefetch: int = option(1, "blocks ahead whose weights zero3 gathers while a block is computed", minimum=0)
    timeout: float = option(600.0, "seconds before a silent rank counts as lost", above=0)

    def ranks(self, rank: int = 0, count: int = 1) -> Ranks:
        """Return rank number `rank` of `count`, and how these divide batch and state."""
        return Ranks(
            rank, count, self.slices or count, self.name in ("zero1", "zero3"), self.bucket_mb,
            divides=self.name == "zero3", prefetch=self.prefetch,
        )  # fmt: skip

    def rank_count(self, local: bool = False) -> int:
        """Ranks of a run, or with `local` on this machine: planned for, started, or to be started."""
        here = place()
        if here is None or self.world is not None:
            return self.world or self.processes or 1
        return here.local_count if local else here.count

    @rule
    def _processes(self, others: Any) -> Iterator[str]:
        task, here = others.task.name, place()
        for key in ("processes", "world"):
            if self.name == "none" and (count := getattr(self, key) or 1) > 1:
                yield f"parallel.{key}={count}: parallel=none is one process. Give parallel=ddp, zero1 or zero3."
        if self.name == AUTO and task != "plan":
            yield f"parallel=auto: task=plan alone chooses a mode. Give parallel={', '.join(SEVERAL)} or none."
        if self.world is not None and task != "plan":
            yield f"parallel.world={self.world}: is for task=plan. Give parallel.processes, or use torchrun."
        if task != "train":
            if (self.processes or 1) > 1 and task not in TASKS:
                yield f"parallel.processes={self.processes}: task={task} is one process. Leave it out."
            if here is not None and here.count > 1:
                yield f"task={task}: is one process, and {here.count} were started. Start one."
            return
        if here is not None and here.count > 1 and self.name == "none":
            yield f"parallel=none: {here.count} processes run. Start one, or give parallel=ddp, zero1 or zero3."
        if here is not None and self.processes not in (None, here.local_count):
            told = f"parallel.processes={self.processes}: {here.local_count} were started on this machine already"
            yield f"{told}. Leave it out."

    @rule
    def _batch_divides(self, others: Any) -> Iterator[str]:
        train = others.train
        if others.task.name not in STEPPING:
            return
        ranks = 1 if self.name == "none" else self.rank_count()
        given = [key for key in ("world", "processes") if getattr(self, key) is not None]
        of_ranks = f"parallel.{given[0]}" if given else "the number of ranks"
        slices, of_slices = self.slices or ranks, of_ranks if self.slices is None else "parallel.slices"
        for key, count in ((of_ranks, ranks), (of_slices, slices)):
            if count & (count - 1):
                nearest = 1 << count.bit_length() - 1
                yield f"{key}={count}: must be a power of two, such as {nearest} or {2 * nearest}."
                return
        if slices < ranks:
            yield (
                f"parallel.slices={slices}: must be at least the number of ranks, {ranks}. Start {slices} ranks, or "
                f"give parallel.slices={ranks}; a run that is continued with other slices does not keep its bits."
            )
        parts = slices * train.gradient_accumulation
        if slices > 1 and train.batch_size % parts:
            enough = -(-train.batch_size // parts) * parts
            yield (
                f"train.batch_size={train.batch_size}: must be a multiple of {of_slices}={slices} times "
                f"train.gradient_accumulation={train.gradient_accumulation}. Give train.batch_size={enough}."
            )

    @rule
    def _device_takes_ranks(self, others: Any) -> Iterator[str]:
        task, device = others.task.name, others.device.name
        if task not in STEPPING or (self.name == "none" and (self.slices or 1) == 1):
            return
        if device not in ("cpu", "cuda", "auto"):
            one = f"parallel={self.name}", "parallel=none"
            given, instead = one if self.name != "none" else (f"parallel.slices={self.slices}", "parallel.slices=1")
            yield f"{given}: runs on device=cpu or cuda, not on device={device}. Give {instead}."
        elif self.name == "zero3" and others.objective.name == "grpo" and self.rank_count() > 1:
            told = "parallel=zero3: with objective=grpo ranks write completions of their own lengths, and can't gather"
            yield f"{told} weights together meanwhile. Give parallel=zero1."
        elif task == "train" and device != "cpu" and (here := self.rank_count(local=True)) > 1:
            import torch

            gpus = torch.cuda.device_count()
            # SLURM and others start ranks that see a GPU of their own each.
            own = gpus == 1 and place() is not None and "CUDA_VISIBLE_DEVICES" in os.environ
            if gpus < here and not own and (gpus or device == "cuda"):
                told = f"device={device}: {here} ranks on this machine need a GPU each, and it has {gpus}"
                yield f"{told}. Give parallel.processes={max(gpus, 1)}, or device=cpu."
        if others.recover.oom == "shrink" and self.rank_count() > 1:
            yield "recover.oom=shrink: one of several ranks can't shrink its batch alone. Give recover.oom=stop."
