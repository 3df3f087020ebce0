"""What an optimizer is to the rest of ttrain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from ttrain.core.spec import DType, TensorSpec
from ttrain.graph import Value
from ttrain.optim.settings import OptimizerConfig

SCALAR = TensorSpec((), DType.FP32)
STEP = "step"  # step input fp32 []: number of this update, counted from 1


class Optimizer(Protocol):
    """Records the update of a group of parameters. Holds no tensors.

    `slots` names the fp32 tensors kept per parameter; they lie in the state as `<parameter path>/<slot>`, start at zero
    and have the parameter's shape.
    """

    config: OptimizerConfig
    slots: tuple[str, ...]

    def update(
        self,
        parameters: Sequence[Value],
        gradients: Sequence[Value],
        state: Mapping[str, Sequence[Value]],
        *,
        lr: Value,
        step: Value,
        factor: Value | None,
        decays: bool,
    ) -> list[Value]:
        """New values of the parameters.

        `state` holds one list per slot. `lr`, `step` and `factor` (what gradients are multiplied by, such as the clip
        factor) are fp32 [] on the device.
        """
        ...
