"""The models of a benchmark in plain PyTorch, as a user would write them. Nothing here comes from ttrain's models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ttrain.bench.workload import TrainingWork
from ttrain.core.errors import UserError
from ttrain.models.llama_weights import config_to_transformers
from ttrain.models.settings import GPTConfig, MLPConfig


def reference_of(work: TrainingWork) -> nn.Module:
    """Return the model of a work without anything of ours: batch -> loss []."""
    model = work.model
    if isinstance(model, MLPConfig):
        return PlainMLP(model.layers, model.width)
    if isinstance(model, GPTConfig):
        layers, heads, width, context, vocabulary = model.required_sizes()
        return PlainGPT(layers, heads, width, context, vocabulary, model.bias)
    return TransformersLlama(config_to_transformers(model), work.lora.rank or 0, work.lora.alpha)


class PlainMLP(nn.Module):
    """inputs [B, width] -> mean squared error []: `layers` linear layers with a ReLU between them."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return F.mse_loss(self.layers[-1](x), targets)


class PlainBlock(nn.Module):
    """[B, T, C] -> [B, T, C]: causal self-attention on PyTorch's fused kernel, and a GELU between two layers."""

    def __init__(self, width: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = (nn.LayerNorm(width, bias=bias) for _ in range(2))
        sizes = {"c_attn": (width, 3 * width), "c_proj": (width, width)}
        self.attn = nn.ModuleDict({name: nn.Linear(*size, bias=bias) for name, size in sizes.items()})
        sizes = {"c_fc": (width, 4 * width), "c_proj": (4 * width, width)}
        self.mlp = nn.ModuleDict({name: nn.Linear(*size, bias=bias) for name, size in sizes.items()})

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        projected = self.attn["c_attn"](self.ln_1(x)).split(C, 2)
        q, k, v = (part.view(B, T, self.heads, C // self.heads).transpose(1, 2) for part in projected)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn["c_proj"](y.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh"))


class PlainGPT(nn.Module):
    """tokens and targets int64 [B, T] -> mean cross-entropy []: GPT-2 with a tied head, parameters named as there."""

    def __init__(self, layers: int, heads: int, width: int, context: int, vocabulary: int, bias: bool) -> None:
        super().__init__()
        embedding = nn.Embedding(vocabulary, width)
        self.transformer = nn.ModuleDict({
            "wte": embedding,
            "wpe": nn.Embedding(context, width),
            "h": nn.ModuleList(PlainBlock(width, heads, bias) for _ in range(layers)),
            "ln_f": nn.LayerNorm(width, bias=bias),
        })  # fmt: skip
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        parts: Any = self.transformer
        x = parts["wte"](tokens) + parts["wpe"](torch.arange(tokens.shape[1], device=tokens.device))
        for block in parts["h"]:
            x = block(x)
        return F.cross_entropy(self.lm_head(parts["ln_f"](x)).flatten(0, 1), targets.flatten())


class TransformersLlama(nn.Module):
    """tokens and targets int64 [B, T] -> mean cross-entropy []: the model that Transformers builds of a config.

    With a `rank`, it is frozen and has adapters of PEFT at every linear layer but the head.
    """

    def __init__(self, config: Mapping[str, Any], rank: int = 0, alpha: float = 1.0) -> None:
        super().__init__()
        try:
            from transformers import AutoModelForCausalLM, LlamaConfig

            self.causal = AutoModelForCausalLM.from_config(LlamaConfig(**config))
            if rank:
                import peft

                lora = peft.LoraConfig(
                    r=rank, lora_alpha=int(alpha), target_modules="all-linear", task_type="CAUSAL_LM"
                )
                self.causal = peft.get_peft_model(self.causal, lora)
        except ImportError as error:
            raise UserError(
                f"bench.size: llama is compared with {error.name}, which is missing. Run: pip install {error.name}"
            ) from None

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.causal(tokens, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
