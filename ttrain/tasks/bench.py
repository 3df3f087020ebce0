"""task=bench: our engines and PyTorch at the same work, side by side: `python -m ttrain task=bench bench=gpt`."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from ttrain.bench import folder as folders
from ttrain.bench.page import check_page, insert, mark_name
from ttrain.bench.progress import Progress
from ttrain.bench.report import markdown, print_result
from ttrain.bench.results import Result, read_earlier
from ttrain.bench.run import Bench
from ttrain.bench.settings import ContestConfig
from ttrain.bench.studies import Study
from ttrain.config import build
from ttrain.config.registry import component, family_that
from ttrain.config.schema import Config, to_dict
from ttrain.core.errors import Interrupted, UserError
from ttrain.device.family import MOCK, family_of
from ttrain.device.settings import DeviceConfig
from ttrain.train.runs.record import environment_record
from ttrain.train.runs.results_folder import claim


def run(config: Config) -> None:
    """Measures, prints and saves. Ctrl-C and SIGTERM save what is there. Raises UserError before anything starts."""
    settings, study = config.bench, build.build_study(config.bench, config.run.seed)
    device, modelled, mocked = _chip(config.device, study)
    earlier = None if settings.compare is None else read_earlier(settings.compare, settings.name)
    now = datetime.now()
    name = mark_name(study.label, device.name)
    if settings.markdown is not None:
        check_page(Path(settings.markdown), name)
    folder = claim("bench.out", settings.out, folders.ROOT, study.label, now)
    result = Result(settings.name, study.label, asdict(settings), _environment(config), mark=name)
    if modelled and isinstance(settings, ContestConfig) and settings.baselines:
        result.notes.append("PyTorch does not take part: it would run on this machine, and the chip is not here.")

    def save() -> None:
        result.environment["device"] = next((case.device for case in result.cases if case.device), {})
        folders.save(result, folder, earlier)

    bench = Bench(study, settings, device, config.engine, config.plugins, result, Progress(), save)
    bench.modelled, bench.mocked = modelled, mocked
    interrupted = False
    with _sigterm_as_ctrl_c():
        try:
            bench.run()
        except KeyboardInterrupt:
            interrupted = True
    save()
    missing = folders.save_plot(result, folder)
    print_result(result, earlier, folder)
    if missing:
        print(f"There is no plot: {missing}.")
    if interrupted:
        raise Interrupted(f"interrupted; partial results are in {folder}")
    if settings.markdown is not None:
        insert(Path(settings.markdown), name, markdown(result, earlier))


def _chip(device: DeviceConfig, study: Study) -> tuple[DeviceConfig, bool, bool]:
    """(device, whether its times come from the cost model, whether a mocked board tells the host's time).

    Raises UserError where neither is possible.
    """
    if study.kind == "chip" and family_of(device).modelled is None:
        name = str(family_that(lambda each: each.modelled).modelled)
        device = component("device", name).config(name=name)
    family = family_of(device)
    if family.present(device):
        return device, False, False
    if study.kind in ("startup", "memory"):
        raise UserError(
            f"bench={study.name}: measures on the device, and there is no {family.title} card here. Use device=cpu."
        )
    family.time_model(device)  # or it says why there is none
    mocked = family.mode(device) == MOCK or (study.name == "dispatch" and family.installed())
    return device, True, mocked


def _environment(config: Config) -> dict[str, Any]:
    record = environment_record(to_dict(config), {}, {}, None, config.source.command())
    return {key: record[key] for key in ("started", "command", "versions", "platform", "git")}


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt, so that it too ends in saved results."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
