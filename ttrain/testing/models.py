"""Loss and gradients of a whole model against PyTorch autograd in fp64."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ttrain.autodiff import backward
from ttrain.device.base import Device
from ttrain.engine.state import StateTensor
from ttrain.graph import Graph, Kind
from ttrain.models.base import Model, loss_weights, preparation
from ttrain.nn.initialize import generator_of, initial_value
from ttrain.nn.module import use
from ttrain.testing.cases import reference_gradients, rounded
from ttrain.testing.compare import Comparison, compare
from ttrain.testing.run import MakeEngine, run_once
from ttrain.testing.tolerances import MODEL, MODEL_COSINE

LOSS = "loss"
_SPREAD = 0.02  # standard deviation of what is added to parameters that start at 0 or 1, so that every path matters


@dataclass
class ModelTrial:
    """One model with fixed parameters and one batch."""

    name: str
    model: Model
    rows: int
    seed: int

    def __post_init__(self) -> None:
        self.parameters = self.model.parameters()
        self.trained = {path: each for path, each in self.parameters.items() if each.trainable}
        self.values = {path: self._value(path) for path in self.parameters}
        self.values |= {path: buffer.first_values() for path, buffer in self.model.buffers().items()}
        fields, counts = preparation(self.model)(self._batch())
        weights = {name: np.asarray(weight, np.float32) for name, weight in loss_weights(counts).items()}
        self.inputs: dict[str, np.ndarray] = {**fields, **weights, "seed": np.asarray(self.seed)}

    def _value(self, path: str) -> np.ndarray:
        parameter = self.parameters[path]
        noise = generator_of(self.seed, f"verify {path}").standard_normal(parameter.shape) * _SPREAD
        values = rounded(initial_value(parameter, self.seed) + noise, parameter.spec.dtype)
        return np.pad(values, [(0, parameter.padding), *[(0, 0)] * (values.ndim - 1)])

    def _batch(self) -> dict[str, np.ndarray]:
        """Random rows; every third target of a language model is missing."""
        generator, fields = generator_of(self.seed, "verify batch"), {}
        vocabulary = getattr(self.model.config, "vocabulary", None) or 2
        for name, spec in self.model.batch_specs(self.rows).items():
            if spec.dtype.is_floating:
                fields[name] = rounded(generator.standard_normal(spec.shape), spec.dtype)
            else:
                fields[name] = generator.integers(0, vocabulary, spec.shape)
                if name == "targets":
                    fields[name].reshape(-1)[::3] = -1
                elif name == "positions":  # three documents a row
                    fields[name][:] = np.arange(spec.shape[-1]) % -(-spec.shape[-1] // 3)
        return fields

    def trace(self, graph: Graph) -> None:
        """Record the loss and the gradient of every trained parameter as layers read it."""
        loss = self.model.loss(graph, self.rows, training=True)
        graph.output(LOSS, loss)
        gradients = backward(loss, [use(graph, parameter, self.model.compute) for parameter in self.trained.values()])
        for path, gradient in zip(self.trained, gradients, strict=True):
            graph.output(path, gradient)

    def run(self, device: Device, make: MakeEngine) -> dict[str, Any]:
        """Return loss and gradients by parameter, as an engine computes them."""
        tensors = [buffer.state_tensor for buffer in self.model.buffers().values()]
        for path, parameter in self.parameters.items():
            tensors.append(StateTensor(path, parameter.spec, parameter.kind))
            if parameter.has_copy(self.model.compute):
                tensors.append(StateTensor(parameter.copy_name, parameter.read_spec(self.model.compute), Kind.COPY))
        return run_once(device, make, self.trace, {**self.inputs, **self.values}, tensors)

    def expected(self) -> dict[str, np.ndarray]:
        """Return the same by PyTorch: each forward op's fp64 reference, differentiated by autograd."""
        graph = Graph()
        loss = self.model.loss(graph, self.rows, training=True)
        read = {name.removesuffix("/compute"): value for name, value in graph.state.items()}
        state = {value.name: rounded(self.values[path], value.spec.dtype) for path, value in read.items()}
        leaves = {path: value for path, value in read.items() if path in self.trained}
        found, gradients = reference_gradients(graph, {**self.inputs, **state}, loss, leaves)
        return {LOSS: found, **gradients}

    def compared(
        self, got: Mapping[str, Any], expected: Mapping[str, np.ndarray], engine: str, factor: float = 1.0
    ) -> Iterator[Comparison]:
        """Yield one comparison for the loss and one per parameter."""
        dtype = self.model.compute
        for name, wanted in expected.items():
            least, quantity = 1 - (1 - MODEL_COSINE[dtype]) * factor, f"d{name}"
            if name == LOSS:
                least, quantity = -1.0, LOSS
            yield compare(
                np.reshape(got[name], wanted.shape), wanted, dtype, MODEL[dtype] * factor,
                subject=self.name, quantity=quantity, engine=engine, dtype=dtype, least_cosine=least,
            )  # fmt: skip
