"""task=bench: our engines and PyTorch at the same work, side by side: `python -m ttrain task=bench bench=gpt`."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from typing import Any

from ttrain.bench import folder as folders
from ttrain.bench.progress import Progress
from ttrain.bench.report import print_result
from ttrain.bench.results import Result, read_earlier
from ttrain.bench.run import Bench
from ttrain.config import build
from ttrain.config.schema import Config, to_dict
from ttrain.core.errors import Interrupted
from ttrain.train.record import environment_record


def run(config: Config) -> None:
    """Measures, prints and saves. Ctrl-C and SIGTERM save what is there. Raises UserError before anything starts."""
    settings, study = config.bench, build.build_study(config)
    earlier = None if settings.compare is None else read_earlier(settings.compare, settings.name)
    now = datetime.now()
    folder = folders.claim(settings.out, study.label, now)
    result = Result(settings.name, study.label, asdict(settings), _environment(config))

    def save() -> None:
        result.environment["device"] = next((job.device for job in result.jobs if job.device), {})
        folders.save(result, folder, earlier)

    bench = Bench(study, settings, config.device, config.engine, config.plugins, result, Progress(), save)
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
