"""Changes that a run may make by itself to go on: recover.oom=shrink."""

from __future__ import annotations

import dataclasses

from ttrain.config import build
from ttrain.config.schema import Config
from ttrain.core.errors import OutOfMemory
from ttrain.train.forecast.out_of_memory import shrunk
from ttrain.train.logging.events import Events


def shrunk_config(config: Config, error: OutOfMemory) -> Config | None:
    """The config that continues the run with less memory; None where the run has to stop."""
    if config.recover.oom != "shrink" or error.train is None or error.run is None:
        return None
    train = shrunk(error.train)
    if train is None:
        return None
    parts = train.gradient_accumulation
    note = (
        f"{error} Going on with train.gradient_accumulation={parts} instead of {error.train.gradient_accumulation}: "
        f"micro-batches of {train.batch_size // parts}, the same batch of {train.batch_size}."
    )
    Events(error.run).add("shrunk", note, gradient_accumulation=parts)
    build.build_console(config.logger).say(f"WARNING: {note}")
    explicit = config.source.explicit | {"train.gradient_accumulation"}
    return dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, gradient_accumulation=train.gradient_accumulation),
        run=dataclasses.replace(config.run, dir=str(error.run)),
        resume="auto",
        source=dataclasses.replace(config.source, explicit=explicit),
    )
