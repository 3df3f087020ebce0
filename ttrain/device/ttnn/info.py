"""The answers of Tenstorrent devices by their config. It loads settings only; an answer imports what it needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ttrain.core.errors import UserError
from ttrain.device.info import MOCK, SILICON, DeviceInfo, Failed, Finding, NodeOf, OutOfResources, TimeModel
from ttrain.device.settings import DeviceConfig
from ttrain.device.ttnn.settings import TenstorrentConfig

if TYPE_CHECKING:
    from ttrain.device.timing import Estimate, Work
    from ttrain.device.ttnn.runtime.profile import DispatchProfile, TtnnProfiler

BLACKHOLE = "blackhole"


def _ours(config: DeviceConfig) -> TenstorrentConfig:
    return cast(TenstorrentConfig, config)  # which names this family


class Tenstorrent(DeviceInfo):
    """Cards, simulators of them and mocked boards."""

    title = "Tenstorrent"
    example = "n300"
    package = "ttnn"
    precisions = frozenset({"bf8"})
    row_multiple = 32  # a tile
    profiles = True
    divides = True

    def named(self, config: DeviceConfig) -> str:
        return f"device={config.name} device.mode={_ours(config).mode}"

    def mode(self, config: DeviceConfig) -> str:
        return _ours(config).mode

    def present(self, config: DeviceConfig) -> bool:
        from ttrain.device.ttnn.runtime import environment

        mode = _ours(config).mode
        return environment.has_card() if mode == SILICON else mode != MOCK

    def exclusive(self, config: DeviceConfig) -> bool:
        return self.mode(config) != MOCK

    def problems(self, config: DeviceConfig, rows: int) -> Iterator[str]:
        from ttrain.device.ttnn.problems import problems

        return problems(_ours(config), rows)

    def parameter_problems(self, config: DeviceConfig, paths: Sequence[str], tied: bool) -> list[str]:
        from ttrain.device.ttnn.problems import parameter_problems

        return parameter_problems(_ours(config), paths, tied)

    def replicas(self, config: DeviceConfig) -> int:
        return _ours(config).subdevices

    def replica(self, config: DeviceConfig) -> DeviceConfig:
        return replace(_ours(config), subdevices=1, command_queues=1)

    def held(self, config: DeviceConfig, precision: str) -> DeviceConfig:
        """bf8 holds matrices as 8-bit block floats."""
        return replace(_ours(config), weights="bf8") if precision == "bf8" else config

    def memory(self, config: DeviceConfig) -> tuple[int, str] | None:
        from ttrain.device.ttnn.runtime.identity import DRAM, board

        return DRAM[board(_ours(config)).arch], "the board's DRAM"

    def smaller_keys(self, config: DeviceConfig, vocabulary: bool) -> list[str]:
        from ttrain.device.ttnn.problems import HOST_TABLES

        alone = _ours(config).mesh == [1, 1] and not _ours(config).host_resident
        return [HOST_TABLES] if vocabulary and alone else []

    def diagnose(self, config: DeviceConfig, error: BaseException, failed: Failed) -> OutOfResources | None:
        from ttrain.device.ttnn.problems import diagnose

        return diagnose(error, _ours(config), failed)

    def estimate(self, config: DeviceConfig, work: Work, engine: str) -> Estimate | str | None:
        from ttrain.device.ttnn.cost.calibrate import known_constants
        from ttrain.device.ttnn.cost.step_time import wormhole_estimate

        if self._blackhole(config):
            return "There is no cost model of a Blackhole chip."
        if _ours(config).host_resident:
            return "The cost model does not know what the host computes for device.host_resident."
        return wormhole_estimate(work, _ours(config), engine, known_constants(_ours(config)))

    def time_model(self, config: DeviceConfig) -> TimeModel:
        from ttrain.device.ttnn.cost.step_time import WormholeModel

        if self._blackhole(config):
            raise UserError(
                f"device={config.name}: there is no cost model of a Blackhole chip, and no card here. Give device=n300."
            )
        return WormholeModel(_ours(config))

    def calibrate(self, config: DeviceConfig, node_of: NodeOf) -> str:
        from ttrain.device.ttnn.cost.calibrate import calibrate

        if _ours(config).mode != SILICON or self._blackhole(config):
            raise UserError(
                "plan.calibrate=true: measures the cost model of a Wormhole card. Give device=n150 or n300."
            )
        return calibrate(_ours(config), node_of)

    def profiler(self, config: DeviceConfig, folder: Path) -> TtnnProfiler | None:
        from ttrain.device.ttnn.runtime.profile import TtnnProfiler

        return None if _ours(config).mode == MOCK else TtnnProfiler(_ours(config), folder)

    def read_profile(self, report: Path, steps: int) -> DispatchProfile:
        from ttrain.device.ttnn.runtime.profile import DispatchProfile, read_report

        return DispatchProfile.of(read_report(report), steps)

    def findings(self) -> Iterator[Finding]:
        from ttrain.device.ttnn.runtime.examine import examine

        return examine()

    @staticmethod
    def _blackhole(config: DeviceConfig) -> bool:
        from ttrain.device.ttnn.runtime.identity import board

        return board(_ours(config)).arch == BLACKHOLE
