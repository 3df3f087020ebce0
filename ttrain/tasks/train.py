"""task=train: train a model, from its first step or from a checkpoint."""

from __future__ import annotations

import gc
from contextlib import ExitStack, closing
from dataclasses import replace

from ttrain.config import build
from ttrain.config.schema import Config
from ttrain.core.errors import OutOfMemory
from ttrain.device.info import info_of
from ttrain.tasks.training.recover import shrunk_config
from ttrain.tasks.training.start import start_run
from ttrain.train.loop.interrupt import StopRequests


def run(config: Config) -> float | None:
    """Trains, prints a sample and a summary, and returns the best val/loss.

    Where memory runs out and recover.oom=shrink, trains on with half the micro-batch and twice the accumulation.
    """
    if info_of(config.device).replicas(config.device) > 1:
        from ttrain.tasks.training.replicas import run as run_replicas

        return run_replicas(config)
    while True:
        try:
            return _run(config)
        except OutOfMemory as error:
            smaller = shrunk_config(config, error)
            if smaller is None:
                raise
        config = smaller
        gc.collect()  # what the failed try still holds


def _run(config: Config) -> float | None:
    from ttrain.tasks.training.attempt import train
    from ttrain.tasks.training.dry_run import dry_run
    from ttrain.train.runs.summary import unit_of

    with ExitStack() as stack:
        world = build.build_world(config.parallel, config.device)
        stack.enter_context(world.together())
        earlier = world.remembered("run") if config.resume == "none" else None
        if earlier is not None:  # torchrun starts the ranks of a new run again: they continue it
            config = replace(config, resume="auto", run=replace(config.run, dir=earlier))
        run = start_run(config, stack, world)
        given = run.config
        device = stack.enter_context(closing(build.build_device(given.device, given.precision, world)))
        console = build.build_console(given.logger)
        console.unit = unit_of(run.dataset.description)
        if device.computes:
            return train(run, device, console, StopRequests(world.ranks.count > 1))
        dry_run(run, device, console.say)
        return None
