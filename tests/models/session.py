"""A model, an optimizer and an engine on one CPU thread, as tests use them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from ttrain.core.spec import DType
from ttrain.device.settings import DeviceConfig
from ttrain.engine.dynamic import DynamicEngine
from ttrain.engine.state import State
from ttrain.engine.static import StaticEngine
from ttrain.engine.traced import TracedEngine
from ttrain.models.base import loss_weights, preparation
from ttrain.nn.initialize import initial_value
from ttrain.plan import Plan
from ttrain.train.steps.step_graph import StepGraph

ENGINES = {"dynamic": DynamicEngine, "static": StaticEngine, "traced": TracedEngine}
Batch = Mapping[str, np.ndarray]


def open_cpu() -> Any:
    from ttrain.device.torch.device import open_device

    return open_device(DeviceConfig(name="cpu", threads=1))


def initial_values(model: Any, seed: int) -> dict[str, np.ndarray]:
    """The first value of every parameter by path."""
    return {path: initial_value(parameter, seed) for path, parameter in model.parameters().items()}


def plan_of(device: Any, trace: Any) -> Plan:
    engine = StaticEngine(device, State(device, []))
    return engine.plan(engine.derive(trace))


class Session:
    """Builds the training steps of a run and feeds them."""

    def __init__(
        self, model: Any, optimizer: Any, rows: int, *, engine: str = "static", gradient_accumulation: int = 1,
        device: Any = None, values: Mapping[str, np.ndarray] | None = None, guarded: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        """`options` are the engine's."""
        device = open_cpu() if device is None else device
        if device.uniform_compute:
            model.follow_compute()
        self.graph = StepGraph(model, optimizer, rows, gradient_accumulation, guarded=guarded, chips=device.chips)
        self.state = State(device, self.graph.state_tensors())
        for name, value in (initial_values(model, seed=7) if values is None else values).items():
            self.state.write(name, value)
        self.engine = ENGINES[engine](self.state.device, self.state, **options)
        self.steps = {name: self.engine.build(name, trace) for name, trace in self.graph.train_steps().items()}

    def run(self, trace: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Build and run a step of its own."""
        return self.engine.build("other", trace)(inputs)

    def train(self, batch: Batch, step: int, rates: Mapping[str, float], seed: int = 0) -> dict[str, float]:
        """One optimizer step on a batch of rows * accumulation rows, weighed by its valid targets."""
        batch, weights = self.prepared(batch)
        scalars = {**weights, "seed": seed}
        if self.graph.gradient_accumulation == 1:
            return self.steps["train"]({**batch, **scalars, **rates, "step": step})
        sums: Counter[str] = Counter()
        for part in range(self.graph.gradient_accumulation):
            rows = slice(part * self.graph.rows, (part + 1) * self.graph.rows)
            name = "accumulate_next" if part else "accumulate_first"
            sums.update(self.steps[name]({**{key: array[rows] for key, array in batch.items()}, **scalars}))
        return {**sums, **self.steps["update"]({**rates, "step": step})}

    def prepared(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """The batch as the model wants it, and the weights of its loss terms."""
        fields, counts = preparation(self.graph.model)(batch)
        return fields, loss_weights(counts)

    def evaluate(self, batch: Batch) -> dict[str, float]:
        """The outputs of the evaluation step on one batch."""
        fields, weights = self.prepared(batch)
        return self.run(self.graph.trace_evaluate, {**fields, **weights})

    def parameters(self) -> dict[str, np.ndarray]:
        return {parameter.path: self.state.read(parameter.path) for parameter in self.graph.parameters}

    def gradients(self) -> dict[str, np.ndarray]:
        return {p.path: self.state.read(f"{p.path}/gradient") for p in self.graph.parameters}


def token_batch(vocabulary: int, rows: int, context: int, index: int, masked: int = 0) -> dict[str, np.ndarray]:
    """Random tokens; the first `masked` targets of the first row count for nothing."""
    generator = np.random.default_rng(index)
    tokens, targets = generator.integers(0, vocabulary, (2, rows, context))
    targets[0, :masked] = -1
    return {"tokens": tokens, "targets": targets}


def tensor_by_tensor_equal(left: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray]) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Largest deviation relative to the largest magnitude expected."""
    return float(np.abs(actual - expected).max() / max(np.abs(expected).max(), 1e-12))


FP32, BF16 = DType.FP32, DType.BF16
