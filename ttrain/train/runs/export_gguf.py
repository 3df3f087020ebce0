"""Write a GGUF file for llama.cpp: config, tokenizer and weights in one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ttrain.core.errors import ConfigError, raised_as
from ttrain.core.names import listed
from ttrain.data.end_token import end_ids, token_text
from ttrain.data.gguf_file import pre_tokenizer_name
from ttrain.data.library_tokenizer import LibraryTokenizer
from ttrain.data.tokenizer import visible_bytes
from ttrain.models.settings import PUBLISHED
from ttrain.models.weight_checks import TOKENS
from ttrain.train.checkpoint.gguf_model import FACTORS, factors_of
from ttrain.train.checkpoint.hub_folder import is_known, written_config
from ttrain.train.checkpoint.weights_file import write_file
from ttrain.train.protocols import Array
from ttrain.train.runs.export_folder import Written

_ARCHITECTURES = {"gpt2": "GPT2", "llama": "LLAMA", "mistral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}
_ADVICE = "Give export.form=huggingface; llama.cpp converts such a folder itself."


def export_problem(model: Any, file: Path | None, form: str) -> str | None:
    """Return why a model can't be written so; None where it can."""
    if form in ("huggingface", "gguf") and not is_known(model.config.name):
        return f"export.form={form}: has no model.name={model.config.name}. Give export.form=ttrain."
    if getattr(model, "opened_by", TOKENS) != TOKENS and form not in ("huggingface", "ttrain"):
        return f"export.form={form}: predicts tokens, which this model does not. Give export.form=huggingface."
    if form == "gguf" or file is None:
        return gguf_problem(model.config) if form == "gguf" else None
    if file.suffix not in (".pt", ".safetensors"):
        return f"export.file={file}: the name must end with .pt or .safetensors."
    if form == "ttrain" and file.suffix == ".pt":
        return f"export.form=ttrain: is written as .safetensors. Give export.file={file.with_suffix('.safetensors')}."
    if form != "ttrain" and not hasattr(model, "to_original"):
        return f"export.form={form}: model.name={model.config.name} has no other form. Give export.form=ttrain."
    return None


def gguf_problem(config: Any) -> str | None:
    """Return why no file of GGUF computes what this model does; None where one does."""
    expected = {"activation": "gelu_tanh" if config.name == "gpt" else "silu", "window": None, "experts": None}
    given = ((key, getattr(config, key, None)) for key in expected)
    other = [f"model.{key}={value}" for key, value in given if value and value != expected[key]]
    if getattr(config, "qk_norm", False) and config.qkv_bias:
        other.append("model.qk_norm=true beside model.qkv_bias=true")
    of_qwen = config.name != "gpt" and (config.qk_norm or (config.qkv_bias and not config.projection_bias))
    if of_qwen and config.rotary_scaling == "llama3":  # which llama.cpp reads in Llama's form alone
        other.append(f"model.rotary_scaling=llama3 beside model.{'qk_norm' if config.qk_norm else 'qkv_bias'}=true")
    switches = config.switched_on()
    advice = "Give export.form=ttrain." if switches else _ADVICE  # nor has Transformers such switches
    problem = f"export.form=gguf: is not written with {', '.join(other + switches)}. {advice}"
    return problem if other or switches else None


def gguf_notices(model: Any, dtype: str) -> Iterator[str]:
    """Yield what to tell of a file whose model not every program reads whole, or whose matrices have several types."""
    config, stretched = model.config, getattr(model.config, "rotary_scaling", None) == "llama3"
    if stretched or (config.name != "gpt" and (config.projection_bias or config.feed_forward_bias)):
        yield "llama.cpp reads biases and Llama 3's stretching, and Transformers leaves them out when it reads GGUF."
    odd = [path for path, spec in model.specs().items() if len(spec.shape) > 1 and spec.shape[-1] % 32]
    if dtype != "fp32" and odd:
        yield f"{len(odd)} matrices are written as fp16, since blocks of 32 don't fill their rows: {listed(odd)}."


def write_gguf(file: Path, written: Written, dtype: str) -> None:
    """Writes weights, and what a tokenizer.json and a tokenizer_config.json say, where there are any.

    As convert_hf_to_gguf.py of llama.cpp does, matrices get the dtype, those whose rows its blocks don't fill fp16, and
    vectors and positions fp32.

    Raises ConfigError for what the form can't hold and where the package gguf is missing.
    """
    with raised_as(ConfigError, "export.form=gguf needs gguf", "Run: pip install 'ttrain[gguf]'", ImportError):
        import gguf
    config, described = written.model.config, written_config(written.model.config)
    architecture = getattr(gguf.MODEL_ARCH, _ARCHITECTURES[described["model_type"]])
    wanted, said = gguf.GGMLQuantizationType["F32" if dtype == "fp32" else dtype.upper()], dict[str, Any]()
    if written.tokenizer is not None:
        tokenizer = LibraryTokenizer(written.tokenizer)
        said = {**_vocabulary(json.loads(written.tokenizer), config.vocabulary), **_special(tokenizer, written)}
    if isinstance(template := written.tokenizer_config.get("chat_template"), str):
        said["chat_template"] = template
    names = gguf.get_tensor_name_map(architecture, config.layers)

    def write(beside: Path) -> None:
        writer = gguf.GGUFWriter(beside, gguf.MODEL_ARCH_NAMES[architecture])
        writer.add_file_type(gguf.LlamaFileType["ALL_F32" if dtype == "fp32" else f"MOSTLY_{wanted.name}"])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        adds: Any = {float: writer.add_float32, int: writer.add_uint32, str: writer.add_string}
        for key, value in _sizes(config, described).items():
            adds[type(value)](f"{gguf.MODEL_ARCH_NAMES[architecture]}.{key}", value)
        for key, value in said.items():
            getattr(writer, f"add_{key}")(value)
        for name, weight in _tensors(written, described):
            given = str(names.get_name(name, (".weight", ".bias")))
            kind = wanted if weight.shape[-1] % gguf.GGML_QUANT_SIZES[wanted][0] == 0 else wanted.F16
            kind = wanted.F32 if weight.ndim == 1 or given.startswith("position_embd") else kind
            writer.add_tensor(given, gguf.quants.quantize(weight, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    write_file(file, write)


def _sizes(config: Any, described: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a file says of a model, by key behind its architecture; `described` is its config.json."""
    keys, more = PUBLISHED["keys"]["gguf_gpt"], {"feed_forward_length": 4 * config.width}
    if config.name != "gpt":
        keys = PUBLISHED["keys"]["gguf"]
        more = dict.fromkeys(("rope.dimension_count", "attention.value_length"), config.head_width)
        if config.rotary_scaling == "linear":
            more |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(config.rotary_factor)}
    return {key: described[theirs] for key, theirs in keys.items()} | more


def _tensors(written: Written, described: Mapping[str, Any]) -> Iterator[tuple[str, Array]]:
    """Names and weights of Transformers, [outputs, inputs].

    Llama's queries and keys have the pairs that are turned side by side.
    """
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    for name, weight in written.model.to_transformers(written.values).items():
        module = name.rsplit(".", 2)[-2]
        if module in ("c_attn", "c_proj", "c_fc") and weight.ndim == 2:
            weight = weight.T
        elif module in heads and _ARCHITECTURES[described["model_type"]] == "LLAMA":
            halves = weight.reshape(described[heads[module]], 2, -1, *weight.shape[1:])
            weight = halves.swapaxes(1, 2).reshape(weight.shape)
        yield name, np.ascontiguousarray(weight, np.float32)
    if (described.get("rope_scaling") or {}).get("rope_type") == "llama3":
        yield FACTORS, factors_of(written.model.config, described["head_dim"] // 2)


def _special(tokenizer: LibraryTokenizer, written: Written) -> dict[str, Any]:
    """Special tokens of a file, by the writer's methods. What the tokenizer puts first, or calls so, begins a text.

    Raises ConfigError for a tokenizer that puts several before a text.
    """
    known, ids = written.tokenizer_config, written.token_ids(tokenizer)
    tokenizer.config = dict(known)
    if len(tokenizer.start) > 1:
        raise ConfigError(f"export.form=gguf: its tokenizer puts {len(tokenizer.start)} tokens first. {_ADVICE}")
    ends = [*([written.end.id] if written.end else []), *end_ids(ids)]
    named = token_text(known.get("bos_token"))
    own = None if named is None else tokenizer.token_id(named)
    start = (tokenizer.start or [ids["bos_token_id"] if own is None else own])[0]
    said = {"eos_token_id": next(iter(ends), None), "bos_token_id": start}
    said |= {"pad_token_id": ids["pad_token_id"], "add_bos_token": bool(tokenizer.start)}
    return {name: value for name, value in said.items() if value is not None}


def _vocabulary(described: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """Return what a file says of a tokenizer, by the writer's methods. Raises ConfigError for one it can't express."""
    model, split = described["model"], pre_tokenizer_name(described)
    plain = model.get("type") == "BPE" and not model.get("byte_fallback")
    if split is None or not plain or (described.get("normalizer") or {"type": "NFC"})["type"] != "NFC":
        raise ConfigError(f"export.form=gguf: no name of GGUF's is known for how this tokenizer splits text. {_ADVICE}")
    added = {token["id"]: token for token in described.get("added_tokens", ())}
    texts = {number: text for text, number in model["vocab"].items()} | {n: added[n]["content"] for n in added}
    kinds = [(3 if added[n]["special"] else 4) if n in added else 1 if n in texts else 5 for n in range(rows)]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    if not merges:  # a file has to have some: of bytes that no text has, and their token where a row is free
        last, free = visible_bytes()[-1], next((number for number in range(rows) if number not in texts), rows)
        merges, texts[free] = [f"{last} {last}"], last + last
    return {
        "tokenizer_model": "gpt2", "tokenizer_pre": split,
        "token_list": [texts.get(number, f"[PAD{number}]") for number in range(rows)],
        "token_types": kinds, "token_merges": merges,
    }  # fmt: skip
