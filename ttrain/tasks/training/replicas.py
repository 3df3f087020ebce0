"""Several independent runs side by side, each on a sub-device of one chip: steps take turns, the device computes both.

A replica has a run directory of its own, which is that of a plain run: it resumes, samples and reports like one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from ttrain.config import build
from ttrain.config.schema import Config
from ttrain.core.errors import Interrupted
from ttrain.device.family import family_of
from ttrain.tasks.training.attempt import Turns, turns
from ttrain.tasks.training.dry_run import dry_run
from ttrain.tasks.training.setup import set_up
from ttrain.train.loop.interrupt import StopRequests
from ttrain.train.settings import ReplicasConfig


def run(config: Config) -> float | None:
    """Trains all replicas; the best val/loss of any. Raises a failure once the others have ended too."""
    with ExitStack() as stack:
        setups = [set_up(each, stack) for each in replica_configs(config)]
        device = stack.enter_context(closing(build.build_device(config.device, config.precision)))
        parts = device.replicas()
        # All are at the same step, so one bar is enough.
        consoles = [build.build_console(config.logger, name_of(number), number == 0) for number in range(len(setups))]
        if not device.computes:
            for setup, part, console in zip(setups, parts, consoles, strict=True):
                dry_run(setup, part, console.say)
                console.say(f"Note: {part.describe()['note']}.")
            return None

        def failed(number: int, error: Exception) -> None:
            consoles[number].say(f"ended by {type(error).__name__}; the other replicas go on.")

        stop = StopRequests()
        results = side_by_side([turns(*each, stop) for each in zip(setups, parts, consoles, strict=True)], failed)
    losses = [loss for loss in results if loss is not None]
    return min(losses, default=None)


def replica_configs(config: Config) -> list[Config]:
    """What each replica would be given as a plain run."""
    family, given = family_of(config.device), config.replicas
    count = family.replicas(config.device)
    seeds = given.seed or [config.run.seed + number for number in range(count)]
    rates = given.lr or [config.optimizer.lr] * count
    explicit = {"run.seed"} if given.seed else set()
    explicit |= {"optimizer.lr"} if given.lr else set()
    source = dataclasses.replace(config.source, explicit=config.source.explicit | explicit)
    return [
        dataclasses.replace(
            config,
            device=family.replica(config.device),
            optimizer=dataclasses.replace(config.optimizer, lr=rates[number]),
            run=dataclasses.replace(config.run, seed=seeds[number], dir=_folder(config.run.dir, number)),
            resume=_resumed(config.resume, number),
            replicas=ReplicasConfig(),
            source=source,
        )
        for number in range(count)
    ]


def name_of(number: int) -> str:
    """Of a replica, also of its folder below run.dir."""
    return f"replica-{number}"


def _folder(given: str | None, number: int) -> str | None:
    return None if given is None else str(Path(given) / name_of(number))


def _resumed(given: str, number: int) -> str:
    """The replica's own run where `resume=` names a folder of several; else all start from the same checkpoint."""
    own = Path(given) / name_of(number)
    return str(own) if own.is_dir() else given


def side_by_side(
    runs: Sequence[Turns], failed: Callable[[int, Exception], None] = lambda number, error: None
) -> list[float | None]:
    """What the runs return, in their order. Told of every failure, and raises one once the others have ended too."""
    results: dict[int, float | None] = {}
    failures: list[Exception] = []
    left = dict(enumerate(runs))
    while left:
        for number, run in list(left.items()):
            try:
                next(run)
            except StopIteration as end:
                results[number] = end.value
                del left[number]
            except Exception as error:
                failures.append(error)
                del left[number]
                failed(number, error)
    if failures and all(isinstance(error, Interrupted) for error in failures):
        raise Interrupted("\n".join(map(str, failures)))
    if failures:
        raise next(error for error in failures if not isinstance(error, Interrupted))
    return [results[number] for number in range(len(runs))]
