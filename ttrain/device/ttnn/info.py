"""Answers about Tenstorrent devices from their config. It loads settings only; an answer loads what it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

from ttrain.device.info import MOCK, DeviceInfo
from ttrain.device.settings import DeviceConfig


def _answer(name: str) -> Callable[..., Any]:
    """Return a method that calls a function of this folder, whose module is imported then."""
    module, _, function = name.partition(":")

    def method(self: DeviceInfo, *given: Any, **named: Any) -> Any:
        return getattr(import_module(f"{__package__}.{module}"), function)(*given, **named)

    return method


class Tenstorrent(DeviceInfo):
    """Cards, simulators of them and mocked boards."""

    title = "Tenstorrent"
    example = "n300"
    package = "ttnn"
    precisions = frozenset({"bf8"})
    row_multiple = 32  # a tile
    quantizes = False
    profiles = True
    divides = True

    present = _answer("runtime.environment:present")
    problems = _answer("problems:problems")
    parameter_problems = _answer("problems:parameter_problems")
    smaller_keys = _answer("problems:smaller_keys")
    diagnose = _answer("problems:diagnose")
    memory = _answer("runtime.identity:memory")
    estimate = _answer("cost.step_time:estimate")
    calibrate = _answer("cost.calibrate:calibrate")
    profiler = _answer("runtime.profile:TtnnProfiler")
    read_profile = _answer("runtime.profile:read_profile")
    findings = _answer("runtime.examine:examine")

    def named(self, config: Any) -> str:
        return f"device={config.name} device.mode={config.mode}"

    def mode(self, config: Any) -> str:
        return config.mode

    def exclusive(self, config: Any) -> bool:
        return config.mode != MOCK

    def replicas(self, config: Any) -> int:
        return config.subdevices

    def replica(self, config: Any) -> DeviceConfig:
        return replace(config, subdevices=1, command_queues=1)

    def best_engine(self, config: DeviceConfig) -> tuple[str, str]:
        return "traced", "the device captures the step"

    def best_precision(self, config: DeviceConfig) -> tuple[str, str]:
        return "bf16", "the device multiplies in bf16"

    def held(self, config: Any, precision: str) -> DeviceConfig:
        """bf8 holds matrices as 8-bit block floats."""
        return replace(config, weights="bf8") if precision == "bf8" else config
