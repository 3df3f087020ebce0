"""Weights and config of the decoder under Transformers' names, both ways: Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE.

Weights of experts are stacked here, [experts, outputs, inputs]; files have one tensor for each expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ttrain.core.errors import ConfigError
from ttrain.models.settings import PUBLISHED, LlamaConfig, activation_of, name_of_activation
from ttrain.models.weight_checks import NamedWeights, Naming, as_fp32

ARCHITECTURES: dict[str, str] = PUBLISHED["architectures"]
_KEYS = PUBLISHED["keys"]
_NORMED = "qwen3", "qwen3_moe"  # whose queries and keys have norms
_SWITCHES = "tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "norm_topk_prob"
NAMING = Naming(**PUBLISHED["names"]["llama"])


class LlamaWeights(NamedWeights):
    """The weights of a Llama as Transformers names them; a tied head is not written."""

    naming = NAMING
    config: LlamaConfig

    def to_original(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Parameters by path -> weights under the original's names, of each expert apart."""
        named = super().to_original(values)
        for name, count in self._stacked().items():
            named |= zip(_of_experts(name, count), named.pop(name), strict=True)
        return named

    to_transformers = to_original  # whose form that is

    def from_original(self, content: Mapping[str, Any], strict: bool = True) -> Mapping[str, Any]:
        """The content of an original's file -> its values by path; see Naming.taken."""
        given = self.naming.given(content)
        for name, count in self._stacked().items():
            parts = _of_experts(name, count)
            if all(part in given for part in parts):
                given[name] = np.stack([as_fp32(given.pop(part)) for part in parts])
        return self.naming.taken(given, self.specs(), strict)

    def _stacked(self) -> dict[str, int]:
        """The original's name of each weight that is stacked -> its experts."""
        return {self.original_name(path): spec.shape[0] for path, spec in self.specs().items() if spec.rank == 3}

    def original_file(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Weights under Transformers' names, and the config that Transformers builds the model with."""
        return {"model": self.to_original(values), "config": config_to_transformers(self.config)}

    def original_config(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Read what an original's file says of its model, by our keys: in the config.json beside it, or in itself."""
        config = content["config"] if isinstance(content.get("config"), Mapping) else content
        return config_from_transformers(config) if "model_type" in config else {}


def _of_experts(name: str, count: int) -> list[str]:
    """Names of the tensors of single experts."""
    return [name.replace(".mlp.", f".mlp.experts.{expert}.") for expert in range(count)]


def config_from_transformers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Transformers' config.json -> keys of LlamaConfig, of versions 4 and 5.

    Raises ConfigError naming every entry that this model can't follow.
    """
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        raise ConfigError(f"model_type={kind}: model=llama reads {', '.join(ARCHITECTURES)}.")
    missing = [theirs for theirs, *usual in _KEYS["llama"].values() if not usual and theirs not in config]
    if missing:
        raise ConfigError(f"a config of {kind} without {', '.join(missing)}: give a whole config.json.")
    if wrong := [f"{key}={config[key]!r}" for key in _SWITCHES if config.get(key) not in (True, False, None)]:
        raise ConfigError(f"{', '.join(wrong)}: expected true or false each.")
    said: dict[str, Any] = {ours: config.get(theirs, *usual) for ours, (theirs, *usual) in _KEYS["llama"].items()}
    said["kv_heads"] = said["kv_heads"] or said["heads"]
    said["head_width"] = said["head_width"] or (128 if kind == "qwen3" else said["width"] // said["heads"])
    said |= _experts(config) if kind == "qwen3_moe" else {}
    said["max_context"] = said["context"]
    bias = bool(config.get("attention_bias", False)) and kind in ("llama", *_NORMED)
    said |= {
        **{key: float(said[key]) for key in ("norm_eps", "dropout")},
        "tied": bool(said["tied"]),
        "activation": activation_of(said["activation"]),
        "qk_norm": kind in _NORMED,
        "qkv_bias": bias or kind == "qwen2",
        "projection_bias": bias,
        "feed_forward_bias": bool(config.get("mlp_bias", False)) and kind == "llama",
        "logit_cap": None,
        "window": _window(kind, config),
    }
    return said | _rotary(config)


def _experts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read the keys of a mixture of experts. Raises ConfigError for a list of the layers that have none."""
    if config.get("mlp_only_layers"):
        raise ConfigError(f"mlp_only_layers={config['mlp_only_layers']}: model=llama takes decoder_sparse_step alone.")
    known = {"num_experts": config.get("num_local_experts", 128), **config}  # the words of version 5, then of 4
    said = {ours: known.get(theirs, *usual) for ours, (theirs, *usual) in _KEYS["qwen3_moe"].items()}
    return said | {
        "balance_weight": float(said["balance_weight"]),
        "router_normalised": bool(said["router_normalised"]),
    }


def _window(kind: str, config: Mapping[str, Any]) -> int | None:
    """The sliding window of all layers. Raises ConfigError where only some have one."""
    window: int | None = config.get("sliding_window")
    if kind == "llama" or (kind != "mistral" and not config.get("use_sliding_window", False)) or window is None:
        return None
    layers = int(config["num_hidden_layers"])
    full = 0 if kind == "mistral" else int(config.get("max_window_layers", layers))
    types = config.get("layer_types")
    sliding = max(0, layers - full) if types is None else types.count("sliding_attention")
    if sliding not in (0, layers):
        raise ConfigError(f"sliding_window={window}: {sliding} of {layers} layers have it, expected all or none.")
    return window if sliding else None


def _rotary(config: Mapping[str, Any]) -> dict[str, Any]:
    """Raises ConfigError for a kind of scaling that this model has not."""
    given = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    base = given.get("rope_theta", config.get("rope_theta", 1e4))
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise ConfigError(f"rope_type={kind}: model=llama has default, linear and llama3.")
    share = float(given.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)))
    if share != 1:  # Transformers turns whole heads of these models whatever it says
        raise ConfigError(f"partial_rotary_factor={share}: the models that are read here turn whole heads.")
    said = {"rotary_base": float(base), "rotary_share": share}
    if kind == "default":
        return said | {"rotary_scaling": "none"}
    taken = _KEYS[kind]
    numbers = {theirs: given.get(theirs) for theirs in taken.values()}
    if wrong := [f"{key}={value!r}" for key, value in numbers.items() if type(value) not in (int, float)]:
        raise ConfigError(f"rope_type={kind} has {', '.join(wrong)}: must be a number each.")
    return said | {"rotary_scaling": kind} | {ours: given[theirs] for ours, theirs in taken.items()}


def config_to_transformers(config: LlamaConfig, form: str | None = None) -> dict[str, Any]:
    """The config.json with which Transformers builds the same function; `config` is that of a built model.

    `form` is the model_type of the folder that the model comes from: mistral and llama can be the same function.

    Raises ConfigError naming every key with a value that none of Transformers' models has.
    """
    as_mistral = form == "mistral" and not (config.qkv_bias or config.feed_forward_bias)
    plain = "mistral" if as_mistral or config.window is not None else "llama"
    biased = "qwen2" if config.qkv_bias and not config.projection_bias else plain
    kind = "qwen3_moe" if config.experts else "qwen3" if config.qk_norm else biased
    scaling = None
    if config.rotary_scaling != "none":
        scaling = {theirs: getattr(config, ours) for ours, theirs in _KEYS[config.rotary_scaling].items()}
        scaling["rope_type"] = config.rotary_scaling
    made = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        **{theirs: getattr(config, ours) for ours, (theirs, *_) in _KEYS["llama"].items()},
        "max_position_embeddings": config.longest,
        "hidden_act": name_of_activation(config.activation, "gelu_pytorch_tanh"),
        "attention_bias": bool(config.qkv_bias),
        "mlp_bias": config.feed_forward_bias,
        "rope_theta": config.rotary_base,  # in the words of version 4, then of 5
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": config.rotary_base, **(scaling or {"rope_type": "default"})},
        "sliding_window": config.window,
    }
    if config.experts:
        made |= {theirs: getattr(config, ours) for ours, (theirs, *_) in _KEYS["qwen3_moe"].items()}
    if kind in ("qwen2", *_NORMED):
        made |= {"use_sliding_window": config.window is not None, "max_window_layers": 0}
    said = config_from_transformers(made) | {"context": config.context, "max_context": config.max_context}
    others = {key: value for key, value in said.items() if getattr(config, key) != value}
    if lost := [f"model.{key}={getattr(config, key)}" for key in others] + config.switched_on():
        theirs = ", ".join(f"model.{key}={value}" for key, value in others.items()) or "no such switch"
        raise ConfigError(
            f"{', '.join(lost)}: no model of Transformers' that is read here has it; {kind} has {theirs}. "
            "Train a model with that, or write this one with export.form=ttrain."
        )
    return made
