"""Small config of the engines."""

from __future__ import annotations

from dataclasses import dataclass

from ttrain.core.options import option


@dataclass
class EngineConfig:
    """How a derived step is run."""

    name: str = option("static", "registered name of the engine")
    rematerialize: bool = option(
        True, "static and traced: compute cheap elementwise activations again in backward instead of keeping them"
    )
