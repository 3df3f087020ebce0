"""Small config of each objective."""

from __future__ import annotations

from dataclasses import dataclass

from ttrain.core.options import option


@dataclass
class ObjectiveConfig:
    """Keys of every objective."""

    name: str = option("next_token", "registered name of the objective")
