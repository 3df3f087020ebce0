"""The models of a benchmark in plain PyTorch, as a user would write them. Nothing here comes from ttrain's models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ttrain.bench.workload import TrainingWork
from ttrain.core.errors import UserError
from ttrain.models.settings import GPTConfig, MLPConfig


def reference_of(work: TrainingWork) -> nn.Module:
    """Return the model of a work without anything of ours: batch -> loss []."""
    model = work.model
    if isinstance(model, MLPConfig):
        return PlainMLP(model.layers, model.width)
    if isinstance(model, GPTConfig):
        layers, heads, width, context, vocabulary = model.required_sizes()
        return PlainGPT(layers, heads, width, context, vocabulary, model.bias)
    from ttrain.models.llama_weights import config_to_transformers

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


class PlainAttention(nn.Module):
    """Causal self-attention [B, T, C] -> [B, T, C] on PyTorch's fused kernel."""

    def __init__(self, width: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width, bias=bias)
        self.c_proj = nn.Linear(width, width, bias=bias)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = (part.view(B, T, self.heads, C // self.heads).transpose(1, 2) for part in self.c_attn(x).split(C, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class PlainFeedForward(nn.Module):
    """[B, T, C] -> [B, T, C], four times as wide in between."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width, bias=bias)
        self.c_proj = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class PlainBlock(nn.Module):
    def __init__(self, width: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width, bias=bias)
        self.attn = PlainAttention(width, heads, bias)
        self.ln_2 = nn.LayerNorm(width, bias=bias)
        self.mlp = PlainFeedForward(width, bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class PlainTrunk(nn.Module):
    """tokens int64 [B, T] -> hidden states [B, T, C]."""

    def __init__(self, layers: int, heads: int, width: int, context: int, vocabulary: int, bias: bool) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(context, width)
        self.h = nn.ModuleList(PlainBlock(width, heads, bias) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width, bias=bias)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        return self.ln_f(x)


class PlainGPT(nn.Module):
    """tokens and targets int64 [B, T] -> mean cross-entropy []: GPT-2 with a tied head, parameters named as there."""

    def __init__(self, layers: int, heads: int, width: int, context: int, vocabulary: int, bias: bool) -> None:
        super().__init__()
        self.transformer = PlainTrunk(layers, heads, width, context, vocabulary, bias)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.lm_head(self.transformer(tokens))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


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
