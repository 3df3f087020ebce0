"""Replicas: several attempts side by side on one chip.

Each has a sub-device, steps take turns, and the device computes all. A replica has a run directory of its own, which is
that of a plain run: it resumes, samples and reports like one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ttrain.config import build
from ttrain.config.schema import Config
from ttrain.core.errors import Interrupted
from ttrain.device.info import info_of
from ttrain.tasks.training.attempt import train
from ttrain.tasks.training.dry_run import dry_run
from ttrain.tasks.training.expected import changed
from ttrain.tasks.training.start import start_run
from ttrain.train.loop.interrupt import StopRequests
from ttrain.train.settings import ReplicasConfig


def run(config: Config) -> float | None:
    """Trains all replicas; the best val/loss of any. Raises a failure once the others have ended too."""
    with ExitStack() as stack:
        runs = [start_run(each, stack) for each in replica_configs(config)]
        device = stack.enter_context(closing(build.build_device(config.device, config.precision)))
        parts = device.replicas()
        # All are at the same step, so one bar is enough.
        consoles = [build.build_console(config.logger, name_of(number), number == 0) for number in range(len(runs))]
        if not device.computes:
            for run, part, console in zip(runs, parts, consoles, strict=True):
                dry_run(run, part, console.say)
                console.say(f"Note: {part.describe()['note']}.")
            return None

        def failed(number: int, error: Exception) -> None:
            consoles[number].say(f"ended by {type(error).__name__}; the other replicas go on.")

        stop = stack.enter_context(StopRequests())  # handlers are set by the main thread alone
        baton = Baton(len(parts))
        for number, part in enumerate(parts):
            part.turn = partial(baton.pass_on, number)
        trained = [partial(train, *each, stop) for each in zip(runs, parts, consoles, strict=True)]
        results = side_by_side(trained, baton, failed)
    losses = [loss for loss in results if loss is not None]
    return min(losses, default=None)


def replica_configs(config: Config) -> list[Config]:
    """Return the config that each replica would be given as a plain run."""
    info, given, configs = info_of(config.device), config.replicas, []
    count = info.replicas(config.device)
    seeds = given.seed or [config.run.seed + number for number in range(count)]
    rates = given.lr or [config.optimizer.lr] * count
    explicit = {key for key, values in (("run.seed", given.seed), ("optimizer.lr", given.lr)) if values}
    source = replace(config.source, explicit=config.source.explicit | explicit)
    shared: dict[str, Any] = {"device": info.replica(config.device), "replicas": ReplicasConfig(), "source": source}
    for number, name in enumerate(map(name_of, range(count))):
        folder = None if config.run.dir is None else str(Path(config.run.dir) / name)
        own = Path(config.resume) / name  # where resume= names a folder of several; else all start from one checkpoint
        changes = {"run.seed": seeds[number], "run.dir": folder, "optimizer.lr": rates[number]}
        resume = str(own) if own.is_dir() else config.resume
        configs.append(replace(changed(config, changes), resume=resume, **shared))
    return configs


def name_of(number: int) -> str:
    """Return the name of a replica, also that of its folder below run.dir."""
    return f"replica-{number}"


class Baton:
    """Lets one of several threads run at a time. The one that has the baton hands it to the next one that is left."""

    def __init__(self, count: int) -> None:
        self._turns = {number: threading.Semaphore(int(number == 0)) for number in range(count)}

    def take(self, number: int) -> None:
        """Wait until this thread has the baton."""
        self._turns[number].acquire()

    def pass_on(self, number: int) -> None:
        """Give the others a turn each, and take the baton back."""
        self._next(number).release()
        self.take(number)

    def leave(self, number: int) -> None:
        """Hand the baton on for good."""
        following = self._next(number)
        del self._turns[number]
        following.release()

    def _next(self, number: int) -> threading.Semaphore:
        left = list(self._turns)
        return self._turns[left[(left.index(number) + 1) % len(left)]]


def side_by_side(
    runs: Sequence[Callable[[], float | None]],
    baton: Baton,
    failed: Callable[[int, Exception], None] = lambda number, error: None,
) -> list[float | None]:
    """Run each in a thread, one at a time, as the baton goes. Return what they return, in their order.

    `failed` is told of every failure; one is raised once the others have ended too.
    """

    def body(number: int) -> float | None:
        baton.take(number)
        try:
            return runs[number]()
        except Exception as error:
            failed(number, error)
            raise
        finally:
            baton.leave(number)

    with ThreadPoolExecutor(len(runs), "replica") as threads:
        ends = [threads.submit(body, number) for number in range(len(runs))]
    failures = [error for end in ends if (error := end.exception()) is not None]
    if failures and all(isinstance(error, Interrupted) for error in failures):
        raise Interrupted("\n".join(map(str, failures)))
    if failures:
        raise next(error for error in failures if not isinstance(error, Interrupted))
    return [end.result() for end in ends]
