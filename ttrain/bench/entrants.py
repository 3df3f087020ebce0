"""Entrants of a benchmark, and the device that each runs on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ttrain.bench.results import OURS, PYTORCH
from ttrain.bench.settings import BASELINES, BenchConfig
from ttrain.bench.workload import Case, TrainingWork
from ttrain.device.info import MOCK, info_of
from ttrain.device.settings import DeviceConfig
from ttrain.engine.settings import EngineConfig


@dataclass(frozen=True)
class Entrant:
    """Entrant of a benchmark: an engine or a baseline, the device it runs on, and the number of processes."""

    own: str
    device: DeviceConfig
    engine: EngineConfig
    variant: str = ""
    mode: str = "none"  # of `parallel`
    ranks: int = 1

    @property
    def name(self) -> str:
        shared = f" {self.mode} x{self.ranks}" if self.ranks > 1 else ""
        return f"{self.own}{shared}{', ' if self.variant else ''}{self.variant}"

    @property
    def side(self) -> str:
        return PYTORCH if self.own in BASELINES else OURS

    def can_do(self, case: Case) -> bool:
        """Return False for a product by more than one way of PyTorch, or shared."""
        return isinstance(case.work, TrainingWork) or (self.ranks == 1 and self.own not in ("compile", "compile_all"))


def entrants_of(config: BenchConfig, variants: Mapping[str, tuple[DeviceConfig, EngineConfig]]) -> list[Entrant]:
    """Return who takes part, in the order of the rows. `variants` are the configs of device and engine by variant; the
    first is that of the baselines.
    """
    found = []
    for name in dict.fromkeys([*config.baselines, *config.engines]):
        if name in BASELINES:
            found.append(Entrant(name, *next(iter(variants.values()))))
        else:
            found += [Entrant(name, *both, variant) for variant, both in variants.items()]
    if config.ranks == 1:
        return found
    shared = []
    for one in found:
        shared += [one] if one.side == OURS else []
        modes = ("ddp", "zero1") if one.side == OURS else ("ddp",)
        shared += [replace(one, mode=mode, ranks=config.ranks) for mode in modes]
    return shared


def modelled(device: DeviceConfig) -> bool:
    """Return True if times have to come from the model of a device, because it is not here."""
    info = info_of(device)
    return info.mode(device) != MOCK and not info.present(device)
