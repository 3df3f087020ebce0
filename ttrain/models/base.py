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


class CachedModel(LanguageModel, Protocol):
    """A model that reads a growing text with caches, see models/cache.py. Sampling is faster then."""

    @property
    def context(self) -> int:
        """Longest text."""
        ...

    def extend(self, graph: Graph, count: int, mask: str) -> Value:
        """Hidden states [count, width] of `count` tokens; the caches hold what comes before, and take these."""
        ...

    def scores(self, rows: Value) -> Value:
        """Scores of the next token after each of these rows of hidden states: [N, width] -> fp32 [N, vocabulary]."""
        ...


class PairModel(CachedModel, Protocol):
    """A model that may have a head that predicts two tokens at once."""

    @property
    def predicts_pairs(self) -> bool:
        """Whether it has that head."""
        ...

    def pair_scores(self, rows: Value) -> tuple[Value, Value]:
        """The last two rows of hidden states under the pair mask, [2, width] -> scores of the two tokens after them,
        fp32 [2, vocabulary], and the gate's for emitting one of them or both, fp32 [1, 2].
        """
        ...
