"""A multilayer perceptron on mean squared error."""

from __future__ import annotations

from itertools import pairwise

from ttrain import ops
from ttrain.core.spec import DType, TensorSpec
from ttrain.graph import Graph, Value
from ttrain.models.base import LOSS_WEIGHT, SCALAR
from ttrain.models.settings import MLPConfig
from ttrain.nn.layers import Linear
from ttrain.nn.module import Module, Role


class MLP(Module):
    """inputs fp32 [rows, inputs] -> predictions [rows, outputs]: linear layers with an activation between them.

    Weights and biases start as torch.nn.Linear's do: uniform in +-1/sqrt(inputs of the layer).
    """

    def __init__(self, config: MLPConfig, compute: DType = DType.FP32) -> None:
        self.config, self.compute = config, compute
        self.inputs = config.inputs or config.width
        self.outputs = config.outputs or config.width
        widths = [self.inputs, *[config.width] * (config.layers - 1), self.outputs]
        self.layers = [Linear(*sizes, bias=config.bias) for sizes in pairwise(widths)]
        self.layers[0].weight.role, self.layers[-1].weight.role = Role.INPUT, Role.OUTPUT
        self.name_parameters()

    def batch_specs(self, rows: int) -> dict[str, TensorSpec]:
        """`inputs` [rows, inputs], which are read in the compute dtype, and `targets` fp32 [rows, outputs]."""
        return {"inputs": TensorSpec((rows, self.inputs), self.compute), "targets": TensorSpec((rows, self.outputs))}

    def predict(self, graph: Graph, rows: int) -> Value:
        """Predictions [rows, outputs] in the compute dtype."""
        x = graph.input("inputs", self.batch_specs(rows)["inputs"])
        for index, layer in enumerate(self.layers):
            with graph.scope(f"layers.{index}"):
                x = layer(x)
                x = x if layer is self.layers[-1] else ops.activation(x, self.config.activation)
        return x

    def loss(self, graph: Graph, rows: int, training: bool) -> Value:
        """loss_weight * the sum of squared errors, fp32 []."""
        prediction = ops.cast(self.predict(graph, rows), DType.FP32)
        targets = graph.input("targets", self.batch_specs(rows)["targets"])
        with graph.scope("loss"):
            return ops.squared_error(prediction, targets, graph.input(LOSS_WEIGHT, SCALAR))
