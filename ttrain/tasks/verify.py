"""task=verify: compare every op and the configured model with PyTorch in fp64, and the engines with each other."""

from __future__ import annotations

import dataclasses
import math
from contextlib import closing
from functools import partial
from pathlib import Path

from ttrain.config import build
from ttrain.config.registry import names
from ttrain.config.schema import Config
from ttrain.core.errors import CaptureError, ConfigError
from ttrain.core.files import to_json, write_chosen
from ttrain.core.tables import Table, plain_table
from ttrain.core.waiting import Waiting, waited_for
from ttrain.device.base import Device
from ttrain.engine.state import State
from ttrain.testing.compare import Comparison, verdict, worst_of_each
from ttrain.testing.verifier import MakeEngine, Verifier, chosen_ops

VOCABULARY = 65  # of a language model whose config leaves it to a tokenizer
COLUMNS = ("subject", "quantity", "engine", "cases", "max diff", "mean diff", "ULP", "99 %", "allowed", "cosine", "")


def run(config: Config) -> None:
    """Print the report, write verify.json=<file> if asked, and raise VerifyError where something is off."""
    settings, dtype = config.verify, config.precision.compute
    chosen = [] if settings.ops == ["none"] else chosen_ops(settings.ops, "verify.ops=")
    with closing(build.build_device(config.device, config.precision)) as device:
        if not device.computes:
            raise ConfigError(
                f"device={config.device.name}: computes no values, so there is nothing to verify. Use one that does."
            )
        engines, notes = _engines(config, device)
        print(f"Verifying on {device.name}, {dtype}, engine {', '.join(engines)}, against PyTorch in fp64.", flush=True)
        verifier = Verifier(device, engines, dtype, settings.tolerance)
        found: list[Comparison] = []
        found += verifier.ops(chosen, partial(waited_for, what="Comparing ops with PyTorch")) if chosen else ()
        if settings.model:
            with Waiting("Comparing the model with PyTorch"):
                model = build.build_model(config, VOCABULARY)
                name = config.source.choices.get("model", config.model.name)
                found += verifier.model(name, model, settings.rows, config.run.seed)
        head = {"device": device.name, "precision": config.precision.name, "engines": list(engines)}
    notes += verifier.notes
    print(plain_table(_table(found, notes)))
    if settings.json is not None:
        passed = all(one.passed for one in found)
        values = {**head, "model": config.model.name, "notes": notes, "passed": passed}
        values["comparisons"] = [one.to_dict() for one in found]
        write_chosen("verify.json", Path(settings.json), to_json(values))
    verdict(found)
    print(f"verify: all {len(found)} comparisons passed.")


def _engines(config: Config, device: Device) -> tuple[dict[str, MakeEngine], list[str]]:
    """Return the engines to run by name, and why others are left out."""
    found: dict[str, MakeEngine] = {}
    notes = []
    every = [name for name in names("engine") if name != "auto"]
    for name in every if config.verify.engines == "all" else [config.engine.name]:
        make = partial(build.made, "engine", dataclasses.replace(config.engine, name=name))
        try:
            make(device, State(device, [])).close()
            found[name] = make
        except CaptureError as error:
            if config.verify.engines != "all":
                raise
            notes.append(f"engine={name}: {error}")
        finally:
            device.freeze(None)
    return found, notes


def _table(found: list[Comparison], notes: list[str]) -> Table:
    rows = []
    for one, count in worst_of_each(found):
        numbers = [f"{number:.3g}" for number in (one.largest, one.mean, one.ulp, one.most, one.allowed.peak)]
        angle = "-" if math.isnan(one.cosine) else f"{one.cosine:.9f}"
        verdict = "pass" if one.passed else "FAIL"
        rows.append((one.subject, one.quantity, one.engine, str(count), *numbers, angle, verdict))
    return Table("Worst of each quantity", COLUMNS, rows, tuple(notes))
