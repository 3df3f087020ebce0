"""task=bench: our engines and PyTorch at the same work, side by side: `python -m ttrain task=bench bench=gpt`."""

from __future__ import annotations

import signal
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ttrain.bench.contender import expected, modelled
from ttrain.bench.report import print_result
from ttrain.bench.results import Result
from ttrain.bench.run import Bench
from ttrain.config.schema import Config, to_dict
from ttrain.core.errors import Interrupted, UserError
from ttrain.core.files import replace_file, to_json
from ttrain.core.folders import RESULTS, claim_results
from ttrain.core.waiting import to_stderr
from ttrain.device.info import MOCK, info_of
from ttrain.device.settings import DeviceConfig
from ttrain.device.timing import Work
from ttrain.train.runs.record import environment_record
from ttrain.train.supervise.child import set_handlers

ROOT = Path("outputs/bench")


def run(config: Config) -> None:
    """Measure, print and save. Ctrl-C and SIGTERM save what is there. Raises UserError before anything starts."""
    settings, name = config.bench, config.source.choices.get("bench", "bench")
    notes = []
    if not _is_here(settings.measure, config.device) and settings.baselines:
        notes.append("PyTorch does not take part: it would run on this machine, and the device is not here.")
        settings = replace(settings, baselines=[])
    if not settings.engines and not settings.baselines:
        raise UserError("bench.engines=[]: nobody takes part. Name at least one.")
    folder = claim_results("bench.out", settings.out, ROOT, "_".join([name, *settings.size[:3]]))
    result = Result(name, asdict(settings), _environment(config), notes=notes)

    def save() -> None:
        replace_file(folder / RESULTS, to_json(result.to_dict()))

    before, interrupted = set_handlers({signal.SIGTERM: signal.default_int_handler}), False
    try:
        parts = settings, config.device, config.engine
        Bench(*parts, config.run.seed, config.plugins, result, save, to_stderr).run()
    except KeyboardInterrupt:
        interrupted = True
    finally:
        set_handlers(before)
    save()
    print_result(result.to_dict())
    print(f"results: {folder}")
    if interrupted:
        raise Interrupted(f"interrupted; partial results are in {folder}")


def _is_here(measure: list[str], device: DeviceConfig) -> bool:
    """Return True if the device is here.

    Raises UserError where something can't be measured because it is not, or where it has no model of times.
    """
    info = info_of(device)
    if modelled(device):
        expected(device, Work((), 1, 1), "static")
    elif info.mode(device) != MOCK:
        return True
    if measure != ["steps"]:
        raise UserError(
            f"bench.measure=[{','.join(measure)}]: start and memory are measured on the device, and there is no "
            f"{info.title} card here. Give bench.measure=[steps], or device=cpu."
        )
    return False


def _environment(config: Config) -> dict[str, Any]:
    record = environment_record(to_dict(config), {}, {}, None, config.source.command())
    return {key: record[key] for key in ("started", "command", "versions", "platform", "git")}
