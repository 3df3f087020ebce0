"""Compare what weights mean under two configs: keys of a model may change what its weights compute.

Every key of a model's config declares what it `changes` (see core/options.py):

    function  what weights of the same names and shapes compute; so does a key that declares nothing
    shape     names or shapes of weights, which show it
    loss      what is trained for, not what the weights compute
    nothing   neither, as dropout and what is computed again
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from ttrain.core.options import default_of

FUNCTION = ("function",)
WEIGHTS = (*FUNCTION, "shape")  # what has to stay while weights are read
ALL = ("function", "shape", "loss")  # what has to stay while one model is trained
# What no config can change here: a source that says otherwise holds another function.
_FIXED = {"norm_eps": 1e-5, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}


def whole(stored: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """A model's stored config with the defaults of keys that were not there yet when it was stored."""
    if stored.get("name") != config.name:
        return dict(stored)
    return {**{declared.name: default_of(declared) for declared in fields(config)}, **stored}


def differing(source: Mapping[str, Any], config: Any, effects: Collection[str] = FUNCTION) -> list[str]:
    """One `model.key: old where the weights come from, new given` per key whose value is another one.

    `source` is what the weights' source says of the model, by our keys: the whole config or a part. `config` is that of
    the model that is to take the weights, sizes filled in.
    """
    values = {"name": config.name}
    for declared in fields(config):
        if declared.metadata.get("changes", "function") in effects:
            values[declared.name] = getattr(config, declared.name)
    values |= {key: value for key, value in _FIXED.items() if not hasattr(config, key)}
    return [
        f"{f'model.{key}' if hasattr(config, key) else key}: {source[key]!r} where the weights come from, {new!r} given"
        for key, new in values.items()
        if key in source and source[key] != new
    ]
