"""Mixtures of experts against Transformers' Qwen3-MoE: the same weights and batches, every number compared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.models.session import Session, relative_error, token_batch
from tests.models.test_llama import CONTEXT, ROWS, SIZES, VOCABULARY
from ttrain import ops
from ttrain.core.errors import ConfigError
from ttrain.models.llama import Llama
from ttrain.models.llama_weights import config_from_transformers, config_to_transformers
from ttrain.models.settings import LlamaConfig
from ttrain.models.weight_checks import as_fp32
from ttrain.nn.module import use
from ttrain.optim.adamw import AdamW
from ttrain.optim.settings import AdamWConfig

EXPERTS, CHOSEN = 5, 2
COUNTS = {  # ids, and parameters
    "moe-tiny": (65, 3_355_904),
    "minimind-moe-198m": (6_400, 198_416_640),
    "Qwen3-30B-A3B": (151_936, 30_532_122_624),
}
MIXTURE = {
    "num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": 24, "head_dim": 8,
    "router_aux_loss_coef": 0.05, "output_router_logits": True, "norm_topk_prob": True,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "every layer": {},
    "every second layer": {"decoder_sparse_step": 2, "num_hidden_layers": 4, "norm_topk_prob": False},
    "one expert a token": {"num_experts_per_tok": 1, "norm_topk_prob": False, "tie_word_embeddings": True},
}


def pair(variant: str, **changes: Any) -> tuple[Llama, Any]:
    """Our model, and Transformers' of the same config with random weights."""
    transformers = pytest.importorskip("transformers", reason="the package transformers is not installed")
    options = {**SIZES, **MIXTURE, **VARIANTS[variant]}
    config = transformers.Qwen3MoeConfig(**options, attn_implementation="eager", experts_implementation="eager")
    torch.manual_seed(0)
    plain = transformers.Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return Llama(LlamaConfig(**config_from_transformers(config.to_dict()), **changes)), plain


def apart(weights: Any) -> dict[str, Any]:
    """Weights or gradients of Transformers, which stacks experts and joins gates to ups, as folders hold them."""
    found = {}
    for name, value in weights.items():
        if not name.endswith(("gate_up_proj", "down_proj")) or ".experts." not in name:
            found[name] = value
            continue
        prefix, _, kind = name.rpartition(".")
        for expert, each in enumerate(value):
            parts = each.chunk(2) if kind == "gate_up_proj" else [each]
            for part, own in zip(parts, kind.split("_")[:2] if len(parts) == 2 else ["down"], strict=True):
                found[f"{prefix}.{expert}.{own}_proj.weight"] = part
    return found


def arrays(model: Llama, weights: Any) -> dict[str, np.ndarray]:
    """Transformers' weights or gradients by our paths."""
    given = {name: value for name, value in weights.items() if not (model.config.tied and name == "lm_head.weight")}
    return {path: as_fp32(value) for path, value in model.from_original(apart(given)).items()}


def session(model: Llama, plain: Any, engine: str, optimizer: AdamWConfig, **options: Any) -> Session:
    values = arrays(model, plain.state_dict())
    return Session(model, AdamW(optimizer), ROWS, engine=engine, values=values, **options)


@pytest.mark.parametrize("preset", COUNTS)
def test_presets_have_the_published_number_of_parameters(preset: str) -> None:
    vocabulary, count = COUNTS[preset]
    assert Llama(LlamaConfig(preset=preset.lower(), vocabulary=vocabulary)).parameter_count == count


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_loss_and_every_gradient_are_those_of_transformers(variant: str) -> None:
    model, plain = pair(variant)
    batch = token_batch(VOCABULARY, ROWS, CONTEXT, 0)
    tokens, targets = (torch.from_numpy(batch[name]) for name in ("tokens", "targets"))
    found = plain(tokens)
    loss = torch.nn.functional.cross_entropy(found.logits.flatten(0, 1), targets.flatten())
    loss = loss + plain.config.router_aux_loss_coef * plain(tokens, labels=targets).aux_loss
    loss.backward()
    gradients = arrays(model, {name: parameter.grad for name, parameter in plain.named_parameters()})

    def trace(graph: Any) -> None:
        head = model.embedding.weight if model.head is None else model.head.weight
        graph.output("logits", ops.linear(model.hidden(graph, ROWS, False), use(graph, head, model.compute)))

    for engine in ("dynamic", "static", "traced"):
        ours = session(model, plain, engine, AdamWConfig(clip_norm=None))
        logits = ours.run(trace, {"tokens": batch["tokens"]})["logits"]
        assert np.abs(logits - found.logits.detach().flatten(0, 1).numpy()).max() < 1e-4
        result = ours.train(batch, 1, {"lr": 0.0})
        assert result["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert result["router/dropped"] == pytest.approx(0, abs=1e-6)
        for path, gradient in gradients.items():
            assert relative_error(ours.state.read(f"{path}/gradient"), gradient) < 1e-4, path


def test_twenty_steps_are_those_of_transformers() -> None:
    model, plain = pair("every layer")
    config = AdamWConfig(lr=1e-3, weight_decay=0.0, clip_norm=None)
    ours = session(model, plain, "static", config)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-3, betas=tuple(config.betas), eps=config.eps, weight_decay=0.0)
    for step in range(1, 21):
        batch = token_batch(VOCABULARY, ROWS, CONTEXT, step % 4)
        tokens, targets = (torch.from_numpy(batch[name]) for name in ("tokens", "targets"))
        found = plain(tokens, labels=targets)
        loss = torch.nn.functional.cross_entropy(found.logits.flatten(0, 1), targets.flatten())
        loss = loss + plain.config.router_aux_loss_coef * found.aux_loss
        theirs.zero_grad()
        loss.backward()
        theirs.step()
        assert ours.train(batch, step, {"lr": 1e-3})["loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_configs_and_names_go_to_transformers_and_back() -> None:
    model, plain = pair("every second layer")
    made = config_to_transformers(model.config)
    assert made["architectures"] == [type(plain).__name__] and made["num_experts"] == EXPERTS
    assert config_from_transformers(made) == config_from_transformers(plain.config.to_dict())
    assert set(model.to_original(model.parameters())) == set(apart(plain.state_dict()))
    with pytest.raises(ConfigError, match=r"mlp_only_layers=\[1\]: model=llama takes decoder_sparse_step alone"):
        config_from_transformers({**made, "mlp_only_layers": [1]})


@pytest.mark.parametrize(
    "changes", [{"router": "sigmoid"}, {"router": "biased"}, {"shared_experts": 1}, {"qk_norm": False}]
)
def test_what_transformers_has_not_is_refused_by_name(changes: dict[str, Any]) -> None:
    config = pair("every layer")[0].config
    ((key, value),) = changes.items()
    with pytest.raises(ConfigError, match=f"model.{key}={value}: no model of Transformers"):
        config_to_transformers(replace(config, **changes))
