"""Times of benchmarks by the cost model, where there is no card."""

from __future__ import annotations

from ttrain.device.timing import Work
from ttrain.device.ttnn.cost.programs import BYTES, Product
from ttrain.device.ttnn.cost.step_time import CardStep, chip_setting
from ttrain.device.ttnn.cost.wormhole import Wormhole
from ttrain.device.ttnn.settings import TenstorrentConfig


class WormholeModel:
    """A board as a config uses it. See `TimeModel`."""

    def __init__(self, config: TenstorrentConfig) -> None:
        self.config = config

    def describe(self) -> dict[str, object]:
        return {
            "name": self.config.name,
            "mode": "cost model",
            "model": "the cost model of a Wormhole chip",
            "source": "ttrain/device/ttnn/cost, docs/planning.md",
        }

    def product(self, size: int, dtype: str, engine: str) -> tuple[float, str]:
        estimate = self._chip(engine).blocking([Product(size, size, size, 1, BYTES[dtype])])
        bound = "call" if estimate.total > 2 * (estimate.compute + estimate.bandwidth) else estimate.bottleneck
        return estimate.total / 1e3, bound

    def step(self, work: Work, engine: str) -> tuple[float, str]:
        time = CardStep(work, self.config).time(self.config, engine)
        return 1e3 * time.total, time.bottleneck.replace("_", " ")

    def peak_flops(self, engine: str) -> float:
        return self._chip(engine).peak_flops()

    def _chip(self, engine: str) -> Wormhole:
        return Wormhole(chip_setting(self.config, engine))
