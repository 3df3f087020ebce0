"""The decoder of Llama and its kin against Transformers: the same weights and batches, every number compared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.models.session import Session, relative_error, token_batch
from tests.train.sampling.test_decode import Reading
from ttrain import ops
from ttrain.core.errors import CheckpointError, ConfigError
from ttrain.graph import Kind
from ttrain.models.llama import Llama
from ttrain.models.llama_weights import config_from_transformers, config_to_transformers
from ttrain.models.settings import LlamaConfig
from ttrain.nn.module import use
from ttrain.optim.adamw import AdamW
from ttrain.optim.settings import AdamWConfig

COUNTS = {  # ids, and parameters
    "SmolLM2-135M": (49_152, 134_515_008),
    "SmolLM2-360M": (49_152, 361_821_120),
    "SmolLM2-1.7B": (49_152, 1_711_376_384),
    "TinyLlama-1.1B": (32_000, 1_100_048_384),
    "Llama-3.2-1B": (128_256, 1_235_814_400),
    "Llama-3.2-3B": (128_256, 3_212_749_824),
    "Qwen2.5-0.5B": (151_936, 494_032_768),
    "Qwen3-0.6B": (151_936, 596_049_920),
}
CONTEXT, VOCABULARY, ROWS = 24, 61, 3
SIZES = {
    "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu_pytorch_tanh"}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e3, "factor": 2.0}}),
    "mistral": ("Mistral", {"sliding_window": 5, "head_dim": 12}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16, "num_key_value_heads": 1, "tie_word_embeddings": True}),
}


def pair(variant: str, **changes: Any) -> tuple[Llama, Any]:
    """Our model, and Transformers' of the same config with random weights."""
    transformers = pytest.importorskip("transformers", reason="the package transformers is not installed")
    family, options = VARIANTS[variant]
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **options}, attn_implementation="eager")
    torch.manual_seed(0)
    plain = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():  # which start small, biases and norms at a constant
            parameter.add_(torch.randn_like(parameter) * 0.1 if "norm" in name or "bias" in name else parameter * 3)
    return Llama(LlamaConfig(**config_from_transformers(config.to_dict()), **changes)), plain


def arrays(model: Llama, weights: Any) -> dict[str, np.ndarray]:
    """Transformers' weights or gradients by our paths."""
    given = {name: value for name, value in weights.items() if not (model.config.tied and name == "lm_head.weight")}
    return {path: value.detach().numpy() for path, value in model.from_original(given).items()}


def session(model: Llama, plain: Any, engine: str, optimizer: AdamWConfig) -> Session:
    return Session(model, AdamW(optimizer), ROWS, engine=engine, values=arrays(model, plain.state_dict()))


@pytest.mark.parametrize("preset", COUNTS)
def test_presets_have_the_published_number_of_parameters(preset: str) -> None:
    vocabulary, count = COUNTS[preset]
    config = LlamaConfig(preset=preset.lower(), vocabulary=vocabulary)
    assert config.preset == preset and Llama(config).parameter_count == count
    assert LlamaConfig.presets.keys() >= {"tiny", *COUNTS}


def test_heads_that_are_given_are_not_mixed_with_those_of_a_preset() -> None:
    def heads(**given: int) -> tuple[int | None, ...]:
        config = LlamaConfig(preset="Qwen3-0.6B", vocabulary=9, **given)
        return config.heads, config.kv_heads, config.head_width

    assert heads() == (16, 8, 128)
    assert heads(kv_heads=4) == (16, 4, 128)
    assert heads(heads=4) == (4, 4, 256)
    assert heads(width=64) == (16, 8, 4)
    assert heads(width=64, head_width=6) == (16, 8, 6)
    with pytest.raises(ConfigError, match=r"model\.kv_heads=3: must divide model\.heads=16\. Nearest that does: 2"):
        Llama(LlamaConfig(preset="Qwen3-0.6B", vocabulary=9, kv_heads=3))


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_loss_and_every_gradient_are_those_of_transformers(variant: str) -> None:
    model, plain = pair(variant)
    batch = token_batch(VOCABULARY, ROWS, CONTEXT, 0, masked=3)
    logits = plain(torch.from_numpy(batch["tokens"])).logits.flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(batch["targets"]).flatten(), ignore_index=-1)
    loss.backward()
    expected = logits.detach().numpy()
    gradients = arrays(model, {name: parameter.grad for name, parameter in plain.named_parameters()})

    def trace(graph: Any) -> None:
        head = model.embedding.weight if model.head is None else model.head.weight
        graph.output("logits", ops.linear(model.hidden(graph, ROWS, False), use(graph, head, model.compute)))

    for engine in ("dynamic", "static"):
        ours = session(model, plain, engine, AdamWConfig(clip_norm=None))
        assert np.abs(ours.run(trace, {"tokens": batch["tokens"]})["logits"] - expected).max() < 1e-4
        assert ours.train(batch, 1, {"lr": 0.0})["loss"] == pytest.approx(loss.item(), rel=1e-5)
        for path, gradient in gradients.items():
            assert relative_error(ours.state.read(f"{path}/gradient"), gradient) < 1e-4, path


@pytest.mark.parametrize("variant", ["llama3", "mistral", "qwen3"])
def test_texts_grow_as_transformers_generates_them(variant: str) -> None:
    """Greedily, through caches of the heads of keys and values alone."""
    model, plain = pair(variant)
    reading, prompt = Reading(model, "static"), list(range(3, 12))
    for path, value in arrays(model, plain.state_dict()).items():
        reading.state.write(path, value)
    given = {"do_sample": False, "max_new_tokens": CONTEXT - len(prompt), "eos_token_id": None, "pad_token_id": 0}
    made = plain.generate(torch.tensor([prompt]), output_logits=True, return_dict_in_generate=True, **given)
    text = list(prompt)
    for expected in made.logits:
        scores = reading.reader.read(text, 1)["logits"][0]
        assert np.abs(scores - expected[0].numpy()).max() < 1e-4
        text.append(int(scores.argmax()))
    assert text == made.sequences[0].tolist()
    caches = {reading.state.spec(name) for name in reading.state.names(Kind.CACHE)}
    assert {spec.shape[1] for spec in caches} == {model.config.kv_heads}


@pytest.mark.parametrize("variant", VARIANTS)
def test_configs_and_names_go_to_transformers_and_back(variant: str) -> None:
    model, plain = pair(variant)
    made = config_to_transformers(model.config)
    assert made["architectures"] == [type(plain).__name__]
    assert config_from_transformers(made) == config_from_transformers(plain.config.to_dict())
    names = set(plain.state_dict()) - ({"lm_head.weight"} if model.config.tied else set())
    assert set(model.to_original(model.parameters())) == names


def test_a_weight_under_two_names_is_refused() -> None:
    model = Llama(LlamaConfig(layers=1, heads=1, width=2, hidden=2, context=2, vocabulary=3))
    weights = {name: np.zeros(spec.shape, np.float32) for name, spec in model.to_original(model.specs()).items()}
    assert model.from_original(weights).keys() == model.specs().keys()
    with pytest.raises(CheckpointError, match="model.norm.weight: there twice"):
        model.from_original(weights | {"norm.weight": np.ones(2, np.float32)})
