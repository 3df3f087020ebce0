"""Targets of registered names whose components do not take their small config as it is; see build.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttrain.device.settings import DeviceConfig
from ttrain.engine.settings import EngineConfig
from ttrain.train.settings import WandbConfig

if TYPE_CHECKING:
    from ttrain.device.base import Device
    from ttrain.engine.base import Engine
    from ttrain.engine.state import State
    from ttrain.train.logging.loggers import Logger


def null_device(config: DeviceConfig) -> Device:
    """Shapes only."""
    from ttrain.device.null.device import NullDevice

    return NullDevice()


def dynamic_engine(config: EngineConfig, device: Device, state: State) -> Engine:
    """Launches as recorded."""
    from ttrain.engine.dynamic import DynamicEngine

    return DynamicEngine(device, state)


def static_engine(config: EngineConfig, device: Device, state: State) -> Engine:
    """A flat list of kernels over planned buffers."""
    from ttrain.engine.static import StaticEngine

    return StaticEngine(device, state, config.rematerialize)


def traced_engine(config: EngineConfig, device: Device, state: State) -> Engine:
    """Replays of what the device captured or compiled."""
    from ttrain.engine.traced import TracedEngine

    return TracedEngine(device, state, config.rematerialize)


def no_views(*_: Any) -> list[Logger]:
    """The console and metrics.jsonl are enough."""
    return []


def wandb_views(
    config: WandbConfig, folder: Path, run_config: dict[str, Any], run_id: str | None, say: Callable[[str], None]
) -> list[Logger]:
    """Weights & Biases."""
    from ttrain.train.logging.wandb_logger import WandbLogger

    return [WandbLogger(config, folder, run_config, run_id, say)]
