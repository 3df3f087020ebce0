"""Small config of training by several processes."""

from __future__ import annotations

from dataclasses import dataclass

from ttrain.core.options import option
from ttrain.parallel.ranks import BUCKET_MB


@dataclass
class ParallelConfig:
    """How several processes, the ranks, train one model: each on its slices of every batch."""

    name: str = option(
        "none", "none, ddp (each rank updates all of the model) or zero1 (each its shard, of which it keeps the state)",
        choices=("none", "ddp", "zero1"),
    )  # fmt: skip
    processes: int | None = option(
        None, "ranks to start on this machine; null takes those that torchrun or SLURM started, else one", minimum=1
    )
    slices: int | None = option(
        None,
        "parts of every batch, divided among the ranks; a run with fixed slices keeps its bits on any number of ranks; "
        "null takes the number of ranks",
        minimum=1,
    )
    world: int | None = option(None, "ranks that task=plan plans for; null takes parallel.processes", minimum=1)
    link_gbps: float = option(10.0, "speed of the link between ranks that task=plan reckons with, in Gbit/s", above=0)
    bucket_mb: float = option(
        BUCKET_MB,
        "MiB of fp32 gradients that are sent at a time, as soon as backward has them: small buckets start early, of "
        "large ones there are few",
        minimum=0.01,
    )
    timeout: float = option(600.0, "seconds until ranks that wait for another one take it for lost", above=0)
