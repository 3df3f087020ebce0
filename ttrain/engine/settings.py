"""Small config of the engines."""

from __future__ import annotations

from dataclasses import dataclass

from ttrain.core.options import option


@dataclass
class EngineConfig:
    """Settings of the engine, which runs the steps."""

    name: str = option("auto", "name of the engine; auto is traced where the device compiles or captures, else static")
    rematerialize: bool = option(True, "static and traced: recompute cheap elementwise activations in backward")
