"""AGILLM-3: a pre-norm transformer that compares queries and keys in a space of any rank, with two heads.

The AR head predicts the next token from a causal pass. The SAT head predicts the two tokens after a window of two
positions, from a pass in which the two positions of an aligned pair see each other; its gate tells whether to emit one
token or two.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ttrain import ops
from ttrain.core.attention_mask import CAUSAL, FULL, PAIRS, AttentionMask
from ttrain.core.spec import DType, TensorSpec
from ttrain.graph import Graph, Value
from ttrain.models.agillm_weights import AGILLMWeights
from ttrain.models.agillm_windows import GATE_WEIGHT, SAT_WEIGHT, Windows
from ttrain.models.base import LOSS_WEIGHT, SCALAR, Batch, Prepare, prepare_plain, valid_targets
from ttrain.models.decoder import Block, BlockInputs, TokenModel
from ttrain.models.settings import AGILLMConfig
from ttrain.nn.initialize import Orthogonal
from ttrain.nn.layers import Dropout, Embedding, LayerNorm, Linear
from ttrain.nn.module import Module, Parameter, Role, use
from ttrain.ops.matmul import attention_scale

MASKS = (CAUSAL, PAIRS)  # of the two passes, in the order of their dropout streams
GATE_CLASSES = 2  # emit one token, emit two


class RankAttention(Module):
    """Multi-head attention with scores (q U)(k U)^T / sqrt(head width): y [B, T, C] -> branch [B, T, C].

    `rank_matrix` U [head width, rank] is one matrix for all heads, queries and keys of the layer. Folded, queries go
    through M = U U^T and keys stay as they are: the same scores at head width instead of rank.
    """

    def __init__(self, width: int, heads: int, rank: int, folded: bool, config: AGILLMConfig, streams: int) -> None:
        self.query, self.key, self.value, self.projection = (Linear(width, width, bias=False) for _ in range(4))
        self.rank_matrix = Parameter((width // heads, rank), Orthogonal())
        self._heads, self._folded, self._scale = heads, folded, attention_scale(width // heads)
        self._position_bias = "distance" if config.alibi == "standard" else "future"
        self._dropouts = [Dropout(config.dropout, streams + number) for number in range(len(MASKS))]

    def __call__(self, y: Value, inputs: BlockInputs) -> Value:
        (q, k), v, mask = self._meeting(self.query(y), self.key(y)), self.value(y), inputs.mask
        if inputs.caches is not None:
            path, heads = self.rank_matrix.path.rpartition(".")[0], (self._heads, self._heads)
            bias = "none" if mask == CAUSAL and self._position_bias == "future" else self._position_bias
            mixed = inputs.caches.attend(path, q, k, v, heads, self._scale, AttentionMask(FULL, bias))
        else:
            mixed = ops.attention(
                q, k, v, heads=self._heads, scale=self._scale, mask=mask, position_bias=self._position_bias
            )
        return self._dropouts[MASKS.index(mask)](self.projection(mixed), inputs.seed)

    def _meeting(self, q: Value, k: Value) -> tuple[Value, Value]:
        """Queries and keys [B, T, heads * head width] where they meet: as wide, or rank wide."""
        matrix = use(q.graph, self.rank_matrix, q.spec.dtype)
        if self._folded:
            return ops.head_matmul(q, ops.matmul(matrix, matrix, transpose_b=True), self._heads), k
        return ops.head_matmul(q, matrix, self._heads), ops.head_matmul(k, matrix, self._heads)


class FeedForward(Module):
    """Two linear layers, four times as wide in between, with a ReLU: y [B, T, C] -> branch [B, T, C]."""

    def __init__(self, width: int) -> None:
        self.up, self.down = Linear(width, 4 * width), Linear(4 * width, width)

    def __call__(self, y: Value, inputs: BlockInputs) -> Value:
        return self.down(ops.relu(self.up(y)))


class SATHead(Linear):
    """Scores of the tokens after a window, and the gate on the window's first position."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__(width, vocabulary, role=Role.OUTPUT)
        self.gate = Linear(width, GATE_CLASSES, role=Role.OUTPUT)


class AGILLM(AGILLMWeights, TokenModel):
    """tokens int64 [B, T] -> loss or logits. No positions are added: order comes from the masks alone.

    Starts as torch does: embedding N(0, 1), linear layers uniform in +-1/sqrt(inputs), U orthogonal, norms 1. Raises
    ConfigError where a size or the vocabulary is missing, or heads do not divide width.
    """

    def __init__(self, config: AGILLMConfig, compute: DType = DType.FP32) -> None:
        self.config, self.compute = config, compute
        self.layers, self.heads, self.width, self.rank, self.context, self.vocabulary = config.required_sizes()
        self.length = self.context
        self.folded = config.fold == "on" or (config.fold == "auto" and self.rank > self.width // self.heads)
        self.windows = Windows.of(config, self.context) if config.objective == "joint" else None
        self.embedding = Embedding(self.vocabulary, self.width)
        norm, sizes = partial(LayerNorm, self.width), (self.width, self.heads, self.rank, self.folded)
        self.blocks = [
            Block(norm, RankAttention(*sizes, config, streams=len(MASKS) * index), FeedForward(self.width))
            for index in range(self.layers)
        ]
        self.norm = norm()
        self.ar_head = None if config.tied else Linear(self.width, self.vocabulary, role=Role.OUTPUT)
        self.sat_head = SATHead(self.width, self.vocabulary) if self.windows is not None else None
        heads = [head for head in (self.ar_head, self.sat_head) if head is not None]
        padded = [self.embedding.weight, *(head.weight for head in heads), *(head.bias for head in heads)]
        for parameter in filter(None, padded):  # the vocabulary ends with so many ids that do not exist
            parameter.padding = -self.vocabulary % (config.pad_vocabulary or 1)
        self.name_parameters()

    def batch_specs(self, rows: int) -> dict[str, TensorSpec]:
        """Joint training adds what the SAT pass predicts."""
        return super().batch_specs(rows) | ({} if self.windows is None else self.windows.specs(rows))

    @property
    def prepare(self) -> Prepare:
        """Prepare a batch, see models.base; with SAT windows it adds what the SAT pass predicts."""
        return prepare_plain if self.windows is None else self._with_windows

    def _with_windows(self, batch: Batch) -> tuple[dict[str, Any], dict[str, int]]:
        """Add to a batch, for each weight input, the number of terms that it averages over."""
        targets = batch["targets"]  # whose length may be that of a shorter model
        fields, further = Windows.of(self.config, targets.shape[1]).fields(targets)
        return {**batch, **fields}, {LOSS_WEIGHT: valid_targets(batch)} | further

    def loss(self, graph: Graph, rows: int, training: bool) -> Value:
        """Loss, fp32 []: AR, and in joint training SAT and gate, each the mean over its own targets."""
        return self.loss_and_metrics(graph, rows, training)[0]

    def loss_and_metrics(self, graph: Graph, rows: int, training: bool) -> tuple[Value, dict[str, Value]]:
        """The loss, and the plain cross-entropies in nats: ar/ce, and in joint training sat/ce and gate/ce."""
        hidden = self.hidden(graph, rows, training)
        targets, weight = graph.input("targets", self.batch_specs(rows)["targets"]), graph.input(LOSS_WEIGHT, SCALAR)
        with graph.scope("loss"):
            loss, entropy = self._head_loss(hidden, self.ar_head, targets, weight)
        metrics = {"ar/ce": entropy}
        if self.windows is not None:
            further, found = self._sat_loss(graph, rows, training)
            loss, metrics = ops.add(loss, further), metrics | found
        return loss, metrics

    def _sat_loss(self, graph: Graph, rows: int, training: bool) -> tuple[Value, dict[str, Value]]:
        """SAT loss plus the gate's, from a pass of its own."""
        windows, head = self.windows, self.sat_head
        assert windows is not None and head is not None
        given = {name: graph.input(name, spec) for name, spec in windows.specs(rows).items()}
        hidden = self.states(graph, rows, training, BlockInputs(mask=PAIRS))
        with graph.scope("sat_loss"):
            times = ops.reshape(given["sat_times"], (rows * len(windows.rows),))
            weights = ops.multiply(times, graph.input(SAT_WEIGHT, SCALAR))
            picked = self._flat(ops.index_select(hidden, windows.rows))
            sat, entropy = self._head_loss(picked, head, given["sat_targets"], weights)
        with graph.scope("gate_loss"):
            firsts = self._flat(ops.index_select(hidden, windows.starts))
            targets, weight = ops.reshape(given["gate_targets"], firsts.shape[:1]), graph.input(GATE_WEIGHT, SCALAR)
            gate, gate_entropy = ops.head_cross_entropy(firsts, *self._parameters(graph, head.gate), targets, weight)
            gate = ops.scale(gate, self.config.gate_weight)
        return ops.add(sat, gate), {"sat/ce": entropy, "gate/ce": gate_entropy}

    def _head_loss(self, hidden: Value, head: Linear | None, targets: Value, weight: Value) -> tuple[Value, Value]:
        """(smoothed, plain) cross-entropy over the vocabulary of hidden states [N, width]; see `_parameters`."""
        targets, read = ops.reshape(targets, hidden.shape[:1]), self._parameters(hidden.graph, head)
        smoothing = self.config.label_smoothing
        return ops.head_cross_entropy(hidden, *read, targets, weight, smoothing, self.vocabulary)

    def scores(self, rows: Value) -> Value:
        """The AR head's scores of the next token after each row: [N, width] -> fp32 [N, vocabulary with padding]."""
        return ops.cast(ops.linear(rows, *self._parameters(rows.graph, self.ar_head)), DType.FP32)

    def log_probs(self, rows: Value, targets: Value, entropy: bool = False) -> tuple[Value, ...]:
        return ops.head_log_probs(rows, *self._parameters(rows.graph, self.ar_head), targets, entropy, self.vocabulary)

    def pair_scores(self, rows: Value) -> tuple[Value, Value]:
        """Scores of the two tokens after a window, from its two rows under the pair mask, [2, width].

        Returns fp32 [2, vocabulary with padding], and the gate's scores, fp32 [1, 2].
        """
        assert self.sat_head is not None, "a model that was trained ar_only has no SAT head"
        first = ops.reshape(ops.index_select(ops.reshape(rows, (1, *rows.shape)), (0,)), (1, self.width))
        gate = ops.cast(self.sat_head.gate(first), DType.FP32)
        return ops.cast(ops.linear(rows, *self._parameters(rows.graph, self.sat_head)), DType.FP32), gate

    def embed(self, tokens: Value, placed: Callable[[Value], Value], seed: Value | None) -> tuple[Value, None]:
        return self.embedding(tokens, self.compute), None

    def _parameters(self, graph: Graph, head: Linear | None) -> tuple[Value, Value | None]:
        """Weight and bias of a head as layers read them. A tied head, which is None, has the embedding's weight."""
        weight, bias = (self.embedding.weight, None) if head is None else (head.weight, head.bias)
        read = None if bias is None else use(graph, bias, self.compute)
        return use(graph, weight, self.compute), read
