"""The decoder of Llama (Touvron et al., 2023) and of those built like it: Mistral, Qwen2, Qwen3, Qwen3-MoE, SmolLM2.

Rotary positions, an RMS norm before each branch, a gated feed-forward branch or a mixture of such, and heads of queries
that share keys and values. What tells one maker's models from another's are settings.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ttrain import ops
from ttrain.core.attention_mask import FULL, AttentionMask
from ttrain.core.errors import ConfigError
from ttrain.core.spec import DType
from ttrain.graph import Graph, Value
from ttrain.models.decoder import STD, Angles, Block, BlockInputs, Decoder, Heads, linear
from ttrain.models.llama_weights import LlamaWeights
from ttrain.models.settings import LlamaConfig
from ttrain.nn.experts import ExpertLinear, Routed
from ttrain.nn.initialize import Constant, Normal
from ttrain.nn.layers import Embedding, Linear, RMSNorm
from ttrain.nn.module import Buffer, Module, Parameter, Role, use, use_buffer


def frequencies(config: LlamaConfig, pairs: int) -> NDArray[np.float32]:
    """Radians by which each of R pairs of features is turned per position, fp32 [R]."""
    assert config.rotary_base is not None
    exponents = np.arange(pairs, dtype=np.float32) / np.float32(pairs)
    plain: NDArray[np.float32] = np.float32(1) / np.float32(config.rotary_base) ** exponents
    if config.rotary_scaling == "none":
        return plain
    kept = np.zeros_like(plain)  # share that is not stretched
    if config.rotary_scaling == "llama3":
        turns = config.rotary_context * plain / (2 * np.pi)
        kept = np.clip((turns - config.rotary_low) / (config.rotary_high - config.rotary_low), 0, 1).astype(np.float32)
    return plain * (kept + (1 - kept) / np.float32(config.rotary_factor))


class Rotary(Module):
    """Tables of the angles' cos and sin, fp32 [context, R] for the R pairs of features that are turned."""

    def __init__(self, config: LlamaConfig, pairs: int, context: int) -> None:
        def table(function: Callable[[Any], Any]) -> Buffer:
            def values(shape: tuple[int, ...]) -> Any:
                angles = np.arange(shape[0], dtype=np.float32)[:, None] * frequencies(config, pairs)
                return function(angles.astype(np.float64))

            return Buffer((context, pairs), values)

        self.cos, self.sin = table(np.cos), table(np.sin)

    def __call__(self, graph: Graph, rows: Callable[[Value], Value]) -> Angles:
        """Rows of both tables that `rows` picks."""
        return rows(use_buffer(graph, self.cos)), rows(use_buffer(graph, self.sin))


class Attention(Heads):
    """Causal self-attention of grouped heads: y [B, T, C] -> branch [B, T, C]."""

    def __init__(self, config: LlamaConfig, width: int, heads: int, residual_std: float, stream: int) -> None:
        assert config.kv_heads is not None and config.head_width is not None and config.norm_eps is not None
        super().__init__(config, config.head_width, config.kv_heads * config.head_width, config.norm_eps)
        self.query = linear(width, heads * config.head_width, config.qkv_bias)
        self.key, self.value = (linear(width, config.kv_heads * config.head_width, config.qkv_bias) for _ in range(2))
        self.projection = linear(heads * config.head_width, width, config.projection_bias, residual_std)
        self._heads, self._kv_heads, self._width = heads, config.kv_heads, config.head_width
        self._window, self._p, self._stream = config.window, config.dropout, stream

    def __call__(self, y: Value, inputs: BlockInputs) -> Value:
        assert inputs.angles is not None
        q = self._rotated(self.query(y), self.query_norm, self._heads, inputs.angles)
        k = self._rotated(self.key(y), self.key_norm, self._kv_heads, inputs.angles)
        v = self.with_embedding(self.value(y), inputs.values)
        if inputs.caches is not None:
            path, counts = self.query.weight.path.removesuffix(".query.weight"), (self._heads, self._kv_heads)
            near = AttentionMask(FULL, window=self._window)
            return self.projection(inputs.caches.attend(path, q, k, v, counts, self._scale, near))
        p = 0.0 if inputs.seed is None else self._p
        heads: dict[str, Any] = {"heads": self._heads, "kv_heads": self._kv_heads, "window": self._window}
        random: dict[str, Any] = {"seed": inputs.seed, "p": p, "stream": self._stream, "positions": inputs.positions}
        return self.projection(ops.attention(q, k, v, scale=self._scale, **heads, **random))

    def _rotated(self, x: Value, norm: RMSNorm | None, heads: int, angles: Angles) -> Value:
        """Queries or keys [B, T, heads * width], each head normed and turned by the place of its token."""
        if norm is not None:
            x = ops.reshape(norm(ops.reshape(x, (*x.shape[:2], heads, self._width))), x.shape)
        return ops.rotary(x, *angles, heads)


class FeedForward(Module):
    """down(f(gate(y)) * up(y)): y [B, T, C] -> branch [B, T, C]."""

    def __init__(self, config: LlamaConfig, width: int, hidden: int, residual_std: float) -> None:
        self.gate: Linear
        self.gate, self.up = (linear(width, hidden, config.feed_forward_bias) for _ in range(2))
        self.down: Linear = linear(hidden, width, config.feed_forward_bias, residual_std)
        self._activation = config.activation

    def __call__(self, y: Value, inputs: BlockInputs) -> Value:
        return self._passed(y)

    def _passed(self, y: Value, *offsets: Value) -> Value:
        """Rows [..., C] of tokens, or those of experts -> the branch."""
        gate, up = self.gate(y, *offsets), self.up(y, *offsets)
        if self._activation == "relu_squared":  # of which no device has a gated kernel
            return self.down(ops.activation(gate, self._activation) * up, *offsets)
        return self.down(ops.gated_activation(gate, up, self._activation), *offsets)


class Router(Module):
    """Scores of E experts: x [N, C] -> logits fp32 [N, E]."""

    def __init__(self, width: int, experts: int, biased: bool) -> None:
        self.weight = Parameter((experts, width), Normal(STD), role=Role.OUTPUT)
        self.bias = Parameter((experts,), Constant(0.0), follows_compute=False) if biased else None

    def __call__(self, x: Value) -> Value:
        return ops.cast(ops.linear(x, use(x.graph, self.weight, x.spec.dtype)), DType.FP32)


class Experts(FeedForward):
    """The weighted sum of K of E feed-forwards that a router chooses for each token: y [B, T, C] -> branch [B, T, C].

    Shared experts are one more feed-forward, which every token passes.
    """

    def __init__(self, config: LlamaConfig, width: int, residual_std: float) -> None:
        assert config.experts and config.experts_per_token and config.expert_width
        experts, hidden, self._count = config.experts, config.expert_width, config.experts_per_token
        self.router = Router(width, experts, config.router == "biased")
        self.gate, self.up = (ExpertLinear(experts, width, hidden, Normal(STD)) for _ in range(2))
        self.down = ExpertLinear(experts, hidden, width, Normal(residual_std))
        shared = config.shared_experts * hidden
        self.shared = FeedForward(config, width, shared, residual_std) if shared else None
        self._activation, self._config = config.activation, config

    def __call__(self, y: Value, inputs: BlockInputs) -> Value:
        config, x = self._config, ops.reshape(y, (y.spec.size // y.shape[-1], y.shape[-1]))  # [N, C]
        logits = self.router(x)
        scores = ops.softmax(logits) if config.router == "softmax" else ops.sigmoid(logits)
        bias = None if self.router.bias is None else use(y.graph, self.router.bias, DType.FP32)
        ids = ops.top_k(scores if bias is None else scores + bias, self._count)  # [N, K]
        weights = ops.gather(scores, ids)
        if config.router_normalised:
            weights = weights / _row_sums(weights)
        if inputs.routed is not None:
            probabilities = scores if config.router == "softmax" else scores / _row_sums(scores)
            inputs.routed.append(Routed(logits, probabilities, ids, bias))
        order, places, offsets = ops.sort_by_expert(ids, logits.shape[1])
        rows = self._passed(ops.dispatch(x, order, places), offsets)  # [N * K, C]
        branch = ops.reshape(ops.combine(rows, order, places, weights), y.shape)
        return branch if self.shared is None else branch + self.shared(y, inputs)


def _row_sums(x: Value) -> Value:
    """[N, E] -> [N, 1]."""
    return ops.reshape(ops.reduce_sum(x, [1]), (x.shape[0], 1))


class Llama(LlamaWeights, Decoder):
    """tokens int64 [B, T] -> loss or logits.

    Starts with weights N(0, 0.02), the branches' output projections N(0, 0.02 / sqrt(2 layers)), biases 0, norms 1.
    Raises ConfigError where a size or the vocabulary is missing, or heads do not divide as they must.
    """

    def __init__(self, config: LlamaConfig, compute: DType = DType.FP32) -> None:
        self.layers, self.heads, self.width, self.hidden_width, self.context, self.vocabulary = config.required_sizes()
        self.config, self.compute, self.length = config, compute, self.context
        assert config.head_width is not None and config.norm_eps is not None
        width, hidden, std = self.width, self.hidden_width, STD / math.sqrt(2 * self.layers)
        norm = partial(RMSNorm, width, config.norm_eps)
        self.embedding = Embedding(self.vocabulary, self.width, Normal(STD))
        self.rotary = Rotary(config, _pairs(config, config.head_width), self.context)
        self.blocks = [
            Block(
                norm,
                Attention(config, width, self.heads, std, index),
                Experts(config, width, std) if config.has_experts(index) else FeedForward(config, width, hidden, std),
            )
            for index in range(self.layers)
        ]
        self.norm = norm()
        self.finish((config.kv_heads or self.heads) * config.head_width)

    def embed(self, tokens: Value, placed: Callable[[Value], Value], seed: Value | None) -> tuple[Value, Angles]:
        return self.embedding(tokens, self.compute), self.rotary(tokens.graph, placed)


def _pairs(config: LlamaConfig, head_width: int) -> int:
    """Pairs of features of a head that are turned. Raises ConfigError where there is none, or features are odd."""
    turned = int(head_width * config.rotary_share)
    if turned < 2 or turned % 2:
        raise ConfigError(
            f"model.rotary_share={config.rotary_share}: turns {turned} of the {head_width} features of a head, "
            "expected an even number. Give another model.rotary_share or model.head_width."
        )
    return turned // 2
