"""Models of GGUF files: config and weights under Transformers' names."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ttrain.core.errors import CheckpointError, raised_as
from ttrain.core.names import listed
from ttrain.data.gguf_file import open_gguf
from ttrain.models.llama import frequencies
from ttrain.models.llama_weights import NAMING
from ttrain.models.settings import PUBLISHED, LlamaConfig
from ttrain.train.checkpoint.tensor_files import LazyTensor

_KEYS, _LLAMA3 = PUBLISHED["keys"]["gguf"], PUBLISHED["keys"]["llama3"]
_FURTHER = ("rope.dimension_count", "rope.scaling.type", "rope.scaling.factor", "attention.value_length", "vocab_size")
FACTORS = "rope_freqs.weight"  # by which wavelengths are stretched
_ADVICE = "Give the folder of Transformers that the file was made of."


def gguf_config(path: Path) -> dict[str, Any]:
    """The config.json of the model in a GGUF file.

    Raises CheckpointError naming what no model here has; LookupError, TypeError or ArithmeticError for a damaged file.
    """
    said, tensors = open_gguf(path)
    kind, parts = said.get("general.architecture"), said.get("split.count", 0)
    given = {key.removeprefix(f"{kind}."): value for key, value in said.items() if key.startswith(f"{kind}.")}
    other = [f"{kind}.{key}={value}" for key, value in given.items() if key not in (*_KEYS, *_FURTHER)]
    other += [f"general.architecture={kind}"] if kind not in ("llama", "qwen2", "qwen3") else []
    other += [f"split.count={parts}"] if parts not in (0, 1) else []
    if other:
        raise CheckpointError(
            f"its metadata has {listed(other)}; ttrain reads a whole llama, qwen2 or qwen3. {_ADVICE}"
        )
    given = {"attention.head_count_kv": None, "rope.freq_base": 1e4, **given}
    width = given.setdefault("attention.key_length", given["embedding_length"] // given["attention.head_count"])
    return {theirs: given[key] for key, theirs in _KEYS.items()} | {
        "model_type": kind,
        "vocab_size": tensors["token_embd.weight"].data.shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "partial_rotary_factor": given.get("rope.dimension_count", width) / width,
        "rope_scaling": _scaling(given, tensors.get(FACTORS)),
    }


def _scaling(given: dict[str, Any], factors: Any) -> dict[str, Any]:
    """The rotary scaling, in the words of a config.json. Raises CheckpointError for factors of an unknown kind.

    Llama 3's kind is written as `factors` of the wavelengths, fp32 [pairs]. All published models have its usual sizes.
    """
    kind = given.get("rope.scaling.type", "none")
    if kind != "none" or factors is None:
        return {"rope_type": "default" if kind == "none" else kind, "factor": given.get("rope.scaling.factor")}
    values, base = np.array(factors.data, np.float64), given["rope.freq_base"]
    config = LlamaConfig(rotary_base=base, rotary_scaling="llama3", rotary_factor=float(values.max(initial=1)))
    if not np.allclose(factors_of(config, values.size), values, rtol=1e-4):
        raise CheckpointError(f"its {FACTORS} has other factors than Llama 3's. {_ADVICE}")
    return {"rope_type": "llama3", **{theirs: getattr(config, ours) for ours, theirs in _LLAMA3.items()}}


def factors_of(config: LlamaConfig, pairs: int) -> NDArray[np.float32]:
    """Factors of the wavelengths, fp32 [pairs]."""
    plain = LlamaConfig(rotary_base=config.rotary_base, rotary_scaling="none")
    return frequencies(plain, pairs) / frequencies(config, pairs)


def gguf_tensors(path: Path) -> dict[str, LazyTensor]:
    """The tensors of a GGUF file, under Transformers' names where they have one; values are read when they are needed.

    Raises CheckpointError as `gguf_config` does.
    """
    import gguf

    config, tensors = gguf_config(path), open_gguf(path)[1]
    kind, layers = config["model_type"], min(config["num_hidden_layers"], len(tensors))
    inner = [f"{NAMING.prefix}.{number}.{name}" for number in range(layers) for name in NAMING.block.values()]
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.upper()], layers)
    theirs = {table.get_name(module): module for module in (*NAMING.outside.values(), *inner)}
    turned = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    found: dict[str, LazyTensor] = {}
    for name, stored in tensors.items():
        if name != FACTORS or config["rope_scaling"]["rope_type"] != "llama3":
            module, _, leaf = name.rpartition(".")
            full, heads = f"{theirs.get(module, module)}.{leaf}", turned.get(module.rpartition(".")[2])
            values = partial(_widened, f"{path}: {name}", stored, heads if kind == "llama" else None)
            found[full] = LazyTensor(path, full, tuple(stored.shape[::-1].tolist()), "F32", values=values)
    return found


def _widened(told: str, stored: Any, heads: int | None) -> NDArray[np.float32]:
    """The values of a tensor, fp32; those of `heads` of queries or keys have the pairs that are turned side by side.

    Raises CheckpointError for a type that the library can't widen.
    """
    import gguf

    with raised_as(CheckpointError, told, "Give another file.", (NotImplementedError, ValueError)):
        values = gguf.quants.dequantize(np.array(stored.data), stored.tensor_type)  # [outputs, inputs]
        if heads is None:
            return values
        return values.reshape(heads, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
