"""task=profile: what a Tenstorrent device does during training steps, by its own profiler."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttrain.config import build
from ttrain.config.schema import Config
from ttrain.core.errors import UserError
from ttrain.core.waiting import waited_for
from ttrain.device.ttnn.settings import TenstorrentConfig

if TYPE_CHECKING:
    from ttrain.device.ttnn.device import TenstorrentDevice
    from ttrain.device.ttnn.runtime.profile import Dispatch

WARM_UP = 3  # steps that build programs, and capture where the engine does


def run(config: Config) -> None:
    """Prints the tables, and writes profile.json=<file> if asked. Raises UserError where there is no profiler."""
    from ttrain.train.dispatch_profile import DispatchProfile
    from ttrain.train.forecast.plan_report import plain_table

    dispatches, steps = _given(config) if config.profile.csv is not None else _measured(config)
    if not dispatches:
        raise UserError("task=profile: the report holds no program that ran on a device.")
    profile = DispatchProfile.of(dispatches, steps)
    print("\n".join(plain_table(table) for table in profile.tables()))
    if config.profile.json is not None:
        _write(Path(config.profile.json), profile.to_dict())


def _given(config: Config) -> tuple[Sequence[Dispatch], int]:
    """A report that exists already."""
    from ttrain.device.ttnn.runtime.profile import read_report

    return read_report(Path(str(config.profile.csv))), config.profile.steps


def _measured(config: Config) -> tuple[Sequence[Dispatch], int]:
    """Steps on the device, with its profiler on."""
    assert isinstance(config.device, TenstorrentConfig)  # checked with the config
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(config.device.profile or temporary)
        device_config = dataclasses.replace(config.device, profile=str(folder))
        return _steps(dataclasses.replace(config, device=device_config), folder), config.profile.steps


def _steps(config: Config, folder: Path) -> Sequence[Dispatch]:
    from ttrain.device.ttnn.runtime.profile import after
    from ttrain.tasks.job import open_session

    dataset = build.build_dataset(config)
    model = build.build_model(config, dataset.vocabulary)
    device: Any = build.build_device(config.device, config.precision)
    with closing(device), closing(open_session(config, model, device, training=True)) as session:
        session.initialize(config.run.seed)
        steps = {name: session.engine.build(name, trace) for name, trace in session.graph.train_steps().items()}
        one = _one_step(config, dataset, model, steps)
        for number in waited_for(range(1, WARM_UP + 1), "Warming up"):
            one(number)
        earlier = _read(device, folder)
        for number in waited_for(range(WARM_UP + 1, WARM_UP + config.profile.steps + 1), "Profiling steps"):
            one(number)
        return after(_read(device, folder), earlier)


def _one_step(config: Config, dataset: Any, model: Any, steps: Any) -> Any:
    """One optimizer step, by its number."""
    from ttrain.models.base import preparation
    from ttrain.optim.groups import learning_rates
    from ttrain.train.steps.step import TrainStep

    train = TrainStep(steps, config.train.accumulation, config.run.seed, prepare=preparation(model))
    schedule = build.build_schedule(config.schedule, config.train.steps)
    rates, rows = learning_rates(model.parameters(), config.optimizer, schedule), config.train.batch_size

    def run(number: int) -> None:
        train(dataset.batch("train", config.run.seed, number * rows, rows), rates(number), number)

    return run


def _read(device: TenstorrentDevice, folder: Path) -> Sequence[Dispatch]:
    """What the device's profiler has recorded so far."""
    from ttrain.device.ttnn.runtime.profile import find_report, read_report

    device.synchronize()
    with device.watched("reading the profiler"):
        device.mesh.tt.ReadDeviceProfiler(device.mesh.handle)
    return read_report(find_report(folder))


def _write(path: Path, values: dict[str, Any]) -> None:
    from ttrain.core.files import replace_file, to_json

    try:
        replace_file(path, to_json(values))
    except OSError as error:
        raise UserError(f"profile.json={path}: can't be written: {error.strerror or error}.") from None
