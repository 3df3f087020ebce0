"""task=bench: our engines and PyTorch at the same work, side by side: `python -m ttrain task=bench bench=gpt`."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from importlib.util import find_spec
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
from ttrain.config.schema import Config, to_dict
from ttrain.core.errors import Interrupted, UserError
from ttrain.device.settings import DeviceConfig
from ttrain.device.ttnn.runtime.environment import has_card
from ttrain.device.ttnn.settings import TenstorrentConfig
from ttrain.train.runs.record import environment_record

CHIP = "n300"  # that is taken where a study is about a chip and no device is named: what was published ran on one


def run(config: Config) -> None:
    """Measures, prints and saves. Ctrl-C and SIGTERM save what is there. Raises UserError before anything starts."""
    settings, study = config.bench, build.build_study(config)
    device, modelled, mocked = _chip(config.device, study)
    earlier = None if settings.compare is None else read_earlier(settings.compare, settings.name)
    now = datetime.now()
    name = mark_name(study.label, device.name)
    if settings.markdown is not None:
        check_page(Path(settings.markdown), name)
    folder = folders.claim(settings.out, study.label, now)
    result = Result(settings.name, study.label, asdict(settings), _environment(config), mark=name)
    if modelled and isinstance(settings, ContestConfig) and settings.baselines:
        result.notes.append("PyTorch does not take part: it would run on this machine, and the chip is not here.")

    def save() -> None:
        result.environment["device"] = next((job.device for job in result.jobs if job.device), {})
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
    if study.kind == "chip" and not isinstance(device, TenstorrentConfig):
        device = TenstorrentConfig(name=CHIP)
    if not isinstance(device, TenstorrentConfig) or device.mode == "simulator":
        return device, False, False
    mocked = device.mode == "mock"
    modelled = mocked or not has_card()
    if modelled and study.kind in ("startup", "memory"):
        raise UserError(
            f"bench={study.name}: measures on the device, and there is no Tenstorrent card here. Use device=cpu."
        )
    if modelled and device.name == "p150":
        raise UserError("device=p150: there is no cost model of a Blackhole chip, and no card here. Give device=n300.")
    return device, modelled, mocked or (modelled and study.name == "dispatch" and find_spec("ttnn") is not None)


def _environment(config: Config) -> dict[str, Any]:
    record = environment_record(to_dict(config), {}, {}, None, list(config.source.overrides))
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
