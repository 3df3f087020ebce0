"""An independent GPT in plain PyTorch, under nanoGPT's parameter names: the oracle of the golden tests."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Drop = Callable[[Tensor], Tensor]


def keep_all(x: Tensor) -> Tensor:
    return x


class PlainBlock(nn.Module):
    def __init__(self, width: int, heads: int, bias: bool, approximate: str) -> None:
        super().__init__()
        self.heads, self.approximate = heads, approximate
        self.drop: Drop = keep_all
        self.ln_1 = nn.LayerNorm(width, bias=bias)
        self.attn = nn.ModuleDict(
            {"c_attn": nn.Linear(width, 3 * width, bias=bias), "c_proj": nn.Linear(width, width, bias=bias)}
        )
        self.ln_2 = nn.LayerNorm(width, bias=bias)
        self.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(width, 4 * width, bias=bias), "c_proj": nn.Linear(4 * width, width, bias=bias)}
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        query, key, value = (
            part.unflatten(-1, (self.heads, width // self.heads)).movedim(2, 1)
            for part in self.attn["c_attn"](self.ln_1(x)).chunk(3, dim=-1)
        )
        scores = torch.einsum("bhqd,bhkd->bhqk", query, key) / math.sqrt(width / self.heads)
        future = torch.full((time, time), float("-inf"), dtype=x.dtype).triu(1)
        probabilities = self.drop(F.softmax(scores + future, dim=-1))
        mixed = torch.einsum("bhqk,bhkd->bqhd", probabilities, value)
        x = x + self.drop(self.attn["c_proj"](mixed.reshape(batch, time, width)))
        inner = F.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate=self.approximate)
        return x + self.drop(self.mlp["c_proj"](inner))


class PlainGPT(nn.Module):
    """tokens int64 [B, T] -> logits [B, T, V]. `drop` is applied wherever nanoGPT has dropout."""

    def __init__(
        self, layers: int, heads: int, width: int, context: int, vocabulary: int,
        bias: bool = True, tied: bool = True, approximate: str = "tanh",
    ) -> None:  # fmt: skip
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocabulary, width),
                "wpe": nn.Embedding(context, width),
                "h": nn.ModuleList(PlainBlock(width, heads, bias, approximate) for _ in range(layers)),
                "ln_f": nn.LayerNorm(width, bias=bias),
            }
        )
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.lm_head.weight = self.transformer["wte"].weight
        self.drop: Drop = keep_all
        self._start(layers)

    def _start(self, layers: int) -> None:
        """Every tensor random, so that no gradient is trivially right: biases and norms too."""
        for name, parameter in self.named_parameters():
            std = 0.02 / math.sqrt(2 * layers) if name.endswith("c_proj.weight") else 0.02
            nn.init.normal_(parameter, mean=1.0 if "ln_" in name and name.endswith("weight") else 0.0, std=std)

    def forward(self, tokens: Tensor) -> Tensor:
        parts: Any = self.transformer
        x = self.drop(parts["wte"](tokens) + parts["wpe"](torch.arange(tokens.shape[1])))
        for block in parts["h"]:
            block.drop = self.drop
            x = block(x)
        return self.lm_head(parts["ln_f"](x))

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy over the targets that are not negative."""
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten(), ignore_index=-1)
