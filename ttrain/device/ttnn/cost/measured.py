"""Constants of the cost model that were measured on a card of this machine, kept in the user's cache folder."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from ttrain.core.files import replace_file, to_json
from ttrain.core.folders import cache_folder
from ttrain.device.info import NodeOf
from ttrain.device.ttnn.cost.calibrate import Calibration
from ttrain.device.ttnn.cost.constants import CONSTANTS, Constants
from ttrain.device.ttnn.cost.step_time import FITTED, chip_setting
from ttrain.device.ttnn.settings import TenstorrentConfig

_NAMES = {declared.name for declared in fields(Constants)}


def cache_file() -> Path:
    """Return the file that they are kept in."""
    return cache_folder() / "wormhole.json"


def calibrate(config: TenstorrentConfig, node_of: NodeOf) -> str:
    """Opens the card, measures, keeps what was found and says it. Raises DeviceUnavailable or DeviceBusy."""
    from ttrain.device.ttnn.device import open_device

    with closing(open_device(replace(config, mesh=[1, 1], subdevices=1, command_queues=1))) as device:
        measured = Calibration(device, chip_setting(config, "static"), node_of)
        measured.run()
        facts = device.describe()
    return keep(config, measured.changed, facts)


def keep(config: TenstorrentConfig, changed: dict[str, float], facts: dict[str, Any]) -> str:
    """Writes measured constants for a board and a dispatch type; what a person should know of it."""
    path, date = cache_file(), datetime.now().astimezone().isoformat(timespec="seconds")
    known = _read()
    known[_key(config)] = {"constants": changed, "date": date, "device": facts}
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, to_json(known))
    lines = [f"  {name:20} {value:10.4g}  fitted {getattr(CONSTANTS, name):.4g}" for name, value in changed.items()]
    return "\n".join([f"Measured on this card and kept in {path}:", *lines])


def known_constants(config: TenstorrentConfig) -> tuple[Constants, str]:
    """The constants for a device, and where they are from: measured here as far as they were, fitted else."""
    known = _read()
    own = _key(config)
    others = [key for key in (_key(config, "worker"), _key(config, "eth")) if key != own]
    entries = [known[key] for key in (*others, own) if key in known]
    changed: dict[str, float] = {}
    for entry in entries:  # that of the configured dispatch type last, so that it counts where both tell
        changed |= {name: float(value) for name, value in entry["constants"].items() if name in _NAMES}
    if not changed:
        return CONSTANTS, FITTED
    source = (
        f"the cost model of a Wormhole chip with {len(changed)} constants measured on this card, {entries[-1]['date']}"
    )
    return replace(CONSTANTS, **changed), source


def _key(config: TenstorrentConfig, dispatch: str | None = None) -> str:
    dispatch = dispatch or config.dispatch
    return f"{config.name} {'worker' if dispatch == 'auto' else dispatch} {config.math_fidelity}"


def _read() -> dict[str, Any]:
    """Return the kept entries by key; none where they can't be read."""
    try:
        known = json.loads(cache_file().read_text("utf-8"))
        return {key: entry for key, entry in known.items() if isinstance(entry["constants"], dict) and entry["date"]}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
