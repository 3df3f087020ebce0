"""What models that predict the next token from all before it have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from copy import copy
from typing import Any, TypeVar

from ttrain import ops
from ttrain.core.spec import DType, TensorSpec
from ttrain.graph import Graph, Value
from ttrain.models.base import LOSS_WEIGHT, SCALAR, scored_positions
from ttrain.models.cache import POSITIONS
from ttrain.nn.layers import Embedding, Linear
from ttrain.nn.module import Module, use

Own = TypeVar("Own", bound="Decoder")


class Decoder(Module, ABC):
    """tokens int64 [B, T] -> loss or logits. A model records `hidden`; the head may be the embedding's weight."""

    config: Any
    compute: DType
    embedding: Embedding
    head: Linear | None
    width: int
    context: int  # longest text
    length: int  # of the sequences of a batch
    packed: bool = False  # whether sequences hold several documents, which do not see each other
    logit_cap: float | None = None  # logits become cap * tanh(logits / cap)

    @abstractmethod
    def hidden(self, graph: Graph, rows: int, training: bool, positions: Value | None = None) -> Value:
        """What the head reads: [rows * length, width] in the compute dtype.

        `positions` int64 [rows, length], where given, count from 0 anew in every document of a row.
        """

    def batch_specs(self, rows: int) -> dict[str, TensorSpec]:
        """`tokens`, `targets` and where documents are packed `positions`, int64 [rows, length]; a target below zero
        counts for nothing.
        """
        spec = TensorSpec((rows, self.length), DType.INT64)
        return {"tokens": spec, "targets": spec, **({POSITIONS: spec} if self.packed else {})}

    def at_length(self: Own, length: int) -> Own:
        """The same parameters, recorded on sequences of `length` tokens: the first positions serve them."""
        shorter = copy(self)
        shorter.length = length
        return shorter

    def packing_documents(self: Own) -> Own:
        """The same parameters, recorded on rows of several documents: each has its own attention and positions."""
        packed = copy(self)
        packed.packed = True
        return packed

    def loss(self, graph: Graph, rows: int, training: bool) -> Value:
        """loss_weight * the sum of the cross-entropies in nats, fp32 []."""
        fields = {name: graph.input(name, spec) for name, spec in self.batch_specs(rows).items()}
        hidden = self.hidden(graph, rows, training, fields.get(POSITIONS))
        targets = ops.reshape(fields["targets"], hidden.shape[:1])
        weight = graph.input(LOSS_WEIGHT, SCALAR)
        with graph.scope("loss"):
            if self.logit_cap is None:
                return ops.head_cross_entropy(hidden, self._head(graph), None, targets, weight)[0]
            return ops.cross_entropy(self._capped(ops.linear(hidden, self._head(graph))), targets, weight)

    def logits(self, graph: Graph, rows: int, count: int | None = None) -> Value:
        """Scores of the next token, fp32 [1, vocabulary], at step input `position`; see LanguageModel.logits."""
        hidden = self.hidden(graph, rows, training=False)
        position = scored_positions(graph, count)
        with graph.scope("head"):
            return self.scores(ops.embedding(position, hidden))  # a lookup of rows of the hidden states

    def scores(self, rows: Value) -> Value:
        """Scores of the token after each of these rows of hidden states: [N, width] -> fp32 [N, vocabulary]."""
        return self._capped(ops.cast(ops.linear(rows, self._head(rows.graph)), DType.FP32))

    def _capped(self, logits: Value) -> Value:
        cap = self.logit_cap
        return logits if cap is None else cap * ops.tanh(logits * (1 / cap))

    def _placed(self, table: Value, positions: Value | None) -> Value:
        """Rows of a table [context, n] for the places of a batch's tokens: [length, n], or by positions [B, T, n]."""
        if positions is not None:
            return ops.embedding(positions, table)
        if self.length == self.context:
            return table
        rows = ops.index_select(ops.reshape(table, (1, *table.shape)), range(self.length))
        return ops.reshape(rows, (self.length, *table.shape[1:]))

    def _head(self, graph: Graph) -> Value:
        """Weight [vocabulary, width] of the output head."""
        return use(graph, self.embedding.weight if self.head is None else self.head.weight, self.compute)

    def _specs(self) -> Mapping[str, TensorSpec]:
        return {path: parameter.spec for path, parameter in self.parameters(adapters=False).items()}
