"""One matrix product as work: both factors stay on the device, the product overwrites the one before."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ttrain import ops
from ttrain.bench.baselines import PyTorchContender
from ttrain.bench.engines import EngineContender
from ttrain.bench.workload import ProductWork
from ttrain.config import build
from ttrain.core.spec import DType, TensorSpec
from ttrain.engine.state import State, StateTensor
from ttrain.graph import Graph, Kind
from ttrain.parallel.world import World

A, B, C = "a", "b", "c"


class EngineProduct(EngineContender):
    """The product as an engine of ours runs it: one node, its result stored."""

    def build(self) -> None:
        case, work = self.case, self.case.work
        assert isinstance(work, ProductWork)
        self._world, self.device = World(), build.build_device(self._device_config, case.dtypes)
        spec, kinds = TensorSpec((work.size, work.size), case.dtypes.compute), (Kind.PARAMETER, Kind.PARAMETER)
        held = dict(zip((A, B, C), (*kinds, Kind.GRADIENT), strict=True))
        self.state = State(self.device, [StateTensor(name, spec, kind) for name, kind in held.items()])
        for name, values in zip((A, B), work.factors(case.seed), strict=True):
            self.state.write(name, values)

        def trace(graph: Graph) -> None:
            a, b, c = (graph.state_value(name, spec, kind) for name, kind in held.items())
            ops.assign(c, ops.matmul(a, b))

        self.engine = build.build_engine(self._engine_config, self.device, self.state)
        self.built = self.engine.build("product", trace)

    def step(self, number: int) -> None:
        self.built({})

    def loss(self, handle: Any) -> float:
        return _sum(self.weight(C))

    def weight(self, path: str) -> np.ndarray:
        return self.state.read(C)


class TorchProduct(PyTorchContender):
    """torch.mm into a tensor that exists."""

    def build(self) -> None:
        work = self.case.work
        assert isinstance(work, ProductWork)
        device = build.build_device(self._device_config)  # it also sets the number of threads
        self._device = getattr(device, "device", torch.device("cpu"))
        kind = torch.bfloat16 if self.case.dtypes.compute is DType.BF16 else torch.float32
        self._a, self._b = (torch.from_numpy(each).to(self._device, kind) for each in work.factors(self.case.seed))
        self._c = torch.zeros_like(self._a)
        self.description = "torch.mm(a, b, out=c)"

    def step(self, number: int) -> None:
        torch.mm(self._a, self._b, out=self._c)

    def loss(self, handle: Any) -> float:
        return _sum(self.weight(C))

    def weight(self, path: str) -> np.ndarray:
        return self._c.float().cpu().numpy().copy()


def _sum(product: np.ndarray) -> float:
    """Return the sum of the sizes, which stands for a loss, so that all of the product is compared."""
    return float(np.abs(product, dtype=np.float64).sum())
