"""The update step alone, on gradients that a test writes: what the tests of optimizers share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tests.models.session import ENGINES, open_cpu
from ttrain.core.spec import DType
from ttrain.engine.state import State
from ttrain.graph import Kind
from ttrain.nn.initialize import Normal
from ttrain.nn.module import Module, Parameter
from ttrain.optim.groups import learning_rates
from ttrain.train.steps.step_graph import StepGraph

SEED = 2**45 + 12345


class Head(Module):
    def __init__(self) -> None:
        self.weight = Parameter((70, 3), Normal(1.0))
        self.bias = Parameter((70,), Normal(1.0), follows_compute=False)


class Parameters(Module):
    """Tensors without a model: odd sizes, a size of one, and two that belong together."""

    def __init__(self, compute: DType = DType.FP32) -> None:
        self.config, self.compute = None, compute
        shapes = {"matrix": (4, 33), "vector": (7,), "one": (1,), "cube": (2, 3, 5)}
        for name, shape in shapes.items():
            setattr(self, name, Parameter(shape, Normal(1.0)))
        self.head = Head()
        self.name_parameters()


class Vector(Module):
    """One tensor."""

    def __init__(self, size: int, compute: DType = DType.FP32) -> None:
        self.config, self.compute = None, compute
        self.weight = Parameter((size,), Normal(1.0))
        self.name_parameters()


def gradient(path: str, shape: tuple[int, ...], step: int) -> np.ndarray:
    generator = np.random.default_rng([step, *path.encode()])
    return generator.standard_normal(shape).astype(np.float32)


class Updates:
    """Accumulation makes the update a step of its own, and that of a guarded run also the norm before it."""

    def __init__(
        self, model: Any, optimizer: Any, engine: str = "static", device: Any = None, master: DType = DType.FP32,
        rate: Callable[[int], float] = lambda step: 1.0, **options: Any,
    ) -> None:  # fmt: skip
        for parameter in model.parameters().values():
            parameter.master = master
        self.model, self.config, self.paths = model, optimizer.config, list(model.parameters())
        self.graph = StepGraph(model, optimizer, rows=1, gradient_accumulation=2, **options)
        self.state = State(device or open_cpu(), self.graph.state_tensors())
        self.engine = ENGINES[engine](self.state.device, self.state)
        traces = self.graph.train_steps()
        self.built = {name: self.engine.build(name, traces[name]) for name in ("norm", "update") if name in traces}
        self.rates = learning_rates(model.parameters(), optimizer.config, rate)
        self.write({path: gradient(path, parameter.shape, 99) for path, parameter in model.parameters().items()})

    def write(self, values: Mapping[str, np.ndarray]) -> None:
        for name, array in values.items():
            self.state.write(name, array)

    def advance(self, step: int, **given: Any) -> dict[str, Any]:
        """One update on random gradients."""
        for path, parameter in self.model.parameters().items():
            self.state.write(f"{path}/gradient", gradient(path, parameter.shape, step))
        return self.run(step, **given)

    def run(self, step: int, **given: Any) -> dict[str, Any]:
        """One update on the gradients that were written."""
        outputs: dict[str, Any] = {}
        for built in self.built.values():
            inputs = {**self.rates(step), "step": step, "rounding_seed": SEED + step, **outputs, **given}
            outputs |= built({name: value for name, value in inputs.items() if name in built.inputs})
        return outputs

    def saved(self) -> dict[str, np.ndarray]:
        return {name: self.state.read(name) for name in self.state.names(Kind.PARAMETER, Kind.OPTIMIZER)}
