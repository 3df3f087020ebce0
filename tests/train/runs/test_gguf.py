"""GGUF files, in and out. The library gguf, Transformers and llama.cpp are the oracles."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.conftest import Told
from tests.models.session import Session
from tests.train.runs.test_model_folder import (
    FAMILIES,
    LLAMA3,
    ODD,
    QUIET,
    TEXT,
    decoder,
    save,
    their_logits,
    tokens_of,
)
from ttrain.cli import main
from ttrain.config.compose import load
from ttrain.data.chat.jinja import tokenizer_settings
from ttrain.data.gguf_file import gguf_tokenizer, open_gguf
from ttrain.data.library_tokenizer import parse_tokenizer, read_tokenizer
from ttrain.models.settings import LlamaConfig
from ttrain.optim.settings import SGDConfig
from ttrain.optim.sgd import SGD
from ttrain.tasks.opening import of_folder
from ttrain.train.checkpoint.gguf_model import gguf_tensors
from ttrain.train.checkpoint.hub_folder import read_architecture
from ttrain.train.runs.export_gguf import gguf_problem

KINDS = gguf.GGMLQuantizationType
MODELS: dict[str, Callable[[], Any]] = {
    "llama": decoder("Llama"),
    "biases": decoder("Llama", attention_bias=True, mlp_bias=True, intermediate_size=64),
    "qwen2": FAMILIES["qwen2"],
    "qwen3": FAMILIES["qwen3"],
}
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.fixture(autouse=True, scope="module")
def files(shared: Path) -> None:
    """A folder of each model, and its files: `llama-fp32.gguf`."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    Path("book.txt").write_text(TEXT)
    for name, made in MODELS.items():
        save(made(), Path(name))
        for dtype in ("fp32", "q8_0", "q4_0"):
            export(f"model.from={name}", f"export.file={name}-{dtype}.gguf", f"export.dtype={dtype}")


def export(*overrides: str) -> None:
    assert main(["task=export", "export.form=gguf", *overrides]) == 0


def copied(old: str, new: str, said: Mapping[str, Any] = {}, tensors: Mapping[str, Any] = {}) -> str:
    """Write a file anew with other values, without those that are None; a tensor comes with its type."""
    reader = gguf.GGUFReader(old)
    writer = gguf.GGUFWriter(new, "")
    fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    types = {key: field.types for key, field in reader.fields.items()}
    writer.kv_data[0].clear()
    for key, value in {**fields, **said}.items():
        if value is not None:
            kind = gguf.GGUFValueType.get_type(value) if key in said or key not in types else types[key][0]
            kind = gguf.GGUFValueType.UINT32 if kind is gguf.GGUFValueType.INT32 else kind
            writer.add_key_value(key, value, kind, types[key][-1] if key in types else None)
    found = {tensor.name: (tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    for name, given in {**found, **tensors}.items():
        if given is not None:
            writer.add_tensor(name, given[0], raw_dtype=given[1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return new


def opened(file: str) -> Any:
    return of_folder(load(["task=sample", f"model.from={file}", "device.threads=1"]), "makes no text.")


def our_logits(file: str) -> np.ndarray:
    """The logits of a file, fp32 [1, context, vocabulary]."""
    given, tokens = opened(file), tokens_of()
    session = Session(given.model, SGD(SGDConfig()), rows=1, values=given.values)
    step = session.engine.build("logits", session.graph.trace_logits)
    return np.stack([np.array(step({"tokens": tokens, "position": at})["logits"]) for at in range(tokens.shape[1])], 1)


def their_model(file: str) -> Any:
    """What Transformers opens; it takes the width of Qwen3's heads from its defaults."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(".", gguf_file=file, **({"head_dim": 16} if "qwen3" in file else {}))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("dtype", "number"), [("q8_0", 7), ("q4_0", 2)])
def test_bytes_are_those_of_the_library(name: str, dtype: str, number: int) -> None:
    """Norms and biases stay fp32; rows that no blocks fill become fp16."""
    plain, narrow = gguf.GGUFReader(f"{name}-fp32.gguf"), gguf.GGUFReader(f"{name}-{dtype}.gguf")
    assert plain.fields["general.file_type"].contents() == 0
    assert narrow.fields["general.file_type"].contents() == number
    assert narrow.fields["general.quantization_version"].contents() == gguf.GGML_QUANT_VERSION
    kinds = set()
    for ours, given in zip(narrow.tensors, plain.tensors, strict=True):
        odd = ours.name.endswith("ffn_down.weight") and name != "biases"
        kind = KINDS.F32 if given.data.ndim == 1 else KINDS.F16 if odd else KINDS[dtype.upper()]
        assert (ours.name, ours.tensor_type) == (given.name, kind)
        expected = gguf.quants.quantize(np.array(given.data), kind)
        assert ours.data.tobytes() == expected.tobytes()
        kinds.add(kind)
    assert len(kinds) == (2 if name == "biases" else 3)


def test_what_is_stored_as_fp16_is_told(told: Told) -> None:
    words = ["task=export", "export.form=gguf", "model.from=llama", "export.file=told.gguf"]
    assert "2 matrices are written as fp16, since blocks of 32" in told(*words, "export.dtype=q8_0")
    assert "fp16" not in told(*words)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["fp32", "q8_0", "q4_0"])
def test_a_file_opens_as_in_transformers(name: str, dtype: str) -> None:
    file = f"{name}-{dtype}.gguf"
    given = opened(file)
    folder = read_architecture(Path(name))
    assert read_architecture(Path(file)) == {**folder, "norm_eps": pytest.approx(folder["norm_eps"], rel=1e-6)}
    if name == "biases":  # which Transformers leaves out
        if dtype == "fp32":
            assert np.abs(our_logits(file) - their_logits(Path(name), tokens_of())).max() < 1e-4
        return
    theirs = their_model(file)
    weights = theirs.state_dict()
    for path in given.model.parameters():
        assert np.array_equal(given.values[path], weights[given.model.original_name(path)].numpy()), path
    with torch.no_grad():
        expected = theirs.eval()(torch.from_numpy(tokens_of())).logits.numpy()
    assert np.abs(our_logits(file) - expected).max() < 1e-4 and expected.std() > 0.1


WIDENED = ("BF16", "F16", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ3_S", "TQ1_0")


@pytest.mark.parametrize("kind", WIDENED)
def test_all_types_are_widened_as_the_library_does(kind: str) -> None:
    """Those of Q4_K_M files among them; llama.cpp stores the row of feature h + i at place 2 i of a head."""
    wide = save(decoder("Llama", hidden_size=256, intermediate_size=256, num_hidden_layers=1)(), Path(f"wide-{kind}"))
    export(f"model.from={wide}", "export.file=wide.gguf")
    block, size = gguf.GGML_QUANT_SIZES[KINDS[kind]]
    draw = np.random.default_rng(0)
    names = {"attn_q": 256, "attn_k": 128, "ffn_up": 256}
    raw = {
        f"blk.0.{name}.weight": (draw.integers(0, 256, (rows, 256 // block * size), np.uint8), KINDS[kind])
        for name, rows in names.items()
    }
    with np.errstate(all="ignore"):  # random scales are huge at times
        found = gguf_tensors(Path(copied("wide.gguf", "random.gguf", tensors=raw)))
        query, key, up = (gguf.quants.dequantize(values, own) for values, own in raw.values())
        assert np.array_equal(np.asarray(found["model.layers.0.mlp.up_proj.weight"]), up, equal_nan=True)
        for name, stored, heads in (("q", query, 4), ("k", key, 2)):
            values = np.asarray(found[f"model.layers.0.self_attn.{name}_proj.weight"])
            width = len(stored) // heads
            for row in range(len(stored)):
                head, feature = divmod(row, width)
                pair, half = feature % (width // 2), feature // (width // 2)
                assert np.array_equal(values[row], stored[head * width + 2 * pair + half], equal_nan=True)


PUBLISHED = {**LLAMA3, "rope_theta": 5e5, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_rotary_scaling_of_llama_3_follows_from_its_factors(factor: float) -> None:
    model = decoder("Llama", rope_parameters={**PUBLISHED, "factor": factor})()
    folder = save(model, Path(f"scaled-{factor}"))
    plain = 5e5 ** -(np.arange(4) / 4)
    factors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert 1 == factors[0] < factors[2] < factors[3] == pytest.approx(factor)
    save(decoder("Llama", rope_theta=5e5)(), Path("plain"))
    export("model.from=plain", "export.file=plain.gguf")
    export(f"model.from={folder}", "export.file=ours.gguf")
    made = {tensor.name: tensor.data for tensor in gguf.GGUFReader("ours.gguf").tensors}["rope_freqs.weight"]
    assert made.dtype == np.float32 and np.allclose(made, factors, rtol=1e-6)
    for file in ("ours.gguf", copied("plain.gguf", "scaled.gguf", tensors={"rope_freqs.weight": (factors, KINDS.F32)})):
        assert read_architecture(Path(file)) == pytest.approx(read_architecture(folder))
        assert np.abs(our_logits(file) - their_logits(folder, tokens_of())).max() < 1e-4


@pytest.mark.parametrize("key", ["qk_norm", "qkv_bias"])
def test_factors_are_written_in_llamas_form_alone(key: str) -> None:
    config = LlamaConfig(rotary_scaling="llama3", **{key: True})
    assert f"model.rotary_scaling=llama3 beside model.{key}=true" in str(gguf_problem(config))
    assert gguf_problem(replace(config, rotary_scaling="linear")) is None


def test_rotary_positions_are_stretched_as_the_metadata_says() -> None:
    scaling = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    folder = save(decoder("Llama", rope_parameters=scaling)(), Path("linear"))
    file = copied(
        "llama-fp32.gguf", "linear.gguf", {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    )
    export(f"model.from={folder}", "export.file=stretched.gguf")
    said = gguf.GGUFReader("stretched.gguf").fields
    assert [said[f"llama.rope.scaling.{key}"].contents() for key in ("type", "factor")] == ["linear", 4.0]
    expected = their_logits(folder, tokens_of())
    for each in (file, "stretched.gguf"):
        assert np.abs(our_logits(each) - expected).max() < 1e-4
    assert np.abs(our_logits("llama-fp32.gguf") - expected).max() > 1e-2


def byte_level(split: Any) -> Tokenizer:
    made: Any = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = split, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<|endoftext|>", "<s>", "<think>"]
    trainer = trainers.BpeTrainer(vocab_size=295, special_tokens=specials, initial_alphabet=alphabet)
    made.train_from_iterator([TEXT + ODD.replace("<|endoftext|>", "") + " 1234 12'S we're" * 9], trainer)
    return made


def _cut(pattern: str) -> Any:
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), level])


LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
CUTS: dict[str, Callable[[], Any]] = {
    "gpt-2": lambda: LEVEL,
    "smollm": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), LEVEL]),
    "qwen2": lambda: _cut(SPLIT % ""),
    "llama-bpe": lambda: _cut(SPLIT % "{1,3}"),
}


def cut(name: str, start: bool = False) -> tuple[Any, dict[str, Any], str]:
    """A tokenizer that cuts text in a way of GGUF's, the config beside it, and a file with both."""
    own = byte_level(CUTS[name]())
    if name == "qwen2":
        own.normalizer = normalizers.NFC()
    if start:
        own.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    folder = save(decoder("Llama", eos_token_id=0)(), Path(f"cut-{name}"))
    own.save(str(folder / "tokenizer.json"))
    template = "{{ bos_token }}{{ messages[0].content }}"
    said = {"eos_token": "<|endoftext|>", "bos_token": "<s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    export(f"model.from={folder}", f"export.file=cut-{name}.gguf")
    return own, said, f"cut-{name}.gguf"


@pytest.mark.parametrize(("name", "start"), [*((name, False) for name in CUTS), ("qwen2", True)])
def test_a_tokenizer_comes_back(name: str, start: bool) -> None:
    """With its special tokens, what it puts before a text, and its chat template."""
    own, said, file = cut(name, start)
    assert open_gguf(Path(file))[0]["tokenizer.ggml.pre"] == name
    found: Any = read_tokenizer(file)
    text = ODD + " 1234567 we're WE'RE e\u0301 <think>x</think>   \n\n y"
    expected = own.encode(text, add_special_tokens=False).ids
    assert found.encode(text) == expected and found.decode(expected) == own.decode(expected, skip_special_tokens=False)
    assert found.vocabulary == own.get_vocab_size()  # rows without a token are none
    assert found.start == ([1] if start else [])
    assert tokenizer_settings(Path(file)) == {**said, "bos_token_id": 1, "eos_token_id": 0}


PIECES = ("some words of a book", "nobody  wrote é 漢\n", " book", "a</s>book <s>words</s> of")


def pieces() -> tuple[Any, str]:
    """A tokenizer of Llama 2's kind, and a file with it. Scores fall in the order of merges; unknown becomes bytes."""
    own: Any = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    own.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    own.decoder = decoders.Sequence(steps)
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    own.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=299, special_tokens=specials))
    described = json.loads(own.to_str())
    described["added_tokens"] = described["added_tokens"][:3]
    tokens = sorted(described["model"]["vocab"], key=described["model"]["vocab"].get)
    said = {"model": "llama", "pre": "default", "merges": None, "tokens": tokens, "bos_token_id": 1, "eos_token_id": 2}
    said["add_bos_token"] = None
    said["scores"] = [0.0] * 259 + [-float(number) for number in range(len(tokens) - 259)]
    said["token_type"] = [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259)
    given = {f"tokenizer.ggml.{key}": value for key, value in said.items()}
    return Tokenizer.from_str(json.dumps(described)), copied("llama-fp32.gguf", "pieces.gguf", given)


def test_a_tokenizer_of_sentencepiece_is_read() -> None:
    own, file = pieces()
    found: Any = parse_tokenizer(gguf_tokenizer(Path(file)))
    for text in PIECES:
        ids = own.encode(text, add_special_tokens=False).ids
        assert found.encode(text) == ids and found.decode(ids) == own.decode(ids, skip_special_tokens=False)
    assert found.start == [1]


def _bytes(change: Callable[[bytearray], Any]) -> Callable[[], Any]:
    def write() -> None:
        data = bytearray(Path("llama-fp32.gguf").read_bytes())
        Path("odd.gguf").write_bytes(change(data) or data)

    return write


def _said(**said: Any) -> Callable[[], Any]:
    given = {key.replace("__", "."): value for key, value in said.items()}
    return lambda: copied("llama-fp32.gguf", "odd.gguf", given)


def _tensor(name: str, *shape: Any, kind: Any = KINDS.F32, value: int = 1) -> Callable[[], Any]:
    dtype = {KINDS.F32: np.float32, KINDS.I32: np.int32}[kind]
    given = (np.full(shape if shape != ((),) else (), value, dtype), kind) if shape else None
    return lambda: copied("llama-fp32.gguf", "odd.gguf", tensors={name: given})


def _huge_array(data: bytearray) -> None:
    """Claim that an array of single bytes, of which no reader would find the end, has 2^60 of them."""
    at = data.index(b"tokenizer.ggml.token_type") + len("tokenizer.ggml.token_type") + 4
    data[at : at + 12] = struct.pack("<IQ", 0, 1 << 60)


ODD_FILES: list[tuple[Callable[[], Any], str]] = [
    (_bytes(lambda data: data[:50_000]), "is no GGUF file that can be read"),
    (_bytes(lambda data: data[:100]), "is no GGUF file that can be read"),
    (_bytes(lambda data: data[:2]), "is no GGUF file that can be read"),
    (lambda: Path("odd.gguf").write_bytes(b""), "is no GGUF file that can be read"),
    (_bytes(lambda data: b"GGML" + data[4:]), "GGUF magic invalid"),
    (_bytes(lambda data: data[:4] + b"\0\0\0\3" + data[8:]), "of a big-endian machine, and gguf-convert-endian"),
    (_bytes(lambda data: data[:4] + b"\1\0\0\0" + data[8:]), "appears to be version 1"),
    (_bytes(lambda data: data[:8] + struct.pack("<Q", 1 << 60) + data[16:]), "is no GGUF file that can be read"),
    (_bytes(lambda data: data[:16] + struct.pack("<Q", 1 << 60) + data[24:]), "is no GGUF file that can be read"),
    (_bytes(_huge_array), "is no GGUF file that can be read"),
    (_said(general__architecture="gemma3"), "general.architecture=gemma3; ttrain reads a whole llama"),
    (_said(split__count=3), "split.count=3"),
    (_said(llama__expert_count=8), "llama.expert_count=8; ttrain reads a whole llama"),
    (_said(llama__embedding_length=None), "config is damaged: no 'embedding_length'"),
    (_said(llama__embedding_length="wide"), "config is damaged: "),
    (_said(llama__attention__head_count=0), "config is damaged: "),
    (_said(llama__block_count=10**9), "model.layers=1000000000, but its weights are"),
    (_said(llama__rope__dimension_count=4), "partial_rotary_factor=0.5"),
    (_said(llama__rope__scaling__type="yarn"), "rope_type=yarn: model=llama has default, linear and llama3"),
    (_said(llama__rope__scaling__type="linear"), "rope_type=linear has factor=None"),
    (_said(llama__attention__head_count_kv=3), "model.kv_heads=3: must divide model.heads=4"),
    (_said(llama__feed_forward_length=64), "mlp.down_proj.weight: got [32, 48], expected [32, 64]"),
    (_tensor("blk.0.attn_q.weight"), "q_proj.weight: missing"),
    (_tensor("token_embd.weight"), "config is damaged: no 'token_embd.weight'"),
    (_tensor("token_embd.weight", ()), "config is damaged: tuple index out of range"),
    (_tensor("blk.0.attn_q.weight", 16, 32), "q_proj.weight: got [16, 32], expected [32, 32]"),
    (_tensor("blk.0.attn_q.weight", 32, 32, kind=KINDS.I32), "Dequantization for I32 is not yet implemented"),
    (_tensor("blk.0.strange.weight", 4), "blk.0.strange.weight: not a weight of this model"),
    (_tensor("rope_freqs.weight", 4, value=3), "rope_freqs.weight has other factors than Llama 3's"),
    (
        _said(tokenizer__ggml__pre="tekken"),
        "tokenizer.ggml.pre=tekken; ttrain reads model=llama, or model=gpt2 and pre=gpt-2",
    ),
    (_said(tokenizer__ggml__model="bert"), "tokenizer.ggml.model=bert"),
    (_said(tokenizer__ggml__tokens=None), "has a tokenizer that can't be used: no 'tokenizer.ggml.tokens'"),
    (_said(tokenizer__ggml__merges=["a"]), "has a tokenizer that can't be used"),
]


@pytest.mark.parametrize(("write", "message"), ODD_FILES, ids=[message[:40] for _, message in ODD_FILES])
def test_an_odd_file_is_told_in_one_line(write: Callable[[], Any], message: str, refused: Told) -> None:
    write()
    assert refused(message, *QUIET, "model.from=odd.gguf", "run.dir=odd").count("\n") == 1


def test_a_file_that_is_not_there_or_a_type_of_another_form_is_refused(refused: Told) -> None:
    refused("model.from=some/gone.gguf: is no folder with a config.json", *QUIET, "model.from=some/gone.gguf")
    words = ["task=export", "model.from=llama", "export.form=huggingface", "export.dir=no", "export.dtype=q8_0"]
    refused("export.dtype=q8_0: is a type of GGUF. Give export.form=gguf", *words)


def test_a_model_trains_goes_on_without_its_file_and_comes_out_again(told: Told) -> None:
    os.link("qwen3-q8_0.gguf", "base.gguf")
    for name, more in (("full", []), ("lora", ["lora.rank=2"])):
        words = [*QUIET, "model.from=base.gguf", f"run.dir={name}", *more]
        assert main(words) == 0
        assert main(["task=export", f"run.dir={name}", "export.form=huggingface", f"export.dir={name}-out"]) == 0
        assert np.abs(their_logits(Path(f"{name}-out"), tokens_of()) - our_logits("base.gguf")).max() < 1e-5
    assert main(["task=sample", "model.from=base.gguf", "sample.prompt=some", "sample.tokens=2", "device=cpu"]) == 0
    Path("base.gguf").unlink()
    for name in ("full", "lora"):
        assert main(["resume=auto", f"run.dir={name}", "train.steps=2"]) == 0
        assert main(["task=sample", f"run.dir={name}", "sample.prompt=some", "sample.tokens=2"]) == 0


def test_a_file_becomes_a_run_and_gives_values_to_another_model(told: Told) -> None:
    words = ["task=export", "model=llama", "export.source=llama-q4_0.gguf", "export.dir=source"]
    sizes = read_architecture(Path("llama-q4_0.gguf"))
    told_sizes = [
        f"model.{key}={str(value).lower()}" for key, value in sizes.items() if value is not None and key != "name"
    ]
    assert main([*words, *(each for each in told_sizes if "vocabulary_size" not in each)]) == 0
    assert "are taken" in told(
        *QUIET,
        *told_sizes,
        "model=llama",
        "data.tokenizer=llama-q4_0.gguf",
        "train.init_from=llama-q4_0.gguf",
        "run.dir=warm",
    )


def test_an_unknown_tokenizer_can_be_given(refused: Told) -> None:
    file = copied("llama-fp32.gguf", "unknown.gguf", {"tokenizer.ggml.pre": "tekken"})
    assert main([*QUIET, f"model.from={file}", "data.tokenizer=llama/tokenizer.json", "run.dir=given"]) == 0
    refused("tokenizer.ggml.pre=tekken", "task=sample", f"model.from={file}", "sample.prompt=some")


@pytest.mark.parametrize("tokens", [5, "abc"])
def test_tokens_that_are_no_texts_end_no_document(tokens: Any) -> None:
    said = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": 2, "tokenizer.chat_template": "{{ x }}"}
    file = copied("llama-fp32.gguf", "numbers.gguf", said)
    assert tokenizer_settings(Path(file)) == {"chat_template": "{{ x }}"}


def log_probabilities(logits: Any) -> Any:
    return torch.log_softmax(torch.as_tensor(np.asarray(logits)).double(), -1)


def their_scores(file: str) -> tuple[Any, np.ndarray]:
    """A model in llama.cpp, with caches in fp32, and its logits, fp32 [context, vocabulary]."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="the package llama-cpp-python is not installed")
    tokens = tokens_of()[0].tolist()
    model = llama_cpp.Llama(file, n_ctx=256, logits_all=True, n_threads=1, type_k=0, type_v=0, verbose=False)
    model.eval(tokens)
    return model, np.array(model.scores[: len(tokens)])


@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_computes_the_same(name: str) -> None:
    """It rounds what blocks are multiplied with to 8 bits, so that a file of blocks has other logits there."""
    plain, (model, scores) = our_logits(f"{name}-fp32.gguf")[0], their_scores(f"{name}-fp32.gguf")
    assert np.abs(scores - plain).max() < 1e-3
    tokenizer: Any = read_tokenizer(f"{name}-fp32.gguf")
    text = ODD.replace("\x07\x1b[0m", "")
    assert model.tokenize(text.encode(), add_bos=False, special=True) == tokenizer.encode(text)
    ours = log_probabilities(plain)
    divergence = (ours.exp() * (ours - log_probabilities(their_scores(f"{name}-q8_0.gguf")[1]))).sum(-1).mean()
    assert 0 < divergence < 0.01


@pytest.mark.parametrize("kind", ["linear", "llama3"])
def test_llama_cpp_stretches_positions_likewise(kind: str) -> None:
    scaling = {**LLAMA3, "rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    folder = save(decoder("Llama", rope_parameters=scaling)(), Path(f"stretched-{kind}"))
    export(f"model.from={folder}", f"export.file={kind}.gguf")
    assert np.abs(their_scores(f"{kind}.gguf")[1] - their_logits(folder, tokens_of())[0]).max() < 1e-3


def test_a_file_of_q4_k_m_is_read_as_llama_cpp_reads_it() -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="the package llama-cpp-python is not installed")
    save(decoder("Llama", hidden_size=256, intermediate_size=512, num_hidden_layers=4)(), Path("mixed"))
    export("model.from=mixed", "export.file=mixed.gguf")
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M
    assert llama_cpp.llama_model_quantize(b"mixed.gguf", b"mixed-q4_k_m.gguf", options) == 0
    kinds = {tensor.tensor_type for tensor in gguf.GGUFReader("mixed-q4_k_m.gguf").tensors}
    assert {KINDS.Q4_K, KINDS.Q6_K} < kinds
    ours = log_probabilities(our_logits("mixed-q4_k_m.gguf")[0])
    theirs = log_probabilities(their_scores("mixed-q4_k_m.gguf")[1])
    assert (ours.exp() * (ours - theirs)).sum(-1).mean() < 0.01


def test_tokenizers_are_those_of_llama_cpp() -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="the package llama-cpp-python is not installed")
    _, file = pieces()
    model, tokenizer = llama_cpp.Llama(file, vocab_only=True, verbose=False), read_tokenizer(file)
    for text in PIECES:
        assert model.tokenize(text.encode(), add_bos=False, special=True) == tokenizer.encode(text)
    text = ODD.replace("\x07\x1b[0m", "") + " 1234567 we're WE'RE <think>x</think>   \n\n y"
    for name in CUTS:
        file = cut(name)[2]
        model, tokenizer = llama_cpp.Llama(file, vocab_only=True, verbose=False), read_tokenizer(file)
        assert model.tokenize(text.encode(), add_bos=False, special=True) == tokenizer.encode(text)
