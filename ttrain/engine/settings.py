"""Small config of the engines."""

from __future__ import annotations

from dataclasses import dataclass

from ttrain.core.options import option


@dataclass
class EngineConfig:
    """Settings of an engine, which runs a derived step."""

    name: str = option("static", "registered name of the engine")
    rematerialize: bool = option(True, "static and traced: recompute cheap elementwise activations in backward")
