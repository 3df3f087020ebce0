"""What a model is to the rest of ttrain."""

from __future__ import annotations

from typing import Any, Protocol

from ttrain.core.spec import DType, TensorSpec
from ttrain.graph import Graph, Value
from ttrain.nn.module import Parameter

SCALAR = TensorSpec((), DType.FP32)
SEED = TensorSpec((), DType.INT64)
LOSS_WEIGHT = "loss_weight"  # step input fp32 []: the loss is loss_weight * sum over the batch


class Model(Protocol):
    """Records a forward pass on symbolic tensors. Built from its small config and the compute dtype.

    Step inputs that a model declares while it records: the fields of `batch_specs`, `loss_weight` fp32 [], and where it
    draws random numbers `seed` int64 [].
    """

    config: Any
    compute: DType

    @property
    def parameter_count(self) -> int:
        """Number of trained elements; tied parameters count once."""
        ...

    def parameters(self) -> dict[str, Parameter]:
        """Parameters by path, tied ones once."""
        ...

    def follow_compute(self) -> None:
        """Let layers read every parameter in the compute dtype."""
        ...

    def batch_specs(self, rows: int) -> dict[str, TensorSpec]:
        """Specs of the batch's fields for `rows` sequences or examples."""
        ...

    def loss(self, graph: Graph, rows: int, training: bool) -> Value:
        """The loss fp32 []. With `training` it can be differentiated and dropout is on."""
        ...


class LanguageModel(Model, Protocol):
    """A model that can be sampled from."""

    def logits(self, graph: Graph, rows: int) -> Value:
        """Scores of the next token, fp32 [1, vocabulary], at one position.

        Declares the inputs `tokens` int64 [rows, context] and `position` int64 [], an index into the rows laid end to
        end: with one row, the place of the last token of the text.
        """
        ...
