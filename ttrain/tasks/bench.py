"""task=bench: our engines and PyTorch at the same work, side by side: `python -m ttrain task=bench bench=gpt`."""

from __future__ import annotations

import signal
import sys
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from ttrain.bench.modelled import modelled
from ttrain.bench.report import print_result
from ttrain.bench.results import Result
from ttrain.bench.run import Bench
from ttrain.config.schema import Config, to_dict
from ttrain.config.validate import typed_config
from ttrain.core.errors import Interrupted, UserError
from ttrain.core.files import replace_file, to_json
from ttrain.core.folders import RESULTS, claim_results
from ttrain.device.info import MOCK, info_of
from ttrain.device.settings import DeviceConfig
from ttrain.engine.settings import EngineConfig
from ttrain.train.runs.record import environment_record

ROOT = Path("outputs/bench")


def run(config: Config) -> None:
    """Measure, print and save. Ctrl-C and SIGTERM save what is there. Raises UserError before anything starts."""
    settings, name = config.bench, config.source.choices.get("bench", "bench")
    variants = {each: _with_overrides(config, each) for each in settings.variants or [""]}
    notes = []
    if settings.baselines and not _here(config.device):
        notes.append("PyTorch does not take part: it would run on this machine, and the device is not here.")
        settings = replace(settings, baselines=[])
    for device, _ in variants.values():
        _check_here(settings.measure, device)
    if not settings.engines and not settings.baselines:
        raise UserError("bench.engines=[]: nobody takes part. Name at least one.")
    folder = claim_results("bench.out", settings.out, ROOT, "_".join([name, *settings.size[:3]]), datetime.now())
    result = Result(name, asdict(settings), _environment(config), notes=notes)

    def save() -> None:
        replace_file(folder / RESULTS, to_json(result.to_dict()))

    interrupted = False
    with ExitStack() as stack:
        with suppress(ValueError):  # only the main thread may: SIGTERM, too, ends in saved results
            stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, signal.default_int_handler))
        try:
            Bench(settings, variants, config.run.seed, config.plugins, result, save, _say).run()
        except KeyboardInterrupt:
            interrupted = True
    save()
    print_result(result.to_dict())
    print(f"results: {folder}")
    if interrupted:
        raise Interrupted(f"interrupted; partial results are in {folder}")


def _with_overrides(config: Config, variant: str) -> tuple[DeviceConfig, EngineConfig]:
    """Return device and engine with the overrides of a variant. Raises ConfigError as they would on a command line."""
    values = to_dict(config)
    for override in variant.split():
        key, _, value = override.partition("=")
        section, _, option = key.partition(".")
        values[section][option] = value
    changed = typed_config(values)
    return changed.device, changed.engine


def _here(device: DeviceConfig) -> bool:
    return not modelled(device) and info_of(device).mode(device) != MOCK


def _check_here(measure: list[str], device: DeviceConfig) -> None:
    """Raise UserError where something can't be measured because the device is not here, or has no model of times."""
    info = info_of(device)
    if not _here(device) and measure != ["steps"]:
        raise UserError(
            f"bench.measure=[{','.join(measure)}]: start and memory are measured on the device, and there is no "
            f"{info.title} card here. Give bench.measure=[steps], or device=cpu."
        )
    if modelled(device):
        info.time_model(device)


def _environment(config: Config) -> dict[str, Any]:
    record = environment_record(to_dict(config), {}, {}, None, config.source.command())
    return {key: record[key] for key in ("started", "command", "versions", "platform", "git")}


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
