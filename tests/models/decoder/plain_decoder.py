"""The decoders of GPT and Llama with every switch, as one function in plain PyTorch over parameters by our paths."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

ACTIVATIONS: dict[str, Any] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu, "relu_squared": lambda x: x.clamp(min=0) ** 2,
}  # fmt: skip


class PlainDecoder:
    """`config` is that of a built model, `weights` are tensors by path; `drop` is applied where nanoGPT has dropout."""

    def __init__(
        self, config: Any, weights: Mapping[str, Tensor], drop: Callable[[Tensor], Tensor] = lambda x: x
    ) -> None:
        self.drop, self.config, self.weights, self.gpt = drop, config, weights, config.name == "gpt"
        self.ratio = config.width / config.base_width if config.base_width else 1.0

    def linear(self, path: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[f"{path}.weight"], self.weights.get(f"{path}.bias"))

    def rms(self, path: str, x: Tensor, eps: float) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * self.weights[f"{path}.weight"]

    def norm(self, path: str, x: Tensor) -> Tensor:
        if not self.gpt:
            return self.rms(path, x, self.config.norm_eps)
        weight, bias = self.weights[f"{path}.weight"], self.weights.get(f"{path}.bias")
        return F.layer_norm(x, x.shape[-1:], weight, bias)

    def heads(self, x: Tensor, count: int) -> Tensor:
        return x.unflatten(-1, (count, -1)).movedim(2, 1)

    def attention(self, path: str, y: Tensor, added: Tensor | None) -> Tensor:
        config, heads = self.config, self.config.heads
        pairs = heads if self.gpt else config.kv_heads
        parts = self.linear(f"{path}.qkv", y).chunk(3, -1) if self.gpt else [
            self.linear(f"{path}.{name}", y) for name in ("query", "key", "value")
        ]  # fmt: skip
        q, k, v = parts
        if added is not None:
            v = v + added * self.weights[f"{path}.value_mix"]
        q, k, v = self.heads(q, heads), self.heads(k, pairs), self.heads(v, pairs)
        if config.qk_norm:
            eps = 1e-5 if self.gpt else config.norm_eps
            q, k = self.rms(f"{path}.query_norm", q, eps), self.rms(f"{path}.key_norm", k, eps)
        width = q.shape[-1]
        if not self.gpt:
            q, k = self.rotated(q), self.rotated(k)
        k, v = (x.repeat_interleave(heads // pairs, 1) for x in (k, v))
        base = width / self.ratio if config.base_width else width
        scores = q @ k.mT * (math.sqrt(base) / width)
        future = torch.full(scores.shape[-2:], float("-inf"), dtype=y.dtype).triu(1)
        mixed = self.drop(torch.softmax(scores + future, -1)) @ v
        return self.drop(self.linear(f"{path}.projection", mixed.movedim(1, 2).flatten(2)))

    def rotated(self, x: Tensor) -> Tensor:
        time, half = x.shape[2], x.shape[3] // 2
        rates = self.config.rotary_base ** (-torch.arange(half, dtype=x.dtype) / half)
        angles = torch.arange(time, dtype=x.dtype)[:, None] * rates
        first, second = x[..., :half], x[..., half:]
        return torch.cat(
            [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1
        )

    def logits(self, tokens: Tensor, future: bool = False) -> Tensor:
        x = F.embedding(tokens, self.weights["embedding.weight"])
        if self.gpt:
            x = self.drop(x + self.weights["positions.weight"][: tokens.shape[1]])
        table = self.weights.get("value_embedding.weight")
        added = None if table is None else F.embedding(tokens, table)
        act = ACTIVATIONS[self.config.activation]
        for number in range(self.config.layers):
            path = f"blocks.{number}"
            x = x + self.attention(f"{path}.attention", self.norm(f"{path}.attention_norm", x), added)
            y, inner = self.norm(f"{path}.feed_forward_norm", x), f"{path}.feed_forward"
            up = self.linear(f"{inner}.up", y)
            up = act(up) if self.gpt else act(self.linear(f"{inner}.gate", y)) * up
            x = x + self.drop(self.linear(f"{inner}.down", up))
        head = self.weights.get("head.weight", self.weights["embedding.weight"])
        x = self.norm("norm", x)
        logits = (x + self.linear("future", x) if future else x) @ head.T / self.ratio
        cap = self.config.logit_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def loss(self, tokens: Tensor, targets: Tensor, training: bool = False) -> Tensor:
        loss = F.cross_entropy(self.logits(tokens).flatten(0, 1), targets.flatten(), ignore_index=-1)
        if not training or not self.config.future_weight:
            return loss
        scores, later = self.logits(tokens, future=True)[:, :-1], targets[:, 1:].clone()
        later[targets[:, :-1] < 0] = -1
        total = F.cross_entropy(scores.flatten(0, 1), later.flatten(), ignore_index=-1, reduction="sum")
        return loss + self.config.future_weight * total / (targets >= 0).sum()
