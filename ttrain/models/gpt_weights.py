"""Weights of the transformer under the names of nanoGPT and of Hugging Face's GPT-2, both ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ttrain.core.errors import CheckpointError
from ttrain.core.spec import TensorSpec
from ttrain.models.weight_checks import different, same, unusable

Weights = dict[str, NDArray[np.float32]]

_BLOCK = {
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
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
}
_MATRICES = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # Hugging Face keeps them as [inputs, outputs]
_MASKS = (".attn.bias", ".attn.masked_bias")  # causal masks that some files carry as if they were weights
_CLAIMS = {  # the original's entry -> our key
    "n_head": "heads", "activation_function": "activation", "layer_norm_epsilon": "norm_eps",
    "scale_attn_weights": "scale_attn_weights", "scale_attn_by_inverse_layer_idx": "scale_attn_by_inverse_layer_idx",
}  # fmt: skip
_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh"}
_HEAD, _EMBEDDING = "lm_head.weight", "transformer.wte.weight"
_QKV = "transformer.h.0.attn.c_attn.weight"


def original_name(path: str) -> str:
    """Our parameter path -> the original's name: blocks.3.attention.qkv.bias -> transformer.h.3.attn.c_attn.bias."""
    module, _, leaf = path.rpartition(".")
    if module in _OUTSIDE:
        return f"{_OUTSIDE[module]}.{leaf}"
    _, number, inner = module.split(".", 2)
    return f"transformer.h.{number}.{_BLOCK[inner]}.{leaf}"


def to_original(values: Mapping[str, Any], specs: Mapping[str, TensorSpec], transposed: bool = False) -> Weights:
    """Parameters by our path -> weights by the original's name, fp32.

    A tied head is written under both of its names. `transposed` gives Hugging Face's form, whose linear layers hold
    [inputs, outputs]; otherwise nanoGPT's, [outputs, inputs].
    """
    weights = {original_name(path): _fp32(values[path]) for path in specs}
    if transposed:
        weights = {name: _turned(name, weight) for name, weight in weights.items()}
    weights.setdefault(_HEAD, weights[_EMBEDDING])
    return weights


def claimed(content: Mapping[str, Any]) -> dict[str, Any]:
    """What a file of an original says of its model besides shapes, by our keys.

    Understands nanoGPT's model_args and the config.json of Hugging Face's GPT-2, whose entries lie beside the weights.
    """
    args = content["model_args"] if isinstance(content.get("model_args"), Mapping) else content
    said = {ours: args[theirs] for theirs, ours in _CLAIMS.items() if theirs in args}
    if isinstance(activation := said.get("activation"), str):
        said["activation"] = _ACTIVATIONS.get(activation, activation)
    weights = content["model"] if isinstance(content.get("model"), Mapping) else content
    given = {_full_name(name): weight for name, weight in weights.items()}
    head, embedding = given.get(_HEAD), given.get(_EMBEDDING)
    own_head = head is not None and embedding is not None and not (unusable({_HEAD: head}) or same(head, embedding))
    return said | ({"tied": False} if own_head or "head.weight" in weights else {})


def from_original(weights: Mapping[str, Any], specs: Mapping[str, TensorSpec], strict: bool = True) -> Weights:
    """Weights by the original's name (arrays or torch tensors) -> parameters by our path, fp32.

    Takes nanoGPT's form and Hugging Face's, told apart by the shape of the first attention projection; prefixes that
    torch.compile adds, a missing `transformer.`, and nanoGPT's checkpoints, which hold more beside the model, are
    understood. Raises CheckpointError naming every weight that is missing, left over or of another shape; unless
    `strict`, gives what is there under the names of this model, whatever its shape.
    """
    weights = weights["model"] if isinstance(weights.get("model"), Mapping) else weights
    given = {_full_name(name): weight for name, weight in weights.items() if not str(name).endswith(_MASKS)}
    names = {path: original_name(path) for path in specs}
    if problems := unusable({name: given[name] for name in names.values() if name in given}):
        raise _refused(problems)
    spare = given.pop(_HEAD, None) if "head.weight" not in specs else None
    if not strict:
        projection = given.get(_QKV)
        turned = projection is not None and list(projection.shape[1:]) == [3 * projection.shape[0]]
        present = {path: _fp32(given[name]) for path, name in names.items() if name in given}
        return {path: _turned(names[path], value) if turned else value for path, value in present.items()}
    problems = [f"{name}: missing" for name in names.values() if name not in given]
    problems += [f"{name}: not a weight of this model" for name in given if name not in names.values()]
    if problems:
        raise _refused(problems)
    wanted = specs["blocks.0.attention.qkv.weight"].shape
    transposed = tuple(given[_QKV].shape) == wanted[::-1]
    parameters = {}
    for path, name in names.items():
        value = _turned(name, _fp32(given[name])) if transposed else _fp32(given[name])
        if value.shape != specs[path].shape:
            problems.append(f"{name}: got {list(given[name].shape)}, expected {list(specs[path].shape)}")
        parameters[path] = value
    if not problems and not (unusable({_HEAD: spare}) or same(spare, given[_EMBEDDING])):
        problems.append(different(_HEAD, _EMBEDDING))
    if problems:
        raise _refused(problems)
    return parameters


def _full_name(name: Any) -> str:
    name = str(name).removeprefix("_orig_mod.").removeprefix("module.")
    return name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"


def _turned(name: str, weight: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.ascontiguousarray(weight.T) if name.endswith(_MATRICES) else weight


def _fp32(value: Any) -> NDArray[np.float32]:
    """A contiguous fp32 copy of an array or a torch tensor of any floating dtype."""
    if not isinstance(value, np.ndarray):
        value = value.detach().cpu().float().numpy()
    return np.array(value, dtype=np.float32, order="C")


def _refused(problems: list[str]) -> CheckpointError:
    shown = "\n".join(f"  {problem}" for problem in problems[:20])
    more = f"\n  and {len(problems) - 20} more" if len(problems) > 20 else ""
    return CheckpointError(
        "the weights do not fit this model; layers, width, vocabulary, context, bias and tied must agree:\n"
        + shown
        + more
    )
