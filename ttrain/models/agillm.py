"""AGILLM-3: a pre-norm transformer whose queries and keys meet in a space of any rank, with two heads on one core.

The AR head predicts the next token from a causal pass. The SAT head predicts the two tokens after a window of two
positions, from a pass in which the two positions of an aligned pair see each other; its gate tells whether to emit one
token or two.
"""

from __future__ import annotations

from ttrain.core.spec import DType, TensorSpec
from ttrain.models.presets import required_sizes
from ttrain.models.settings import AGILLMConfig
from ttrain.nn.initialize import Orthogonal
from ttrain.nn.layers import Dropout, Embedding, LayerNorm, Linear
from ttrain.nn.module import Module, Parameter

GATE_CLASSES = 2  # emit one token, emit two


class RankAttention(Module):
    """Multi-head attention with scores (q U)(k U)^T / sqrt(head width): y [B, T, C] -> branch [B, T, C].

    `rank_matrix` U [head width, rank] is one matrix for all heads, queries and keys of the layer.
    """

    def __init__(self, width: int, heads: int, rank: int, config: AGILLMConfig, stream: int) -> None:
        self.query, self.key, self.value, self.projection = (Linear(width, width, bias=False) for _ in range(4))
        self.rank_matrix = Parameter((width // heads, rank), Orthogonal())
        self._dropout = Dropout(config.dropout, stream)


class FeedForward(Module):
    """Two linear layers, four times as wide in between, with a ReLU: y [B, T, C] -> branch [B, T, C]."""

    def __init__(self, width: int) -> None:
        self.up, self.down = Linear(width, 4 * width), Linear(4 * width, width)


class Block(Module):
    """Two branches around the residual stream, each reading a layer norm of it."""

    def __init__(self, width: int, heads: int, rank: int, config: AGILLMConfig, stream: int) -> None:
        self.attention_norm = LayerNorm(width)
        self.attention = RankAttention(width, heads, rank, config, stream)
        self.feed_forward_norm = LayerNorm(width)
        self.feed_forward = FeedForward(width)


class SATHead(Linear):
    """Scores of the tokens after a window, and the gate on the window's first position."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__(width, vocabulary)
        self.gate = Linear(width, GATE_CLASSES)


class AGILLM(Module):
    """tokens int64 [B, T] -> loss or logits. No positions are added: order comes from the masks alone.

    Starts as torch does: embedding N(0, 1), linear layers uniform in +-1/sqrt(inputs), U orthogonal, norms 1. Raises
    ConfigError where a size or the vocabulary is missing, or heads do not divide width.
    """

    def __init__(self, config: AGILLMConfig, compute: DType = DType.FP32) -> None:
        self.config, self.compute = config, compute
        self.layers, self.heads, self.width, self.rank, self.context, self.vocabulary = required_sizes(config)
        self.embedding = Embedding(self.vocabulary, self.width)
        self.blocks = [Block(self.width, self.heads, self.rank, config, stream=index) for index in range(self.layers)]
        self.norm = LayerNorm(self.width)
        self.ar_head = None if config.tied else Linear(self.width, self.vocabulary)
        self.sat_head = SATHead(self.width, self.vocabulary) if config.objective == "joint" else None
        padding = -self.vocabulary % (config.pad_vocabulary or 1)
        heads = [head for head in (self.ar_head, self.sat_head) if head is not None]
        for layer in (self.embedding, *heads):
            layer.weight.padding = padding
            if isinstance(layer, Linear) and layer.bias is not None:
                layer.bias.padding = padding
        self.name_parameters()

    def batch_specs(self, rows: int) -> dict[str, TensorSpec]:
        """`tokens` and `targets`, int64 [rows, context]; a target below zero counts for nothing."""
        spec = TensorSpec((rows, self.context), DType.INT64)
        return {"tokens": spec, "targets": spec}
