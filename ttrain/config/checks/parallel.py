"""What several processes on one model ask of the rest."""

from __future__ import annotations

from collections.abc import Iterator

from ttrain.config.checks.check import check
from ttrain.config.components import TaskConfig
from ttrain.device.settings import DeviceConfig
from ttrain.parallel.place import place
from ttrain.parallel.settings import ParallelConfig
from ttrain.train.settings import TrainConfig

TASKS = ("train", "plan")


def rank_count(parallel: ParallelConfig) -> int:
    """Ranks of a run: those that are planned for, that started, or that are to be started."""
    here = place()
    return parallel.world or (parallel.processes or 1 if here is None else here.count)


@check
def _parallel(task: TaskConfig, parallel: ParallelConfig) -> Iterator[str]:
    here = place()
    for key in ("processes", "world", "slices"):
        if parallel.name == "none" and (getattr(parallel, key) or 1) > 1:
            yield f"parallel.{key}={getattr(parallel, key)}: parallel=none is one process. Give parallel=ddp or zero1."
    if task.name != "train":
        return
    if parallel.world is not None:
        yield f"parallel.world={parallel.world}: is for task=plan. Give parallel.processes, or use torchrun."
    if here is not None and here.count > 1 and parallel.name == "none":
        yield f"parallel=none: {here.count} processes were started. Give parallel=ddp or zero1, or start one."
    if here is not None and parallel.processes not in (None, here.local_count):
        yield (
            f"parallel.processes={parallel.processes}: {here.local_count} were started on this machine already. "
            "Leave it out."
        )


@check
def _slices(task: TaskConfig, train: TrainConfig, parallel: ParallelConfig) -> Iterator[str]:
    if parallel.name == "none" or task.name not in TASKS:
        return
    ranks = rank_count(parallel)
    slices, key = parallel.slices or ranks, "ranks" if parallel.slices is None else "parallel.slices"
    for name, count in (("ranks", ranks), ("parallel.slices", slices)):
        if count & (count - 1):
            nearest = 1 << count.bit_length() - 1
            yield f"{name}={count}: must be a power of two, such as {nearest} or {2 * nearest}."
            return
    if slices < ranks:
        yield f"parallel.slices={slices}: must be at least the number of ranks, {ranks}. Give parallel.slices={ranks}."
    parts = slices * train.accumulation
    if train.batch_size % parts:
        yield (
            f"train.batch_size={train.batch_size}: must divide into {key}={slices} times train.accumulation="
            f"{train.accumulation}. Give train.batch_size={-(-train.batch_size // parts) * parts}."
        )


@check
def _parallel_device(
    task: TaskConfig, train: TrainConfig, parallel: ParallelConfig, device: DeviceConfig
) -> Iterator[str]:
    if parallel.name == "none" or task.name not in TASKS:
        return
    if device.name not in ("cpu", "cuda", "auto"):
        yield f"parallel={parallel.name}: runs on device=cpu or cuda, not on device={device.name}. Give parallel=none."
    if train.length_schedule:
        yield f"train.length_schedule={train.length_schedule}: is for parallel=none. Leave it empty, or give that."
