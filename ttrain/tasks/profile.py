"""task=profile: time training steps, node by node or by the device's own profiler."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

from ttrain.config import build
from ttrain.config.registry import info_that
from ttrain.config.schema import Config
from ttrain.core.files import to_json, write_chosen
from ttrain.core.tables import plain_table
from ttrain.core.waiting import waited_for
from ttrain.device.base import Device
from ttrain.device.info import Profile, info_of
from ttrain.tasks.training.start import start_run
from ttrain.train.forecast.node_profile import NodeProfile, Stopwatch
from ttrain.train.forecast.show import product_ways
from ttrain.train.settings import without_phases
from ttrain.train.steps.step import NORMS, Stepper

WARM_UP = 3  # steps that build programs, and capture where the engine does


def run(config: Config) -> None:
    """Prints the tables, and writes profile.json=<file> and profile.trace=<file> if asked.

    Raises UserError where nothing can be profiled.
    """
    chosen = config.profile
    if chosen.csv is not None:
        profile: Profile = _given(config)
    elif info_of(config.device).profiles:
        profile = _by_device(config)
    else:
        profile = nodes = _by_node(config)
        if chosen.trace is not None:
            write_chosen("profile.trace", Path(chosen.trace), to_json(nodes.trace()))
    print("\n".join(plain_table(table) for table in profile.tables()))
    if chosen.json is not None:
        write_chosen("profile.json", Path(chosen.json), to_json(profile.to_dict()))


def _given(config: Config) -> Profile:
    """A report that exists already."""
    info = info_of(config.device)
    info = info if info.profiles else info_that(lambda each: each.profiles)
    return info.read_profile(Path(str(config.profile.csv)), config.profile.steps)


def _by_device(config: Config) -> Profile:
    """Steps on the device, with its profiler on."""
    with tempfile.TemporaryDirectory() as folder:
        profiler = info_of(config.device).profiler(config.device, Path(folder))
        steps, config = config.profile.steps, dataclasses.replace(config, device=profiler.config)
        with _warmed(config, steps) as (device, drive, _):
            profiler.warm(device)
            for number in waited_for(range(WARM_UP + 1, WARM_UP + steps + 1), "Profiling steps"):
                drive(number)
            return profiler.profile(device, steps)


def _by_node(config: Config) -> NodeProfile:
    """Every other step runs node by node, each of them timed; the steps between tell what that costs."""
    from ttrain.train.forecast.step_time import measured_rates

    with _warmed(config, 2 * config.profile.steps) as (device, drive, ways):
        rates = measured_rates(device.name, str(config.precision.compute), config.device.index)
        assert rates is not None  # checked with the config
        watch, plain, watched, spans = Stopwatch(device), [], [], []
        for number in waited_for(range(WARM_UP + 1, WARM_UP + 2 * config.profile.steps, 2), "Profiling steps"):
            inputs = (*drive.inputs(number), number)
            plain.append(device.seconds(partial(drive.train_step, *inputs)))
            batch, lr = drive.inputs(number + 1)
            calls = drive.train_step.calls(batch, lr, number + 1)
            if drive.train_step.guarded:  # whatever the norms are
                calls.append(drive.train_step.update(lr, dict.fromkeys(NORMS, 1.0), number + 1))
            watched.append(device.seconds(partial(drive.train_step.inspect, calls, watch.look, watch.ready)))
            spans.append(watch.spans())
        names = (device.name, config.engine.name)
        return NodeProfile.of(*names, config.profile.top, plain, watched, rates, spans, ways)


@contextmanager
def _warmed(config: Config, steps: int) -> Iterator[tuple[Device, Stepper, dict[str, str]]]:
    """The open device, what drives so many steps more than warm it up on the largest batches, and who multiplies."""
    config = dataclasses.replace(config, train=without_phases(config.train))
    with ExitStack() as stack:
        run = start_run(config, stack)
        device = stack.enter_context(closing(build.build_device(config.device, config.precision)))
        session = stack.enter_context(closing(run.open(device)))
        run.origin.set_values(session, config.run.seed)
        drive = run.stepper(session, session.build_training(further=False), WARM_UP + steps)
        for number in waited_for(range(1, WARM_UP + 1), "Warming up"):
            drive(number)
        yield device, drive, product_ways(session.engine)
