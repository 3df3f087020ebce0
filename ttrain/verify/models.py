"""Gradients of a whole model against PyTorch autograd in fp64, and the engines against one another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ttrain.autodiff import backward
from ttrain.core.spec import DType
from ttrain.device.base import Device
from ttrain.engine.state import StateTensor
from ttrain.graph.graph import Graph, Value
from ttrain.graph.kinds import Kind
from ttrain.models.base import Model, loss_weights, preparation
from ttrain.nn.initialize import generator_of, initial_value
from ttrain.nn.module import use
from ttrain.verify.cases import as_torch, rounded
from ttrain.verify.compare import Comparison, compare
from ttrain.verify.run import MakeEngine, run_once
from ttrain.verify.tolerances import MODEL, MODEL_COSINE

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
        self.values = {path: self._value(path) for path in self.model.parameters()}
        self.values |= {path: buffer.first_values() for path, buffer in self.model.buffers().items()}
        self.batch = self._batch()

    def _value(self, path: str) -> np.ndarray:
        parameter = self.model.parameters()[path]
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

    def inputs(self) -> dict[str, np.ndarray]:
        """Step inputs by name."""
        fields, counts = preparation(self.model)(self.batch)
        weights = {name: np.asarray(weight, np.float32) for name, weight in loss_weights(counts).items()}
        return {**fields, **weights, "seed": np.asarray(self.seed)}

    def trace_loss(self, graph: Graph) -> Value:
        return self.model.loss(graph, self.rows, training=True)

    def trace(self, graph: Graph) -> None:
        """The loss and the gradient of every trained parameter as layers read it."""
        loss = self.trace_loss(graph)
        graph.output(LOSS, loss)
        parameters = [parameter for parameter in self.model.parameters().values() if parameter.trainable]
        gradients = backward(loss, [use(graph, parameter, self.model.compute) for parameter in parameters])
        for parameter, gradient in zip(parameters, gradients, strict=True):
            graph.output(parameter.path, gradient)

    def run(self, device: Device, make: MakeEngine) -> dict[str, Any]:
        """Loss and gradients by parameter, by an engine."""
        tensors = [buffer.state_tensor for buffer in self.model.buffers().values()]
        for path, parameter in self.model.parameters().items():
            tensors.append(StateTensor(path, parameter.spec, parameter.kind))
            if parameter.has_copy(self.model.compute):
                tensors.append(StateTensor(parameter.copy_name, parameter.read_spec(self.model.compute), Kind.COPY))
        return run_once(device, make, self.trace, {**self.inputs(), **self.values}, tensors)

    def expected(self) -> dict[str, np.ndarray]:
        """The same by PyTorch: each forward op's fp64 reference, differentiated by autograd."""
        graph = Graph()
        loss = self.trace_loss(graph)
        tensors: dict[Value, Any] = {}
        for name, value in graph.inputs.items():
            tensors[value] = as_torch(np.asarray(self.inputs()[name]))
            if value.spec.dtype.is_floating:
                tensors[value] = tensors[value].double()
        leaves: dict[str, torch.Tensor] = {}
        trained = {path for path, parameter in self.model.parameters().items() if parameter.trainable}
        for name, value in graph.state.items():
            path = name.removesuffix("/compute")
            leaf = as_torch(rounded(self.values[path], value.spec.dtype))
            assert leaf is not None
            if path not in trained:
                tensors[value] = leaf.double() if value.spec.dtype.is_floating else leaf
                continue
            leaves[path] = tensors[value] = leaf.double().requires_grad_(True)
        for node in graph.nodes:
            given = [None if value is None else tensors[value] for value in node.inputs]
            results = node.op.reference(*given, **node.attributes)
            results = results if isinstance(results, list | tuple) else [results]
            tensors.update(zip(node.outputs, results, strict=False))
        gradients = torch.autograd.grad(tensors[loss], list(leaves.values()))
        found = {path: gradient.numpy() for path, gradient in zip(leaves, gradients, strict=True)}
        return {LOSS: tensors[loss].detach().numpy(), **found}

    def compared(
        self, got: Mapping[str, Any], expected: Mapping[str, np.ndarray], engine: str, factor: float = 1.0
    ) -> list[Comparison]:
        """One comparison for the loss and one per parameter."""
        dtype = self.model.compute
        found = []
        for name, wanted in expected.items():
            label = {"subject": self.name, "quantity": name if name == LOSS else f"d{name}", "engine": engine}
            least = -1.0 if name == LOSS else 1 - (1 - MODEL_COSINE[dtype]) * factor
            values = np.asarray(got[name]).reshape(wanted.shape)
            found.append(
                compare(values, wanted, dtype, MODEL[dtype] * factor, dtype=dtype, least_cosine=least, **label)
            )
        return found


def equal_engines(
    subject: str, results: Mapping[str, Mapping[str, Any]], dtype: DType, allowed: Any, exact: Mapping[str, bool]
) -> list[Comparison]:
    """Every engine's results against the first one's: to the bit where `exact`, else within `allowed`."""
    from ttrain.verify.ulp import Tolerance

    (first, base), *others = results.items()
    found = []
    for engine, values in others:
        worst: Comparison | None = None
        for name, wanted in base.items():
            if isinstance(wanted, Exception) or isinstance(values.get(name), Exception):
                continue
            bound = Tolerance(0, 0) if exact[engine] else allowed
            one = compare(
                np.asarray(values[name]), np.asarray(wanted), dtype, bound, subject=subject,
                quantity=f"{engine} against {first}", case=name, engine=engine, dtype=dtype,
            )  # fmt: skip
            if worst is None or (one.passed, -one.ulp) < (worst.passed, -worst.ulp):
                worst = one
        if worst is not None:
            found.append(worst)
    return found
