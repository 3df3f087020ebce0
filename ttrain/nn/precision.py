"""Which dtype computes and which dtype keeps the weights."""

from __future__ import annotations

from dataclasses import dataclass

from ttrain.core.options import option
from ttrain.core.spec import DType


@dataclass
class PrecisionConfig:
    """Dtypes of a run. Master weights and optimizer state are fp32 in both choices."""

    name: str = option("fp32", "fp32, or bf16 = bf16 compute with fp32 master weights", choices=("fp32", "bf16"))

    @property
    def compute(self) -> DType:
        """dtype of activations and of the weights as matmuls read them."""
        return DType.parse(self.name)
