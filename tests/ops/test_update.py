"""Updates leave gradients alone, and tensors that lie side by side are one vector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tests.ops.harness import bind_node, node_of
from tests.ttnn.runs import adamw
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.base import Chain
from ttrain.device.torch.device import TorchDevice
from ttrain.device.torch.kernels.common import flatten, runs
from ttrain.ops.update import Rule
from ttrain.optim.base import EXAMPLE

SHAPES = [(4, 8), (257,), (3, 5, 7), (), (64,)]  # gaps after most of them
SCALAR = TensorSpec((), DType.FP32)
ADAMW = adamw().rule(EXAMPLE, True)
FP32 = [DType.FP32] * 4


def spaced(device: TorchDevice, shapes: Sequence[tuple[int, ...]], dtype: DType, unit: int = 64) -> list[torch.Tensor]:
    """Tensors of one arena, each at a multiple of `unit` elements."""
    specs = [TensorSpec(shape, dtype) for shape in shapes]
    starts = np.concatenate([[0], np.cumsum([-(-spec.size // unit) * unit for spec in specs])])
    arena = device.allocate_arena(int(starts[-1]) * dtype.itemsize, "a run")
    return [device.place(arena, int(start) * dtype.itemsize, spec) for start, spec in zip(starts, specs, strict=False)]


def apart(device: TorchDevice, shapes: Sequence[tuple[int, ...]], dtype: DType) -> list[torch.Tensor]:
    return [device.allocate(TensorSpec(shape, dtype)) for shape in shapes]


PLACED = {"side by side": spaced, "apart": apart}


class Update:
    """One optimizer kernel on tensors filled with the same numbers every time; `dtypes` of the lists, in order."""

    def __init__(
        self, device: TorchDevice, rule: Rule, place: Any, dtypes: Sequence[DType], clipped: bool, rounds: bool = False
    ) -> None:
        self.device, self.rule, self.clipped = device, rule, clipped
        self.slots = [place(device, SHAPES, dtype) for dtype in dtypes[: 2 + len(rule.slots)]]
        self.written = [tensor for index, slot in enumerate(self.slots) if index != 1 for tensor in slot]
        self.scalars = {key: device.allocate(SCALAR) for key in ("lr", "step", "factor")}
        self.seed = device.allocate(TensorSpec((), DType.INT64)) if rounds else None
        generator = torch.Generator().manual_seed(0)
        for parameter in self.slots[0]:
            parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def bind(self) -> Any:
        numbers = [self.scalars["lr"], self.scalars["step"], self.scalars["factor"] if self.clipped else None]
        given = [*(tensor for slot in self.slots for tensor in slot), *numbers, self.seed]
        stochastic = () if self.seed is None else tuple(range(len(self.slots) - 1))
        attributes = {"count": len(SHAPES), "rule": self.rule, "stochastic": stochastic, "stream": 16}
        return bind_node(self.device, node_of("update", given, attributes), given)[0]

    def feed(self, step: int, lr: float, factor: float) -> None:
        """New gradients and scalars."""
        generator = torch.Generator().manual_seed(step)
        for gradient in self.slots[1]:
            gradient.copy_(torch.randn(gradient.shape, generator=generator))
        for key, value in (("lr", lr), ("step", step), ("factor", factor)):
            self.device.upload(self.scalars[key], np.asarray(value, np.float32))
        if self.seed is not None:
            self.device.upload(self.seed, np.asarray(2**50 + step, np.int64))


def test_tensors_side_by_side_are_updated_in_one_call() -> None:
    device = TorchDevice("cpu", threads=1)
    together = Update(device, ADAMW, spaced, FP32, clipped=False)
    launch = together.bind()
    assert not isinstance(launch, Chain)
    assert len(launch.args[0]) == 1 and launch.args[0][0].numel() > sum(t.numel() for t in together.slots[0])
    scattered = Update(device, ADAMW, apart, FP32, clipped=False)
    assert len(scattered.bind().args[0]) == len(SHAPES)


def test_gaps_stay_zero_and_gradients_as_they_were(device: TorchDevice) -> None:
    update = Update(device, ADAMW, spaced, FP32, clipped=True)
    launch = update.bind()
    for step in (1, 2):
        update.feed(step, 0.1, 0.5)
        before = [gradient.clone() for gradient in update.slots[1]]
        launch()
        assert all(map(torch.equal, update.slots[1], before))
    for slot in update.slots:
        (whole,) = flatten(slot) or [None]
        assert whole is not None
        inside = torch.zeros_like(whole, dtype=torch.bool)
        for tensor in slot:
            start = tensor.storage_offset() - slot[0].storage_offset()
            inside[start : start + tensor.numel()] = True
        assert not whole[~inside].any()


def test_tensors_at_equal_offsets_in_every_slot_are_one_vector() -> None:
    device = TorchDevice("cpu", threads=1)
    wide, narrow = spaced(device, SHAPES, DType.FP32), spaced(device, SHAPES, DType.BF16)
    flat = flatten(wide, narrow)
    assert flat is not None and flat[0].numel() == flat[1].numel() and flat[0].data_ptr() == wide[0].data_ptr()
    assert flatten(wide, spaced(device, SHAPES, DType.FP32, 32)) is None
    base = torch.zeros(8, 8)
    # In another order, far apart, in other storages, not contiguous.
    for placed in (wide[::-1], [wide[0], wide[2]], apart(device, SHAPES, DType.FP32), [], [base.t(), base.t()]):
        assert flatten(placed) is None


def test_runs_never_cover_a_gap() -> None:
    """A norm over them must not read what lies between two tensors."""
    device = TorchDevice("cpu", threads=1)
    placed = spaced(device, [(64,), (2, 64), (3,), (64,), (64,)], DType.FP32)
    flat = flatten(placed)
    assert flat is not None
    flat[0].fill_(float("nan"))
    for tensor in placed:
        tensor.fill_(1.0)
    covering = runs(placed)
    assert [run.numel() for run in covering] == [195, 128]
    assert not any(run.isnan().any() for run in covering)
