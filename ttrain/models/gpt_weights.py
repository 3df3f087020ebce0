"""Weights of the transformer under the names of nanoGPT and of Hugging Face's GPT-2, both ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ttrain.core.errors import CheckpointError, ConfigError
from ttrain.models.settings import ACTIVATIONS, PUBLISHED, GPTConfig, activation_of, name_of_activation
from ttrain.models.weight_checks import TOKENS, NamedWeights, Naming, Weight, Weights, as_fp32, same, unusable

_MATRICES = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # Hugging Face keeps them as [inputs, outputs]
_KEYS, _NANOGPT, _CLAIMS, _ALWAYS = (PUBLISHED["keys"][name] for name in ("gpt", "nanogpt", "claims", "always"))
_DROPOUTS = ("attn_pdrop", "embd_pdrop", "resid_pdrop")  # for which this model has one probability
_QKV = "c_attn.weight"
NAMING = Naming(**PUBLISHED["names"]["gpt"])


class GPTWeights(NamedWeights):
    """The weights of a GPT under the names of nanoGPT and of Hugging Face's GPT-2, fp32."""

    naming = NAMING
    config: GPTConfig
    fan_in_fan_out = True  # so PEFT calls how Hugging Face keeps the matrices of this model

    def to_original(self, values: Mapping[str, Any], transposed: bool = False) -> dict[str, Weight]:
        """Parameters by path -> weights by the original's name; a tied head is written under both of its names.

        `transposed` gives Hugging Face's form, whose linear layers hold [inputs, outputs]; otherwise nanoGPT's.
        """
        weights = {name: as_fp32(value) for name, value in super().to_original(values).items()}
        if transposed:
            weights = {name: _turned(name, weight) for name, weight in weights.items()}
        head, embedding = NAMING.tied
        return {**weights, head: weights.get(head, weights[embedding])}

    def to_transformers(self, values: Mapping[str, Any]) -> dict[str, Weight]:
        """The weights of Hugging Face's GPT-2, a tied head once. It has every bias: those that we lack are zero."""
        weights = self.to_original(values, transposed=True)
        if self.config.tied or self.opened_by != TOKENS:
            weights.pop("lm_head.weight")
        layers = [name for name in weights if ".h." in name or ".ln_f." in name]
        for name in () if self.config.bias else layers:
            weights[name.removesuffix("weight") + "bias"] = np.zeros(weights[name].shape[-1], np.float32)
        return weights

    def original_file(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return what nanoGPT keeps of a model in a file: its weights, and the sizes to build it with.

        Raises ConfigError for what nanoGPT does not compute.
        """
        refuse_switches(self.config, "export.form=original")
        sizes = {theirs: getattr(self.config, ours) for theirs, ours in _NANOGPT.items()}
        return {"model": self.to_original(values), "model_args": sizes}

    def original_config(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Read what a file of an original says of its model besides shapes, by our keys.

        Understands nanoGPT's model_args and the config.json of Hugging Face's GPT-2, whose entries lie beside weights.
        """
        args = content["model_args"] if isinstance(content.get("model_args"), Mapping) else content
        said = {ours: args[theirs] for theirs, ours in _CLAIMS.items() if theirs in args}
        if isinstance(activation := said.get("activation"), str):
            said["activation"] = activation_of(activation)
        given = NAMING.given(content)
        head, embedding = (given.get(name) for name in NAMING.tied)
        own_head = head is not None and embedding is not None and not (unusable({"": head}) or same(head, embedding))
        return said | ({"tied": False} if own_head or "head.weight" in content else {})

    def from_original(self, content: Mapping[str, Any], strict: bool = True) -> Weights:
        """The content of a file (arrays or torch tensors) -> parameters by our path, each converted when asked for.

        Takes nanoGPT's form and Hugging Face's, told apart by the shape of the attention projections; see Naming.taken.
        """
        given = self.naming.given(content)
        projections = [getattr(weight, "shape", ()) for name, weight in given.items() if name.endswith(_QKV)]
        turned = any(list(shape[1:]) == [3 * size for size in shape[:1]] for shape in projections)

        def stored(name: str, shape: Sequence[int]) -> Sequence[int]:
            return shape[::-1] if turned and name.endswith(_MATRICES) else shape

        found = NAMING.taken(given, self.specs(), strict, stored)

        def read(path: str) -> Weight:
            weight = as_fp32(found[path])
            return _turned(NAMING.name(path), weight) if turned else weight

        return Weights(found, read)


def dropouts(config: Mapping[str, Any]) -> dict[str, float]:
    """Return the three dropout probabilities of a config.json of GPT-2; this model has one for all."""
    return {key: float(config.get(key, 0.1) or 0) for key in _DROPOUTS}


def config_from_transformers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of GPTConfig for a config.json of GPT-2. Raises CheckpointError for what this model does not compute."""
    said = {ours: config.get(theirs, usual) for ours, (theirs, usual) in _KEYS.items()}
    inner, given = config.get("n_inner"), said["activation"]
    said |= {"bias": True, "dropout": max(dropouts(config).values()), "activation": activation_of(given)}
    wrong = [f"{key}={config[key]}" for key, value in _ALWAYS.items() if config.get(key, value) != value]
    wrong += [f"n_inner={inner}"] if inner not in (None, 4 * said["width"]) else []
    wrong += [] if said["activation"] in ACTIVATIONS else [f"activation_function={given}"]
    if wrong:
        raise CheckpointError(f"its config.json has {', '.join(wrong)}, which model=gpt2 does not compute.")
    return said


def config_to_transformers(config: GPTConfig, form: str | None = None) -> dict[str, Any]:
    """The config.json of GPT-2 for a config with its sizes. Raises ConfigError for what GPT-2 does not compute."""
    refuse_switches(config, "export.form=huggingface")
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **{theirs: getattr(config, ours) for ours, (theirs, _) in _KEYS.items()},
        "activation_function": name_of_activation(config.activation),
        **_ALWAYS,
        **dict.fromkeys(_DROPOUTS, config.dropout),
    }


def refuse_switches(config: GPTConfig, form: str) -> None:
    """Raises ConfigError naming the switches that a form of another library does not hold."""
    if lost := config.switched_on():
        raise ConfigError(f"{form}: GPT-2 has no {', '.join(lost)}. Give export.form=ttrain.")


def _turned(name: str, weight: Weight) -> Weight:
    return np.ascontiguousarray(weight.T) if name.endswith(_MATRICES) else weight
