"""task=train: train a model, from its first step or from a checkpoint."""

from __future__ import annotations

import gc
from contextlib import ExitStack, closing
from dataclasses import replace

from ttrain.config import build
from ttrain.config.schema import Config
from ttrain.core.errors import OutOfMemory
from ttrain.device.info import info_of
from ttrain.tasks.training.attempt import train
from ttrain.tasks.training.dry_run import dry_run
from ttrain.tasks.training.expected import changed
from ttrain.tasks.training.replicas import run as run_replicas
from ttrain.tasks.training.start import start_run
from ttrain.train.forecast.limits import shrunk
from ttrain.train.logging.metrics import Events
from ttrain.train.loop.interrupt import StopRequests
from ttrain.train.runs.summary import unit_of


def run(config: Config) -> float | None:
    """Trains, prints a sample and a summary, and returns the best val/loss.

    Where memory runs out and recover.oom=shrink, trains on with half the micro-batch and twice the accumulation.
    """
    if info_of(config.device).replicas(config.device) > 1:
        return run_replicas(config)
    while True:
        try:
            return _run(config)
        except OutOfMemory as error:
            config = _shrunk(config, error)
        gc.collect()  # what the failed try still holds


def _run(config: Config) -> float | None:
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


def _shrunk(config: Config, error: OutOfMemory) -> Config:
    """Return the config that continues the run with less memory. Raises the error where the run has to stop."""
    before = error.train
    train = None if config.recover.oom != "shrink" or before is None else shrunk(before)
    if train is None or before is None or error.run is None:
        raise error
    parts = train.gradient_accumulation
    note = (
        f"{error} Going on with train.gradient_accumulation={parts} instead of {before.gradient_accumulation}: "
        f"micro-batches of {train.batch_size // parts}, the same batch of {train.batch_size}."
    )
    Events(error.run).add("shrunk", note, gradient_accumulation=parts)
    build.build_console(config.logger).say(f"WARNING: {note}")
    config = changed(config, {"train.gradient_accumulation": parts, "run.dir": str(error.run)})
    explicit = config.source.explicit | {"train.gradient_accumulation"}
    return replace(config, resume="auto", source=replace(config.source, explicit=explicit))
