"""One matrix product as work: both factors stay on the device, the product overwrites the one before."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import numpy as np

from ttrain.bench.contender import Contender
from ttrain.bench.workload import Case, ProductWork
from ttrain.config import build
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.settings import DeviceConfig
from ttrain.engine.settings import EngineConfig
from ttrain.engine.state import State, StateTensor
from ttrain.graph.graph import Graph
from ttrain.graph.kinds import Kind

A, B, C = "a", "b", "c"


def product_work(case: Case) -> ProductWork:
    """The work of a case that is a product."""
    assert isinstance(case.work, ProductWork)
    return case.work


class ProductContender(Contender):
    """A contender whose loss is the sum of the product's sizes, so that all of it is compared."""

    def loss(self, handle: Any) -> float:
        return float(np.abs(self.weight(""), dtype=np.float64).sum())


class EngineProduct(ProductContender):
    """The product as an engine of ours runs it: one node, its result stored."""

    side = "ttrain"

    def __init__(self, name: str, case: Case, device: DeviceConfig, engine: EngineConfig) -> None:
        self.name, self._case = name, case
        self._device_config, self._engine_config = device, replace(engine, name=name)
        self.description = f"op matmul by engine={name}"

    def build(self) -> None:
        work = product_work(self._case)
        self.device = build.build_device(self._device_config, self._case.dtypes)
        self.spec = TensorSpec((work.size, work.size), self._case.dtypes.compute)
        kinds = {A: Kind.PARAMETER, B: Kind.PARAMETER, C: Kind.GRADIENT}
        self.state = State(self.device, [StateTensor(name, self.spec, kind) for name, kind in kinds.items()])
        for name, values in zip((A, B), work.factors(self._case.seed), strict=True):
            self.state.write(name, values)
        self.engine = build.build_engine(self._engine_config, self.device, self.state)
        self.built = self.engine.build("product", self.trace)

    def trace(self, graph: Graph) -> None:
        from ttrain import ops

        a, b = (graph.state_value(name, self.spec, Kind.PARAMETER) for name in (A, B))
        ops.assign(graph.state_value(C, self.spec, Kind.GRADIENT), ops.matmul(a, b))

    def step(self, number: int) -> None:
        self.built({})

    def weight(self, path: str) -> np.ndarray:
        return self.state.read(C)

    def synchronize(self) -> None:
        self.device.synchronize()

    def facts(self) -> dict[str, Any]:
        return {"counters": asdict(self.engine.counters)}

    def close(self) -> None:
        self.engine.close()
        self.device.close()


class TorchProduct(ProductContender):
    """torch.mm into a tensor that exists."""

    side = "PyTorch"
    description = "torch.mm(a, b, out=c)"

    def __init__(self, name: str, case: Case, device: DeviceConfig) -> None:
        self.name, self._case, self._device_config = name, case, device

    def build(self) -> None:
        import torch

        device = build.build_device(self._device_config)  # it also sets the number of threads
        place = getattr(device, "device", torch.device("cpu"))
        kind = torch.bfloat16 if self._case.dtypes.compute is DType.BF16 else torch.float32
        factors = product_work(self._case).factors(self._case.seed)
        self._a, self._b = (torch.from_numpy(array).to(place, kind) for array in factors)
        self._c = torch.zeros_like(self._a)

    def step(self, number: int) -> None:
        import torch

        torch.mm(self._a, self._b, out=self._c)

    def weight(self, path: str) -> np.ndarray:
        return self._c.float().cpu().numpy().copy()

    def synchronize(self) -> None:
        import torch

        if self._c.is_cuda:
            torch.cuda.synchronize(self._c.device)
