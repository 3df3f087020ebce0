"""What several processes on one model ask of the rest."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ttrain.config.checks.check import check
from ttrain.config.checks.device import supervised
from ttrain.config.components import TaskConfig
from ttrain.config.schema import Source
from ttrain.device.settings import DeviceConfig
from ttrain.parallel.place import place, rank_here
from ttrain.parallel.settings import ParallelConfig
from ttrain.train.settings import RecoverConfig, SuperviseConfig, TrainConfig
from ttrain.train.supervise.heartbeat import VARIABLE

TASKS = ("train", "plan")  # that are of several ranks
STEPPING = (*TASKS, "lr", "profile")  # that divide a batch into slices


def rank_count(parallel: ParallelConfig, local: bool = False) -> int:
    """Ranks of a run, or with `local` on this machine: planned for, started, or to be started."""
    here = place()
    if here is None or parallel.world is not None:
        return parallel.world or parallel.processes or 1
    return here.local_count if local else here.count


@check
def _parallel(task: TaskConfig, parallel: ParallelConfig) -> Iterator[str]:
    here = place()
    for key in ("processes", "world"):
        if parallel.name == "none" and (getattr(parallel, key) or 1) > 1:
            yield f"parallel.{key}={getattr(parallel, key)}: parallel=none is one process. Give parallel=ddp or zero1."
    if parallel.world is not None and task.name != "plan":
        yield f"parallel.world={parallel.world}: is for task=plan. Give parallel.processes, or use torchrun."
    if task.name != "train":
        if (parallel.processes or 1) > 1 and task.name not in TASKS:
            yield f"parallel.processes={parallel.processes}: task={task.name} is one process. Leave it out."
        if here is not None and here.count > 1:
            yield f"task={task.name}: is one process, and {here.count} were started. Start one."
        return
    if here is not None and here.count > 1 and parallel.name == "none":
        yield f"parallel=none: {here.count} processes were started. Give parallel=ddp or zero1, or start one."
    if here is not None and parallel.processes not in (None, here.local_count):
        yield (
            f"parallel.processes={parallel.processes}: {here.local_count} were started on this machine already. "
            "Leave it out."
        )


@check
def _restarts(task: TaskConfig, supervise: SuperviseConfig, source: Source) -> Iterator[str]:
    """Ranks that ttrain started are watched by the process that did so."""
    if (
        task.name == "train"
        and supervised(supervise, source)
        and rank_here() is not None
        and VARIABLE not in os.environ
    ):
        yield (
            "supervise.enabled=true: one of several ranks can't start the others again. Leave it out, and let "
            "torchrun do so with --max-restarts=3."
        )


@check
def _slices(task: TaskConfig, train: TrainConfig, parallel: ParallelConfig) -> Iterator[str]:
    if task.name not in STEPPING:
        return
    ranks = 1 if parallel.name == "none" else rank_count(parallel)
    given = [key for key in ("world", "processes") if getattr(parallel, key) is not None]
    of_ranks = f"parallel.{given[0]}" if given else "the number of ranks"
    slices, of_slices = parallel.slices or ranks, of_ranks if parallel.slices is None else "parallel.slices"
    for key, count in ((of_ranks, ranks), (of_slices, slices)):
        if count & (count - 1):
            nearest = 1 << count.bit_length() - 1
            yield f"{key}={count}: must be a power of two, such as {nearest} or {2 * nearest}."
            return
    if slices < ranks:
        yield (
            f"parallel.slices={slices}: must be at least the number of ranks, {ranks}. Start {slices} ranks, or give "
            f"parallel.slices={ranks}; a run that is continued with other slices does not keep its bits."
        )
    parts = slices * train.accumulation
    if slices > 1 and train.batch_size % parts:
        yield (
            f"train.batch_size={train.batch_size}: must divide into {of_slices}={slices} times train.accumulation="
            f"{train.accumulation}. Give train.batch_size={-(-train.batch_size // parts) * parts}."
        )


@check
def _parallel_device(
    task: TaskConfig, parallel: ParallelConfig, device: DeviceConfig, recover: RecoverConfig
) -> Iterator[str]:
    if task.name not in STEPPING or (parallel.name == "none" and (parallel.slices or 1) == 1):
        return
    if device.name not in ("cpu", "cuda", "auto"):
        one = f"parallel={parallel.name}", "parallel=none"
        given, instead = one if parallel.name != "none" else (f"parallel.slices={parallel.slices}", "parallel.slices=1")
        yield f"{given}: runs on device=cpu or cuda, not on device={device.name}. Give {instead}."
    elif task.name == "train" and device.name != "cpu" and (here := rank_count(parallel, local=True)) > 1:
        import torch

        gpus = torch.cuda.device_count()
        if gpus < here and (gpus or device.name == "cuda"):
            yield (
                f"device={device.name}: {here} ranks on this machine need a GPU each, and it has {gpus}. Give "
                f"parallel.processes={max(gpus, 1)}, or device=cpu."
            )
    if recover.oom == "shrink" and rank_count(parallel) > 1:
        yield "recover.oom=shrink: one of several ranks can't shrink its batch alone. Give recover.oom=stop."
