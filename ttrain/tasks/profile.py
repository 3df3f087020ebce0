"""task=profile: what a device does during training steps, by its own profiler."""

from __future__ import annotations

import dataclasses
import tempfile
from contextlib import closing
from pathlib import Path

from ttrain.config import build
from ttrain.config.registry import family_that
from ttrain.config.schema import Config
from ttrain.core.files import to_json, write_chosen
from ttrain.core.tables import plain_table
from ttrain.core.waiting import waited_for
from ttrain.device.family import Profile, family_of

WARM_UP = 3  # steps that build programs, and capture where the engine does


def run(config: Config) -> None:
    """Prints the tables, and writes profile.json=<file> if asked. Raises UserError where there is no profiler."""
    profile = _given(config) if config.profile.csv is not None else _measured(config)
    print("\n".join(plain_table(table) for table in profile.tables()))
    if config.profile.json is not None:
        write_chosen("profile.json", Path(config.profile.json), to_json(profile.to_dict()))


def _given(config: Config) -> Profile:
    """A report that exists already."""
    family = family_of(config.device)
    family = family if family.profiles else family_that(lambda each: each.profiles)
    return family.read_profile(Path(str(config.profile.csv)), config.profile.steps)


def _measured(config: Config) -> Profile:
    """Steps on the device, with its profiler on."""
    from ttrain.train.steps.length_schedule import DataReader, Position

    dataset = build.build_dataset(config.data, config.model, config.train.length_schedule)
    config = dataclasses.replace(config, lora=build.with_adapters(config.lora, config.source.explicit))
    model = build.build_model(*config.model_parts, dataset.vocabulary)
    with tempfile.TemporaryDirectory() as folder:
        profiler = family_of(config.device).profiler(config.device, Path(folder))
        assert profiler is not None  # checked with the config
        config = dataclasses.replace(config, device=profiler.config)
        device = build.build_device(config.device, config.precision)
        with closing(device), closing(build.build_session(model, device, *config.step_parts)) as session:
            session.initialize(config.run.seed)
            steps = {name: session.engine.build(name, trace) for name, trace in session.graph.train_steps().items()}
            last = WARM_UP + config.profile.steps
            reader = DataReader.of(config.train, getattr(dataset, "context", 1), 0, Position())
            batch = reader.batches(dataset, config.run.seed)
            drive = build.build_driver(model, device, steps, batch, *config.rate_parts, config.run.seed, last=last)
            for number in waited_for(range(1, WARM_UP + 1), "Warming up"):
                drive(number)
            profiler.warm(device)
            for number in waited_for(range(WARM_UP + 1, last + 1), "Profiling steps"):
                drive(number)
            return profiler.profile(device, config.profile.steps)
