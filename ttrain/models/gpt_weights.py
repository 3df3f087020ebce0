"""Weights of the transformer under the names of nanoGPT and of Hugging Face's GPT-2, both ways."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from ttrain.core.errors import CheckpointError, ConfigError
from ttrain.core.spec import TensorSpec
from ttrain.models.settings import ACTIVATIONS, GPTConfig, activation_of, name_of_activation
from ttrain.models.weight_checks import (
    Weight,
    Weights,
    as_fp32,
    different,
    mismatches,
    renamed,
    same,
    unfitting,
    unusable,
    unwrapped,
)

_BLOCK = {
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.query_norm": "attn.q_norm",
    "attention.key_norm": "attn.k_norm",
    "attention.value_mix": "attn.value_mix",
    "attention.projection": "attn.c_proj",
    "feed_forward_norm": "ln_2",
    "feed_forward.up": "mlp.c_fc",
    "feed_forward.down": "mlp.c_proj",
}
_OUTSIDE = {
    "embedding": "transformer.wte",
    "positions": "transformer.wpe",
    "norm": "transformer.ln_f",
    "head": "lm_head",
    "value_embedding": "transformer.value_embedding",
    "future": "transformer.future",
}
_MATRICES = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # Hugging Face keeps them as [inputs, outputs]
_MASKS = (".attn.bias", ".attn.masked_bias")  # causal masks that some files carry as if they were weights
_CLAIMS = {  # the original's entry -> our key
    "n_head": "heads", "activation_function": "activation", "layer_norm_epsilon": "norm_eps",
    "scale_attn_weights": "scale_attn_weights", "scale_attn_by_inverse_layer_idx": "scale_attn_by_inverse_layer_idx",
}  # fmt: skip
_ALWAYS = {  # what Transformers lets a config choose, and this model has so
    "layer_norm_epsilon": 1e-5, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}  # fmt: skip
_DROPOUTS = ("attn_pdrop", "embd_pdrop", "resid_pdrop")  # for which this model has one probability
_HEAD, _EMBEDDING = "lm_head.weight", "transformer.wte.weight"
_AGREE = "layers, width, vocabulary, context, bias and tied"  # that the sizes of weights follow from
_QKV = "c_attn.weight"


def original_name(path: str) -> str:
    """Our parameter path -> the original's name: blocks.3.attention.qkv.bias -> transformer.h.3.attn.c_attn.bias."""
    return renamed(path, _OUTSIDE, _BLOCK, "transformer.h")


def to_original(
    values: Mapping[str, Any], specs: Mapping[str, TensorSpec], transposed: bool = False
) -> dict[str, Weight]:
    """Parameters by our path -> weights by the original's name, fp32.

    A tied head is written under both of its names. `transposed` gives Hugging Face's form, whose linear layers hold
    [inputs, outputs]; otherwise nanoGPT's, [outputs, inputs].
    """
    weights = {original_name(path): as_fp32(values[path]) for path in specs}
    if transposed:
        weights = {name: _turned(name, weight) for name, weight in weights.items()}
    weights.setdefault(_HEAD, weights[_EMBEDDING])
    return weights


def original_config(content: Mapping[str, Any]) -> dict[str, Any]:
    """Read what a file of an original says of its model besides shapes, by our keys.

    Understands nanoGPT's model_args and the config.json of Hugging Face's GPT-2, whose entries lie beside the weights.
    """
    args = content["model_args"] if isinstance(content.get("model_args"), Mapping) else content
    said = {ours: args[theirs] for theirs, ours in _CLAIMS.items() if theirs in args}
    if isinstance(activation := said.get("activation"), str):
        said["activation"] = activation_of(activation)
    weights = content["model"] if isinstance(content.get("model"), Mapping) else content
    given = {_full_name(name): weight for name, weight in weights.items()}
    head, embedding = given.get(_HEAD), given.get(_EMBEDDING)
    own_head = head is not None and embedding is not None and not (unusable({_HEAD: head}) or same(head, embedding))
    return said | ({"tied": False} if own_head or "head.weight" in weights else {})


def from_original(
    weights: Mapping[str, Any], specs: Mapping[str, TensorSpec], strict: bool = True
) -> Mapping[str, Weight]:
    """Weights by the original's name (arrays or torch tensors) -> parameters by our path, fp32, each
    converted when it is asked for.

    Takes nanoGPT's form and Hugging Face's, told apart by the shape of the attention projections; prefixes that
    torch.compile adds, a missing `transformer.`, and nanoGPT's checkpoints, which hold more beside the model, are
    understood. Raises CheckpointError naming every weight that is missing, left over or of another shape; unless
    `strict`, gives what is there under the names of this model, whatever its shape.
    """
    weights = weights["model"] if isinstance(weights.get("model"), Mapping) else weights
    given = {_full_name(name): weight for name, weight in weights.items() if not str(name).endswith(_MASKS)}
    names = {path: original_name(path) for path in specs}
    if problems := unusable({name: given[name] for name in names.values() if name in given}):
        raise unfitting(problems, _AGREE)
    spare = given.pop(_HEAD, None) if "head.weight" not in specs else None
    projections = [given[name].shape for name in names.values() if name in given and name.endswith(_QKV)]
    turned = any(list(shape[1:]) == [3 * shape[0]] for shape in projections)
    made = {path: partial(_read, name, given[name], turned) for path, name in names.items() if name in given}
    if not strict:
        return Weights(made, lambda path: made[path]())
    shapes = {name: specs[path].shape for path, name in names.items()}
    shapes |= {name: shape[::-1] for name, shape in shapes.items() if turned and name.endswith(_MATRICES)}
    problems = mismatches(given, shapes)
    if not problems and not (unusable({_HEAD: spare}) or same(spare, given[_EMBEDDING])):
        problems.append(different(_HEAD, _EMBEDDING))
    if problems:
        raise unfitting(problems, _AGREE)
    return Weights(made, lambda path: made[path]())


def dropouts(config: Mapping[str, Any]) -> dict[str, float]:
    """Return the three dropout probabilities of a config.json of GPT-2; this model has one for all."""
    return {key: float(config.get(key, 0.1) or 0) for key in _DROPOUTS}


def config_from_transformers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of GPTConfig for a config.json of GPT-2. Raises CheckpointError for what this model does not compute."""
    width, inner = config.get("n_embd", 768), config.get("n_inner")
    activation = config.get("activation_function", "gelu_new")
    wrong = [f"{key}={config[key]}" for key, value in _ALWAYS.items() if config.get(key, value) != value]
    wrong += [f"n_inner={inner}"] if inner not in (None, 4 * width) else []
    wrong += [] if activation_of(activation) in ACTIVATIONS else [f"activation_function={activation}"]
    if wrong:
        raise CheckpointError(f"its config.json has {', '.join(wrong)}, which model=gpt2 does not compute.")
    return {
        "layers": config.get("n_layer", 12),
        "heads": config.get("n_head", 12),
        "width": width,
        "context": config.get("n_positions", 1024),
        "vocabulary": config.get("vocab_size", 50257),
        "bias": True,
        "dropout": max(dropouts(config).values()),
        "activation": activation_of(activation),
        "tied": config.get("tie_word_embeddings", True),
    }


def config_to_transformers(config: GPTConfig, form: str | None = None) -> dict[str, Any]:
    """The config.json of GPT-2 for a config with its sizes. Raises ConfigError for what GPT-2 does not compute."""
    refuse_switches(config, "export.form=huggingface")
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_embd": config.width,
        "n_positions": config.context,
        "vocab_size": config.vocabulary,
        "activation_function": name_of_activation(config.activation),
        **_ALWAYS,
        **dict.fromkeys(_DROPOUTS, config.dropout),
        "tie_word_embeddings": config.tied,
    }


def refuse_switches(config: GPTConfig, form: str) -> None:
    """Raises ConfigError naming the switches that a form of another library does not hold."""
    if lost := config.switched_on():
        raise ConfigError(f"{form}: GPT-2 has no {', '.join(lost)}. Give export.form=ttrain.")


def _read(name: str, value: Any, turned: bool) -> Weight:
    """Return a weight in our layout."""
    return _turned(name, as_fp32(value)) if turned else as_fp32(value)


def _full_name(name: Any) -> str:
    name = unwrapped(name)
    return name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"


def _turned(name: str, weight: Weight) -> Weight:
    return np.ascontiguousarray(weight.T) if name.endswith(_MATRICES) else weight
