"""The parts of an attempt that the objects around its loop share."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from ttrain.engine.state import State
from ttrain.parallel.world import World
from ttrain.train.checkpoint.progress import Progress
from ttrain.train.logging.events import Events
from ttrain.train.logging.loggers import Loggers
from ttrain.train.runs.record import START
from ttrain.train.runs.run_directory import RunDirectory
from ttrain.train.settings import TrainConfig


@dataclass
class RunContext:
    """The config, the files and the progress of one attempt."""

    config: TrainConfig
    state: State
    run: RunDirectory
    loggers: Loggers
    progress: Progress = field(default_factory=Progress)
    world: World = field(default_factory=World)
    held_out: str = ""  # SHA-256 of the data that evaluations read
    command: str = START  # starts every command that continues the run

    @cached_property
    def events(self) -> Events:
        """The run's events.jsonl; its notes are shown on the console too."""
        return Events(self.run.events, self.loggers.console.say)

    def check_held_out(self) -> None:
        """Drop the losses that were measured on other held-out data, with a warning."""
        note = self.progress.measure_on(self.held_out)
        if note is not None:
            self.events.warn("held_out", note, self.progress.step)
