"""The base of models that predict the next token from all before it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import copy
from functools import reduce
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ttrain import ops
from ttrain.core.attention_mask import CAUSAL
from ttrain.core.spec import DType, TensorSpec
from ttrain.graph import Graph, Value
from ttrain.models.base import LOSS_WEIGHT, SCALAR, SEED, Batch, Prepare, prepare_plain, scored_positions
from ttrain.models.cache import POSITIONS, Caches
from ttrain.models.settings import DecoderConfig
from ttrain.nn.experts import Routed, loads, routing_loss
from ttrain.nn.initialize import Constant, Normal
from ttrain.nn.layers import Embedding, Linear, RMSNorm
from ttrain.nn.module import Module, Parameter, Role, use

Own = TypeVar("Own", bound="Decoder")
FUTURE = "future_targets"
STD = 0.02  # of every weight at the start; output projections of the two branches start 1/sqrt(2 layers) smaller
Angles = tuple[Value, Value]  # cos and sin of the places of tokens: [T, R], of packed documents [B, T, R]


def linear(inputs: int, outputs: int, bias: bool | None, std: float = STD, role: Role = Role.HIDDEN) -> Linear:
    """A layer whose weights start as N(0, std)."""
    return Linear(inputs, outputs, bool(bias), Normal(std), Constant(0.0), role)


def _with_future(batch: Batch) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the batch with the targets of the future layer: the next position's target, within a document."""
    fields, counts = prepare_plain(batch)
    targets = batch["targets"]
    following = np.concatenate([targets[:, 1:], np.full_like(targets[:, :1], -1)], 1)
    fields[FUTURE] = np.where(targets < 0, -1, following)
    return fields, counts


class BlockInputs(NamedTuple):
    """Inputs of blocks beside the residual stream [B, T, C]; None for one that there is not."""

    seed: Value | None = None  # of dropout
    positions: Value | None = None  # of the tokens of packed documents, int64 [B, T]
    caches: Caches | None = None  # of the text before
    values: Value | None = None  # what attention adds to its values [B, T, all heads]
    angles: Angles | None = None  # of rotary positions
    mask: str = CAUSAL
    routed: list[Routed] | None = None  # takes in what the routers of experts chose, layer by layer


class Block(Module):
    """Two branches around the residual stream, each reading a norm of it."""

    def __init__(self, norm: Callable[[], Any], attention: Any, feed_forward: Any) -> None:
        self.attention_norm, self.attention = norm(), attention
        self.feed_forward_norm, self.feed_forward = norm(), feed_forward

    def __call__(self, x: Value, inputs: BlockInputs) -> Value:
        """Residual stream x [B, T, C] -> [B, T, C]."""
        x = x + self.attention(self.attention_norm(x), inputs)
        return x + self.feed_forward(self.feed_forward_norm(x), inputs)


class TokenModel(Module, ABC):
    """tokens int64 [B, T] -> hidden states, which heads read: an `embed`, blocks, and a norm behind them."""

    config: Any
    compute: DType
    embedding: Embedding
    blocks: list[Block]
    norm: Any
    width: int
    context: int  # longest text
    length: int  # of the sequences of a batch
    value_embedding: Embedding | None = None  # what values of attention have added to them, token by token

    def batch_specs(self, rows: int) -> dict[str, TensorSpec]:
        """`tokens` and `targets`, int64 [rows, length]; a target below zero counts for nothing."""
        return dict.fromkeys(("tokens", "targets"), TensorSpec((rows, self.length), DType.INT64))

    @abstractmethod
    def embed(self, tokens: Value, placed: Callable[[Value], Value], seed: Value | None) -> tuple[Value, Angles | None]:
        """The residual stream [B, T, C] of tokens [B, T], and the angles of a model with rotary positions.

        `placed` picks the rows of a table [context, n] for the places of the tokens.
        """

    @abstractmethod
    def scores(self, rows: Value) -> Value:
        """Scores of the token after each of these rows of hidden states: [N, width] -> fp32 [N, vocabulary]."""

    @abstractmethod
    def log_probs(self, rows: Value, targets: Value, entropy: bool = False) -> tuple[Value, ...]:
        """Log-probabilities of tokens after rows of hidden states [N, width], in nats; see ops.head_log_probs.

        `targets` int64 [N] may be below zero, where the result is 0.
        """

    def hidden(
        self, graph: Graph, rows: int, training: bool, positions: Value | None = None, tokens: Value | None = None
    ) -> Value:
        """Return `states` as the head reads them, [rows * length, width].

        `positions` int64 [rows, length], where given, count from 0 anew in every document of a row.
        """
        return self._flat(self.states(graph, rows, training, BlockInputs(positions=positions), tokens))

    def states(
        self, graph: Graph, rows: int, training: bool, inputs: BlockInputs, tokens: Value | None = None
    ) -> Value:
        """Return the last norm's output, [rows, length, width] in the compute dtype.

        `tokens` int64 [rows, length] are the step input of that name where not given.
        """
        if training and self.config.dropout:
            inputs = inputs._replace(seed=graph.input("seed", SEED))
        if tokens is None:
            tokens = graph.input("tokens", self.batch_specs(rows)["tokens"])
        return self._read(tokens, lambda table: self._placed(table, inputs.positions), inputs, training)

    def extend(self, graph: Graph, count: int, mask: str = CAUSAL, texts: int = 1) -> Value:
        """Hidden states [count, width] of `count` tokens of some texts, of which the caches hold what comes before.

        Step inputs and caches are those of models/cache.py. A text has at most `length` tokens.
        """
        caches = Caches(graph, count, self.length, mask, texts)
        given = caches.tokens, lambda table: ops.embedding(caches.positions, table)
        return self._flat(self._read(*given, BlockInputs(caches=caches, mask=mask), training=False))

    def _read(self, tokens: Value, placed: Callable[[Value], Value], inputs: BlockInputs, training: bool) -> Value:
        """Embedding, blocks and the last norm: [B, T] -> [B, T, C]."""
        graph = tokens.graph
        with graph.scope("embedding"):
            x, angles = self.embed(tokens, placed, inputs.seed)
            values = None if self.value_embedding is None else self.value_embedding(tokens, self.compute)
        inputs = inputs._replace(values=values, angles=angles)
        for index, block in enumerate(self.blocks):
            with graph.scope(f"blocks.{index}"), graph.segment(training and self.config.recompute == "block"):
                x = block(x, inputs)
        with graph.scope("norm"):
            return self.norm(x)

    def _flat(self, hidden: Value) -> Value:
        """[B, T, C] as [B * T, C]."""
        return ops.reshape(hidden, (hidden.spec.size // self.width, self.width))

    def _placed(self, table: Value, positions: Value | None) -> Value:
        """Rows of a table [context, n] for the places of a batch's tokens: [length, n], or by positions [B, T, n]."""
        if positions is not None:
            return ops.embedding(positions, table)
        if self.length == self.context:
            return table
        rows = ops.index_select(ops.reshape(table, (1, *table.shape)), range(self.length))
        return ops.reshape(rows, (self.length, *table.shape[1:]))

    def logits(self, graph: Graph, rows: int, count: int | None = None) -> Value:
        """Scores of the next token, fp32 [1, vocabulary], at step input `position`; see LanguageModel.logits."""
        hidden = self.hidden(graph, rows, training=False)
        position = scored_positions(graph, count)
        with graph.scope("head"):
            return self.scores(ops.embedding(position, hidden))  # a lookup of rows of the hidden states


class Decoder(TokenModel):
    """A model that predicts the next token. Its head may be the embedding's weight."""

    head: Linear | None
    vocabulary: int
    packed: bool = False  # whether sequences hold several documents, which do not see each other
    classes: Linear | None = None  # head of labels, see objectives/texts.py
    stated: tuple[str, dict[str, Any]] = "ForCausalLM", {}  # end of its class in Transformers, more for config.json
    pooling = ""  # of the vectors of texts
    future: Linear | None = None  # what hidden states have added to them to predict the token after the next

    def finish(self, values: int) -> None:
        """Add the heads at the end of construction, name the parameters, and start them as the config's switches say.

        `values` is the width of what is added to all heads of values.
        """
        self.head = None if self.config.tied else linear(self.width, self.vocabulary, bias=False, role=Role.OUTPUT)
        if self.config.value_embeddings:
            self.value_embedding = Embedding(self.vocabulary, values, Normal(STD))
        if self.config.future_weight:
            self.future = Linear(self.width, self.width, bias=False, weight_initializer=Normal(STD))
        self.name_parameters()
        ratio = self.config.width_ratio
        for path, parameter in self.parameters().items():
            parameter.width_ratio = ratio
            if parameter.role is Role.HIDDEN and isinstance(parameter.initializer, Normal):
                parameter.initializer = Normal(parameter.initializer.std / math.sqrt(ratio))
            if self.config.zero_init and path.endswith((".projection.weight", ".down.weight")):
                parameter.initializer = Constant(0.0)

    def batch_specs(self, rows: int) -> dict[str, TensorSpec]:
        """Packed documents add `positions`, a future layer `future_targets`."""
        further = [*([POSITIONS] if self.packed else []), *([FUTURE] if self.future else [])]
        return super().batch_specs(rows) | dict.fromkeys(further, TensorSpec((rows, self.length), DType.INT64))

    @property
    def prepare(self) -> Prepare:
        """Prepare a batch, see models.base; with a future layer it adds what that predicts."""
        return prepare_plain if self.future is None else _with_future

    def at_length(self: Own, length: int) -> Own:
        """Return the model with these parameters on sequences of `length` tokens, which the first positions serve."""
        shorter = copy(self)
        shorter.length = length
        return shorter

    def packing_documents(self: Own) -> Own:
        """Return the model on rows of several documents: each has its own attention and positions."""
        packed = copy(self)
        packed.packed = True
        return packed

    def loss(self, graph: Graph, rows: int, training: bool) -> Value:
        """The first of `loss_and_metrics`."""
        return self.loss_and_metrics(graph, rows, training)[0]

    def loss_and_metrics(self, graph: Graph, rows: int, training: bool) -> tuple[Value, dict[str, Value]]:
        """loss_weight * the sum of the cross-entropies in nats, fp32 []; and what routers of experts tell, by name.

        In training with a future layer's cross-entropies, and what routers add; see nn/experts.py.
        """
        whole = {POSITIONS: range(self.length)}  # for example one document in a row
        specs = self.batch_specs(rows)
        fields = {name: graph.input(name, spec, whole.get(name, 0)) for name, spec in specs.items()}
        inputs = BlockInputs(positions=fields.get(POSITIONS), routed=[])
        hidden = self._flat(self.states(graph, rows, training, inputs))
        with graph.scope("loss"):
            terms = [self._cross_entropy(hidden, fields["targets"])]
            if self.future is not None and training:
                ahead = self._cross_entropy(hidden + self.future(hidden), fields[FUTURE])
                terms.append(self.config.future_weight * ahead)
            added, metrics = self._routing(inputs.routed or [], fields["targets"], training)
        return reduce(ops.add, [*terms, *added] if training else terms), metrics

    def _routing(self, routed: list[Routed], targets: Value, training: bool) -> tuple[list[Value], dict[str, Value]]:
        """Return terms of the loss, and numbers to log, in evaluations also the loads of experts."""
        if not routed:
            return [], {}
        weights = targets.graph.input(LOSS_WEIGHT, SCALAR), self.config.balance_weight, self.config.router_z_weight
        return routing_loss(routed, ops.valid(targets), *weights, tells_loads=not training)

    def expert_loads(self, graph: Graph, rows: int) -> Value:
        """Count the pairs of each expert in each row that a step then trains on, fp32 [rows, E]."""
        specs = self.batch_specs(rows)
        inputs = BlockInputs(positions=graph.input(POSITIONS, specs[POSITIONS]) if self.packed else None, routed=[])
        self.states(graph, rows, False, inputs)
        assert inputs.routed
        return loads(inputs.routed, ops.valid(graph.input("targets", specs["targets"])))

    def _cross_entropy(self, hidden: Value, targets: Value) -> Value:
        targets, weight = ops.reshape(targets, hidden.shape[:1]), hidden.graph.input(LOSS_WEIGHT, SCALAR)
        if self.config.logit_cap is None:
            return ops.head_cross_entropy(self._narrowed(hidden), self._head(hidden.graph), None, targets, weight)[0]
        return ops.cross_entropy(self._capped(self._scores(hidden)), targets, weight)

    def scores(self, rows: Value) -> Value:
        return self._capped(ops.cast(self._scores(rows), DType.FP32))

    def log_probs(self, rows: Value, targets: Value, entropy: bool = False) -> tuple[Value, ...]:
        if self.config.logit_cap is None:
            return ops.head_log_probs(self._narrowed(rows), self._head(rows.graph), None, targets, entropy)
        return ops.log_probs(self.scores(rows), targets, entropy)

    def _scores(self, rows: Value) -> Value:
        return ops.linear(self._narrowed(rows), self._head(rows.graph))

    def _narrowed(self, hidden: Value) -> Value:
        """Hidden states as the head reads them: a sum over more features has to stay as large (muP)."""
        ratio = self.config.width_ratio
        return hidden if ratio == 1 else hidden * (1 / ratio)

    def _capped(self, logits: Value) -> Value:
        cap = self.config.logit_cap
        return logits if cap is None else cap * ops.tanh(logits * (1 / cap))

    def _head(self, graph: Graph) -> Value:
        """Weight [vocabulary, width] of the output head."""
        return use(graph, self.embedding.weight if self.head is None else self.head.weight, self.compute)


class Heads(Module):
    """Parts that queries, keys and values may have before they meet: norms of each head, embeddings of the tokens."""

    def __init__(self, config: DecoderConfig, head_width: int, values: int, eps: float) -> None:
        """`values` is the width of all heads of values."""
        norms = [RMSNorm(head_width, eps) if config.qk_norm else None for _ in range(2)]
        self.query_norm, self.key_norm = norms
        self.value_mix = Parameter((values,), Constant(1.0)) if config.value_embeddings else None
        self._scale = config.attention_scale(head_width)

    def with_embedding(self, v: Value, added: Value | None) -> Value:
        """Values [B, T, all heads] with the embeddings of their tokens, of the same shape."""
        if self.value_mix is None or added is None:
            return v
        return v + added * use(v.graph, self.value_mix, v.spec.dtype)
