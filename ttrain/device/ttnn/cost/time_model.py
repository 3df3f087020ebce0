"""Times of benchmarks by the cost model, where there is no card."""

from __future__ import annotations

from dataclasses import replace

from ttrain.device.family import Variant
from ttrain.device.timing import Work
from ttrain.device.ttnn.cost.programs import BYTES, Product
from ttrain.device.ttnn.cost.step_time import CardStep, chip_setting
from ttrain.device.ttnn.cost.wormhole import Wormhole
from ttrain.device.ttnn.settings import TenstorrentConfig


class WormholeModel:
    """A board as a config uses it; a variant may use it otherwise. See `TimeModel`."""

    def __init__(self, config: TenstorrentConfig) -> None:
        self.config = config

    def describe(self) -> dict[str, object]:
        return {
            "name": self.config.name,
            "mode": "cost model",
            "model": "the cost model of a Wormhole chip",
            "source": "ttrain/device/ttnn/cost, docs/planning.md",
        }

    def product(self, size: int, dtype: str, variant: Variant) -> tuple[float, str]:
        estimate = self._chip(variant).blocking([Product(size, size, size, 1, BYTES[dtype])])
        bound = "call" if estimate.total > 2 * (estimate.compute + estimate.bandwidth) else estimate.bottleneck
        return estimate.total / 1e3, bound

    def step(self, work: Work, variant: Variant) -> tuple[float, str]:
        config = self._config(variant)
        step = CardStep(work, config)
        if variant.part == "half":
            estimate = self._chip(variant).stalling([program for _, listed in step.programs for program in listed])
            return estimate.total / 1e3 + 1e3 * step.host_input, estimate.bottleneck
        time = step.time(config, variant.engine)
        return 1e3 * time.total, time.bottleneck.replace("_", " ")

    def peak_flops(self, variant: Variant) -> float:
        return self._chip(variant).peak_flops()

    def _config(self, variant: Variant) -> TenstorrentConfig:
        return replace(self.config, dispatch=variant.dispatch or self.config.dispatch)

    def _chip(self, variant: Variant) -> Wormhole:
        setting = chip_setting(self._config(variant), variant.engine)
        if variant.part != "full":
            rows, columns = setting.cores
            setting = replace(setting, grid=(rows, columns // 2))
        return Wormhole(setting)


def variant_config(config: TenstorrentConfig, variant: Variant) -> TenstorrentConfig | None:
    """Return the device that a variant opens, or None for what can't be run."""
    if variant.part == "both":
        return None
    config = replace(config, dispatch=variant.dispatch or config.dispatch)
    if variant.part == "half":
        rows, columns = chip_setting(config, variant.engine).cores
        config = replace(config, core_grid=[rows, columns // 2])
    return config
