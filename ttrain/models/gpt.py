"""The decoder-only transformer of GPT-2 (Radford et al., 2019) in nanoGPT's form: sizes from tiny to 1.5B."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from ttrain import ops
from ttrain.core.spec import DType
from ttrain.graph import Value
from ttrain.models.decoder import STD, Block, BlockInputs, Decoder, Heads, linear
from ttrain.models.gpt_weights import GPTWeights
from ttrain.models.settings import GPTConfig
from ttrain.nn.initialize import Normal
from ttrain.nn.layers import Dropout, Embedding, LayerNorm
from ttrain.nn.module import Module, use

_STREAMS_PER_BLOCK = 3  # dropout masks: attention weights, attention branch, feed-forward branch


class Attention(Heads):
    """Causal multi-head self-attention: y [B, T, C] -> branch [B, T, C]."""

    def __init__(self, width: int, heads: int, config: GPTConfig, residual_std: float, stream: int) -> None:
        super().__init__(config, width // heads, width, eps=1e-5)
        self.qkv = linear(width, 3 * width, config.bias)
        self.qkv.weight.parts = 3
        self.projection = linear(width, width, config.bias, residual_std)
        self._heads, self._p, self._stream = heads, config.dropout, stream
        self._dropout = Dropout(config.dropout, stream + 1)

    def __call__(self, y: Value, inputs: BlockInputs) -> Value:
        qkv, seed, caches = self.qkv(y), inputs.seed, inputs.caches
        if caches is not None:
            path = self.qkv.weight.path.removesuffix(".qkv.weight")
            mixed = caches.attend(path, *self._apart(qkv, inputs.values), None, self._scale)
        else:
            given = [qkv]
            if self.query_norm is not None or self.value_mix is not None:
                given = [ops.merge_heads([part]) for part in self._apart(qkv, inputs.values)]
            random: dict[str, Any] = {"seed": seed, "p": 0.0 if seed is None else self._p, "stream": self._stream}
            mixed = ops.attention(*given, heads=self._heads, scale=self._scale, positions=inputs.positions, **random)
        return self._dropout(self.projection(mixed), seed)

    def _apart(self, qkv: Value, values: Value | None) -> tuple[Value, Value, Value]:
        """Queries, keys and values by heads, [B, H, T, C / H] each."""
        q, k, v = ops.split_heads(qkv, 3, self._heads)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if values is not None:
            (v,) = ops.split_heads(self.with_embedding(ops.merge_heads([v]), values), 1, self._heads)
        return q, k, v


class FeedForward(Module):
    """Two linear layers, four times as wide in between: y [B, T, C] -> branch [B, T, C]."""

    def __init__(self, width: int, config: GPTConfig, residual_std: float, stream: int) -> None:
        self.up = linear(width, 4 * width, config.bias)
        self.down = linear(4 * width, width, config.bias, residual_std)
        self._activation = config.activation
        self._dropout = Dropout(config.dropout, stream)

    def __call__(self, y: Value, inputs: BlockInputs) -> Value:
        return self._dropout(self.down(ops.activation(self.up(y), self._activation)), inputs.seed)


class GPT(GPTWeights, Decoder):
    """tokens int64 [B, T] -> loss or logits: learned positions, pre-norm blocks, causal attention.

    Starts as nanoGPT does: weights N(0, 0.02), the branches' output projections N(0, 0.02 / sqrt(2 layers)), biases 0,
    norms 1. Raises ConfigError where a size or the vocabulary is missing, or heads do not divide width.
    """

    def __init__(self, config: GPTConfig, compute: DType = DType.FP32) -> None:
        self.config, self.compute = config, compute
        self.layers, self.heads, self.width, self.context, self.vocabulary = config.required_sizes()
        self.length = self.context
        width, std, norm = self.width, STD / math.sqrt(2 * self.layers), partial(LayerNorm, self.width, config.bias)
        self.embedding = Embedding(self.vocabulary, self.width, Normal(STD))
        self.positions = Embedding(self.context, self.width, Normal(STD))
        self._dropout = Dropout(config.dropout, stream=0)
        self.blocks = [
            Block(norm, Attention(width, self.heads, config, std, stream), FeedForward(width, config, std, stream + 2))
            for stream in range(1, 1 + _STREAMS_PER_BLOCK * self.layers, _STREAMS_PER_BLOCK)
        ]
        self.norm = norm()
        self.finish(self.width)

    def embed(self, tokens: Value, placed: Callable[[Value], Value], seed: Value | None) -> tuple[Value, None]:
        places = placed(use(tokens.graph, self.positions.weight, self.compute))
        return self._dropout(ops.add(self.embedding(tokens, self.compute), places), seed), None
