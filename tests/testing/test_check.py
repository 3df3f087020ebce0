"""ttrain.testing for plugins: an op, a model and a kernel that are right pass; one that is wrong is named."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from ttrain.device.base import Kernel
from ttrain.device.torch.device import TorchDevice
from ttrain.models.mlp import MLP
from ttrain.models.settings import MLPConfig
from ttrain.testing import VerifyError, check_model, check_ops


class Doubled(TorchDevice):
    """The CPU with a kernel that is wrong."""

    @property
    def kernels(self) -> dict[str, Kernel]:  # type: ignore[override]
        table = dict(super().kernels)

        def bind(ins: Sequence[Any], outs: Sequence[Any], *_: Any) -> Any:
            return lambda: outs[0].copy_(2 * ins[0])

        return {**table, "relu": dataclasses.replace(table["relu"], bind=bind, overwrites=())}


def test_ops_and_models_that_are_right_pass() -> None:
    check_ops("gelu", "transpose")
    check_model(MLP(MLPConfig(width=8, inputs=5, outputs=3)))


def test_a_wrong_kernel_is_named() -> None:
    with pytest.raises(VerifyError, match=r"relu y \(relu-"):
        check_ops("relu", device=Doubled("cpu", threads=1))
