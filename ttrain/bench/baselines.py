"""PyTorch as contenders, with the settings that PyTorch itself recommends for speed.

Their models are as a user would write them in plain PyTorch. Nothing in those comes from ttrain's models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F

from ttrain.bench.contender import Contender
from ttrain.bench.workload import Case, TrainingWork
from ttrain.config import build
from ttrain.core.errors import UserError
from ttrain.core.spec import DType
from ttrain.device.settings import DeviceConfig
from ttrain.models.llama_weights import config_to_transformers
from ttrain.models.settings import GPTConfig, MLPConfig
from ttrain.optim.settings import AdamWConfig, OptimizerConfig, SGDConfig

_DESCRIPTIONS = {
    "eager": "eager model, fused optimizer",
    "compile": "torch.compile(model), fused optimizer",
    "reduce_overhead": 'torch.compile(model, mode="reduce-overhead"), fused optimizer',
    "compile_all": "torch.compile(model), torch.compile of clipping and optimizer step",
}


class PyTorchContender(Contender):
    """Forward under autocast where bf16 computes, backward, clip_grad_norm_, optimizer step, zero_grad.

    The weights are bf16 too where the precision is bf16_true.
    """

    def __init__(self, name: str, case: Case, device: DeviceConfig) -> None:
        super().__init__(case, device)
        self.name, self.description = name, _DESCRIPTIONS[name]

    def build(self) -> None:
        case = self.case
        # The device sets the same number of threads as for our engines.
        self.device = build.build_device(self._device_config)
        self._device: torch.device = getattr(self.device, "device", torch.device("cpu"))
        held = torch.bfloat16 if case.dtypes.master is DType.BF16 else None
        model = reference_of(case.work).to(self._device, held)
        self._parameters = dict(model.named_parameters())
        for parameter in self._parameters.values():
            if not parameter.requires_grad and parameter.dim() > 1:  # as a user loads a model that stays as it is
                parameter.data = parameter.data.to(torch.bfloat16 if case.dtypes.compute is DType.BF16 else None)
        self._load()
        self._model: Callable[..., torch.Tensor] = self._wrapped(model)
        trained = [parameter for parameter in self._parameters.values() if parameter.requires_grad]
        fused = self.name != "compile_all"  # the fused update is one kernel already, and nothing that can be compiled
        self._optimizer = make_optimizer(trained, case.work.optimizer, fused)
        self._update = torch.compile(self._clip_and_step) if self.name == "compile_all" else self._clip_and_step
        batches = (batch.values() for batch in case.batches)
        self._batches = [[torch.from_numpy(array).to(self._device) for array in arrays] for arrays in batches]

    def _wrapped(self, model: torch.nn.Module) -> Callable[..., torch.Tensor]:
        """Return the callable that takes the model's place."""
        mode = "reduce-overhead" if self.name == "reduce_overhead" else None
        return model if self.name == "eager" else torch.compile(model, mode=mode)

    def _load(self) -> None:
        """Load the first weights of our model; every parameter must get one."""
        missing = set(self._parameters)
        for path, values in self.case.first_weights():
            name = self.case.work.reference_name(path)
            with torch.no_grad():
                self._parameters[name].copy_(torch.from_numpy(values))
            missing.remove(name)
        assert not missing, f"the reference has parameters of its own: {missing}"

    def _clip_and_step(self) -> None:
        limit = self.case.work.optimizer.clip_norm
        if limit is not None:
            torch.nn.utils.clip_grad_norm_(self._parameters.values(), limit)
        self._optimizer.step()

    def step(self, number: int) -> Any:
        batch = self._batches[number % len(self._batches)]
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self.case.dtypes.compute is DType.BF16):
            loss = self._model(*batch)
        loss.backward()
        self._update()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def weight(self, path: str) -> np.ndarray:
        return self._parameters[self.case.work.reference_name(path)].detach().float().cpu().numpy().copy()

    def synchronize(self) -> None:
        self.device.synchronize()


class DistributedContender(PyTorchContender):
    """One of several ranks under DistributedDataParallel, on gloo or NCCL; it has an equal share of every batch."""

    def build(self) -> None:
        dist.init_process_group("nccl" if self._device_config.name == "cuda" else "gloo")
        super().build()
        rank, count = dist.get_rank(), dist.get_world_size()
        self._batches = [[array.chunk(count)[rank].contiguous() for array in batch] for batch in self._batches]

    def _wrapped(self, model: torch.nn.Module) -> Callable[..., torch.Tensor]:
        return super()._wrapped(torch.nn.parallel.DistributedDataParallel(model))

    def loss(self, handle: torch.Tensor) -> float:
        """Its mean over the ranks."""
        dist.all_reduce(handle)
        return float(handle) / dist.get_world_size()

    def close(self) -> None:
        dist.destroy_process_group()


def make_optimizer(parameters: list[torch.nn.Parameter], config: OptimizerConfig, fused: bool) -> torch.optim.Optimizer:
    """torch's optimizer for our config; weight decay for matrices only, as decay_rule=matrices says."""
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    how: dict[str, Any] = {"fused": True} if fused else {}
    if isinstance(config, AdamWConfig):
        beta1, beta2 = config.betas
        return torch.optim.AdamW(groups, lr=config.lr, betas=(beta1, beta2), eps=config.eps, **how)
    assert isinstance(config, SGDConfig)
    if any(p.dtype is torch.bfloat16 and p.device.type == "cpu" for p in parameters):
        how = {}  # torch 2.13's fused SGD on the CPU leaves bf16 weights as they are
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, **how)


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
