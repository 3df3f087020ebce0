"""Models that come and go as folders of the Transformers library, which is the oracle here."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from tests.conftest import Told
from tests.models.session import Session, initial_values
from tests.train.reading import write_rows
from ttrain.cli import main
from ttrain.config.build import build_model
from ttrain.config.compose import load
from ttrain.config.validate import typed_config
from ttrain.core.errors import CheckpointError, ConfigError
from ttrain.data.library_tokenizer import parse_tokenizer, train_bpe
from ttrain.data.text import named_tokenizer
from ttrain.data.tokenizer import ByteTokenizer, CharTokenizer
from ttrain.models.llama import Llama
from ttrain.models.settings import LlamaConfig
from ttrain.optim.settings import SGDConfig
from ttrain.optim.sgd import SGD
from ttrain.tasks.evaluating.measures import Documents, encoded_pair, opened
from ttrain.train.checkpoint.hub_folder import read_architecture, written_config
from ttrain.train.checkpoint.retention import find_checkpoint
from ttrain.train.runs.warm_start import open_warm_start
from ttrain.train.sampling.draw import encode_prompt

VOCABULARY, CONTEXT = 300, 16
TEXT = "some words of a book that nobody wrote\n" * 60
ODD = "river 1234 stone tabs\tand é 漢字 かな 😀👩‍👩‍👧 \x07\x1b[0m def f(x):\n    return x  # y\r\n<|endoftext|> end"
QUIET = ["data=text", "data.path=book.txt", "train.steps=1", "train.batch_size=2", "train.eval_sequences=2"]
QUIET += ["optimizer.lr=0", "sample.tokens=2", "train.peak_tflops=1", "logger=jsonl", "device=cpu", "device.threads=1"]


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_positions": CONTEXT, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2}
    ids = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**{**sizes, **ids}))


def decoder(name: str, **changes: Any) -> Callable[[], Any]:
    """A decoder of Transformers with fewer heads of keys than of queries."""

    def made() -> Any:
        import transformers

        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        sizes |= {"num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "vocab_size": VOCABULARY}
        ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
        config = getattr(transformers, f"{name}Config")(**{**sizes, **ids, **changes})
        return getattr(transformers, f"{name}ForCausalLM")(config)

    return made


LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8}
FAMILIES: dict[str, Callable[[], Any]] = {
    "gpt2": _gpt2,
    "llama": decoder("Llama", attention_bias=True, rope_parameters=LLAMA3),
    "mistral": lambda: decoder("Mistral", sliding_window=None)().half(),
    "qwen2": lambda: decoder("Qwen2", tie_word_embeddings=True)().bfloat16(),
    "qwen3": decoder("Qwen3", head_dim=16),
    "qwen3_moe": decoder("Qwen3Moe", head_dim=16, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=24),
}


def save(model: Any, folder: Path, **options: Any) -> Path:
    """A folder as Transformers writes it, with a tokenizer."""
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    torch.manual_seed(5)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder, **options)
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learned = Library(models.BPE())
    learned.pre_tokenizer, learned.decoder = level, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=["<|endoftext|>"], initial_alphabet=level.alphabet(), show_progress=False
    )
    learned.train_from_iterator([TEXT], trainer)
    theirs = PreTrainedTokenizerFast(tokenizer_object=learned, eos_token="<|endoftext|>")
    theirs.chat_template = "{{ messages[0].content }}{{ eos_token }}"
    theirs.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=list(FAMILIES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with several shards and an index."""
    place = tmp_path_factory.mktemp("family") / request.param
    return save(FAMILIES[request.param](), place, max_shard_size="30KB")


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(_gpt2(), tmp_path_factory.mktemp("gpt2") / "hub")


@pytest.fixture(autouse=True)
def offline(inside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(inside / "hub_cache"))
    Path("book.txt").write_text(TEXT)


def their_logits(folder: Path, tokens: np.ndarray) -> np.ndarray:
    from transformers import AutoModelForCausalLM

    model, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    assert not any(loading.values())
    with torch.no_grad():
        return model.eval()(torch.from_numpy(tokens)).logits.numpy()


def our_logits(run: str, tokens: np.ndarray) -> np.ndarray:
    """Return the logits of a run's parameters, fp32 [1, context, vocabulary]."""
    checkpoint = find_checkpoint(Path(run), "last")
    config = typed_config({**checkpoint.config, "precision": {"name": "fp32"}})
    model = build_model(config)
    session = Session(model, SGD(SGDConfig()), rows=1, values=checkpoint.weights())
    step = session.engine.build("logits", session.graph.trace_logits)
    rows = [step({"tokens": tokens, "position": place})["logits"] for place in range(tokens.shape[1])]
    return np.concatenate([np.array(row) for row in rows])[None]


def tokens_of(context: int = CONTEXT) -> np.ndarray:
    return np.random.default_rng(1).integers(0, VOCABULARY, (1, context))


def test_in_and_out_again(folder: Path, told: Told) -> None:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokens = tokens_of()
    assert "are taken" in told(*QUIET, f"model.from={folder}", "run.dir=run")
    ours = our_logits("run", tokens)
    assert np.abs(ours - their_logits(folder, tokens)).max() < 1e-4
    assert ours.std() > 0.1
    assert main(["task=export", "run.dir=run", "export.form=huggingface", "export.dir=out", "export.shard_mb=1"]) == 0
    assert np.abs(ours - their_logits(Path("out"), tokens)).max() < 1e-6 * np.abs(ours).max()
    # the tokenizer of the folder is that of the data, and what comes out is the same one
    (kept,) = Path("run/checkpoints").glob("*/tokenizer.json")
    own = parse_tokenizer(kept.read_text("utf-8"))
    for place, reader in ((folder, PreTrainedTokenizerFast), (Path("out"), AutoTokenizer)):
        theirs = reader.from_pretrained(place)
        ids = theirs(ODD).input_ids
        assert ids == own.encode(ODD) and theirs.decode(ids) == own.decode(ids) == ODD
        assert theirs.eos_token == "<|endoftext|>"
        assert theirs.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False) == "Hi<|endoftext|>"
    assert json.loads(Path("out/generation_config.json").read_text())["eos_token_id"] == 0
    # version 4 of Transformers reads rope_theta and rope_scaling, version 5 rope_parameters
    expected, written = read_architecture(Path("out")), json.loads(Path("out/config.json").read_text())
    Path("config.json").write_text(json.dumps({key: written[key] for key in written if key != "rope_parameters"}))
    as_llama = {"projection_bias": True} if folder.name == "qwen2" else {}  # with another tokenizer than Qwen2's
    assert written["model_type"] == ("llama" if as_llama else folder.name)
    assert read_architecture(Path()) == expected == read_architecture(folder) | as_llama
    card = Path("out/README.md").read_text()
    assert "| data | book.txt |" in card and "| val loss | " in card and f"| initial values | {folder} |" in card


def test_a_file_of_gguf_is_the_same_model(folder: Path, refused: Told) -> None:
    """Transformers reads such files; it takes one size from its defaults each of GPT-2 and Qwen3."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name = folder.name
    words = ["task=export", f"model.from={folder}", *GGUF]
    if name == "qwen3_moe":
        refused("model.experts=3", *words)
        return
    assert main(words) == 0
    if name == "llama":  # whose biases and stretching they leave out
        return
    sizes = {"gpt2": {"n_positions": CONTEXT}, "qwen3": {"head_dim": 16}}.get(name, {})
    model = AutoModelForCausalLM.from_pretrained(".", gguf_file="made.gguf", **sizes)
    logits = model.eval()(torch.from_numpy(tokens_of())).logits.detach().numpy()
    assert np.array_equal(logits, their_logits(folder, tokens_of()))
    theirs = AutoTokenizer.from_pretrained(".", gguf_file="made.gguf")
    assert theirs(ODD).input_ids == AutoTokenizer.from_pretrained(folder)(ODD).input_ids


GGUF = ["export.form=gguf", "export.file=made.gguf"]


@pytest.mark.parametrize(("key", "biases"), [("attention_bias", 8), ("mlp_bias", 6)])
def test_biases_that_a_reader_of_gguf_leaves_out_are_told(key: str, biases: int, told: Told, refused: Told) -> None:
    from gguf import GGUFReader

    save(decoder("Llama", **{key: True})(), Path("hub"))
    assert "WARNING: llama.cpp reads biases" in told("task=export", "model.from=hub", *GGUF)
    assert sum(tensor.name.endswith(".bias") for tensor in GGUFReader("made.gguf").tensors) == biases
    save(decoder("Qwen3", attention_bias=True)(), Path("normed"))
    refused("model.qk_norm=true beside model.qkv_bias=true", "task=export", "model.from=normed", *GGUF)


FORMS = {  # model_type that goes out -> what makes such a model
    "gpt2": ["model=nano-gpt"],  # without biases: GPT-2 has all of them, so they are zero there
    "llama": ["model=llama", "model.kv_heads=1"],
    "mistral": ["model=llama", "model.window=8"],
    "qwen2": ["model=llama", "model.qkv_bias=true"],
    "qwen3": ["model=llama", "model.qk_norm=true"],
}


@pytest.mark.parametrize(("form", "tokenizer"), [*zip(FORMS, ["char", "byte", "bpe", "char", "bpe"])])
def test_tokenizers_and_models_of_ours_go_out(form: str, tokenizer: str, refused: Told) -> None:
    from transformers import AutoTokenizer

    own = {"char": CharTokenizer(ODD), "byte": ByteTokenizer(), "bpe": train_bpe([TEXT], 270)}[tokenizer]
    Path("own.json").write_text(own.to_json(), "utf-8")
    sizes = ["model.layers=1", "model.width=16", "model.heads=2", f"model.context={CONTEXT}", "model.vocabulary=300"]
    sizes += [*FORMS[form], f"model.tied={str(tokenizer == 'char').lower()}"]
    Path("book.txt").write_text(ODD * 60, "utf-8")
    assert main([*QUIET, *sizes, "data.tokenizer=own.json", "run.dir=run"]) == 0
    assert main(["task=export", "run.dir=run", "export.form=huggingface", "export.dir=out"]) == 0
    ours = our_logits("run", tokens_of())
    assert np.abs(ours - their_logits(Path("out"), tokens_of())).max() < 1e-6
    theirs = AutoTokenizer.from_pretrained("out")
    ids = theirs(ODD).input_ids
    assert ids == own.encode(ODD) and theirs.decode(ids) == ODD
    made = json.loads(Path("out/config.json").read_text())["model_type"]
    assert made == ("llama" if form == "qwen2" else form)  # Transformers opens qwen2 with a tokenizer of Qwen2's kind
    if tokenizer == "char":
        refused("no name of GGUF's is known", "task=export", "run.dir=run", *GGUF)
    elif form != "mistral":  # GGUF has no word for its window
        assert main(["task=export", "run.dir=run", *GGUF]) == 0
        text = ODD.replace("<|endoftext|>", "")  # which Transformers adds to such a file's tokens
        assert AutoTokenizer.from_pretrained(".", gguf_file="made.gguf")(text).input_ids == own.encode(text)


def test_a_model_of_qwen2_keeps_its_form_beside_a_tokenizer_of_its_kind(refused: Told) -> None:
    from transformers import AutoTokenizer, Qwen2Tokenizer

    learned = json.loads(train_bpe([TEXT + "12 34 1234 " * 9], 290).to_json())["model"]
    vocabulary = {**learned["vocab"], "<|endoftext|>": 290}
    theirs = Qwen2Tokenizer(vocab=vocabulary, merges=[tuple(merge) for merge in learned["merges"]])
    save(FAMILIES["qwen2"](), Path("hub"))
    theirs.save_pretrained("hub")
    assert main(["task=export", "model.from=hub", "export.form=huggingface", "export.dir=out"]) == 0
    assert json.loads(Path("out/config.json").read_text())["model_type"] == "qwen2"
    assert np.array_equal(their_logits(Path("out"), tokens_of()), their_logits(Path("hub"), tokens_of()))
    assert AutoTokenizer.from_pretrained("out")(ODD).input_ids == theirs(ODD).input_ids
    save(decoder("Qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=0)(), Path("windowed"))
    refused("export.form=ttrain", "task=export", "model.from=windowed", "export.form=huggingface", "export.dir=no")


def test_a_run_needs_its_folder_no_more_and_what_that_said_comes_out_again(refused: Told) -> None:
    """Ids of special tokens, and the longest sequence where the run had a shorter one; the ids of a checkpoint, too."""
    from transformers import AutoConfig, GenerationConfig

    save(decoder("Llama")(), Path("hub"))
    ids = {"bos_token_id": 7, "eos_token_id": [0, 9], "pad_token_id": 8}
    Path("hub/generation_config.json").write_text(json.dumps(ids))
    _changed(bos_token_id=3, pad_token_id=None)(Path("hub"))
    command = [*QUIET, "model.from=hub", "run.dir=run"]
    assert main([*command, "model.context=8"]) == 0
    before, _ = our_logits("run", tokens_of(8)), save(decoder("Llama")(), Path("other"))
    for key in ("model.from=other", "train.init_from=other"):
        refused(f"{key}: is for new runs", *QUIET, "resume=auto", key, "run.dir=run")
    shutil.rmtree("hub")
    assert main([*command, "resume=auto", "train.steps=2"]) == main(["resume=run", "train.steps=3"]) == 0
    newest = find_checkpoint(Path("run"), "last").path
    assert load([*command, f"resume={newest}"]).model.vocabulary == VOCABULARY
    assert np.array_equal(our_logits("run", tokens_of(8)), before)
    assert main(["task=export", "run.dir=run", "export.form=huggingface", "export.dir=out"]) == 0
    for said in (AutoConfig.from_pretrained("out"), GenerationConfig.from_pretrained("out")):
        assert {name: getattr(said, name) for name in ids} == ids
    assert AutoConfig.from_pretrained("out").max_position_embeddings == CONTEXT
    described = json.loads(Path("out/tokenizer_config.json").read_text())
    assert described["model_max_length"] == CONTEXT and not ids.keys() & described.keys()
    refused("model.from=hub: is no folder", *command, "run.dir=new")


def _template(*names: str) -> dict[str, Any]:
    """A post-processor that puts special tokens around a text, A."""
    pieces = [
        {"Sequence": {"id": "A", "type_id": 0}} if n == "A" else {"SpecialToken": {"id": n, "type_id": 0}}
        for n in names
    ]
    special = {name: {"id": name, "ids": [number], "tokens": [name]} for name, number in (("<s>", 280), ("</s>", 281))}
    second = [{"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": pieces, "pair": pieces + second, "special_tokens": special}


LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
STARTS: dict[str, tuple[dict[str, Any] | None, dict[str, Any], bool]] = {  # post-processor, config, a BOS?
    "none": (None, {}, False),
    "template": (_template("<s>", "A"), {}, True),
    "sequence": ({"type": "Sequence", "processors": [LEVEL, _template("<s>", "A")]}, {}, True),
    "both ends": (_template("<s>", "A", "</s>"), {}, True),
    "roberta": ({"type": "RobertaProcessing", "sep": ["</s>", 281], "cls": ["<s>", 280], "trim_offsets": True,
                 "add_prefix_space": False}, {}, True),
    "flag alone": (LEVEL, {"add_bos_token": True}, False),
    "flag against it": (_template("<s>", "A"), {"add_bos_token": False}, True),
}  # fmt: skip


def start_folder(kind: str) -> Path:
    """A Llama whose tokenizer has <s> and </s>, and puts the first before a text, or not."""
    folder = save(decoder("Llama", bos_token_id=280, eos_token_id=281)(), Path("hub"))
    post, config, _ = STARTS[kind]
    described, said = (json.loads((folder / name).read_text()) for name in ("tokenizer.json", "tokenizer_config.json"))
    like = described["added_tokens"][0]
    described["added_tokens"] += [{**like, "id": 280 + n, "content": text} for n, text in enumerate(("<s>", "</s>"))]
    (folder / "tokenizer.json").write_text(json.dumps({**described, "post_processor": post}))
    said |= {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<|endoftext|>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    if kind == "none":
        _changed("generation_config.json", bos_token_id=7)(folder)
    return folder


@pytest.mark.parametrize("kind", STARTS)
def test_a_prompt_begins_as_transformers_begins_a_text(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """And so does every export of the folder, and the text that a model writes is the same."""
    import gguf
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, prompt = start_folder(kind), "some words"
    theirs = AutoTokenizer.from_pretrained(folder)
    ids = theirs(prompt).input_ids
    expected = ids if ids[-1] != 281 else ids[:-1]  # an end behind the prompt is left off
    assert (expected[0] == 280) == STARTS[kind][2]
    assert encode_prompt(named_tokenizer("hub/tokenizer.json"), prompt) == expected
    model = AutoModelForCausalLM.from_pretrained(folder)
    written = model.generate(torch.tensor([expected]), do_sample=False, max_new_tokens=6)[0]
    capsys.readouterr()
    words = ["sample.temperature=0", "sample.tokens=6", "device=cpu", "device.threads=1"]
    assert main(["task=sample", "model.from=hub", f"sample.prompt={prompt}", *words]) == 0
    assert capsys.readouterr().out.strip() == theirs.decode(written, skip_special_tokens=True).strip()
    assert main(["task=export", "model.from=hub", "export.form=huggingface", "export.dir=out"]) == 0
    assert AutoTokenizer.from_pretrained("out")(prompt).input_ids == ids
    assert main(["task=export", "model.from=hub", *GGUF]) == 0
    said = {name: field.contents() for name, field in gguf.GGUFReader("made.gguf").fields.items()}
    if kind == "none":  # though the folder says something else beside its tokenizer
        assert json.loads((folder / "generation_config.json").read_text())["bos_token_id"] == 7
    names = ("bos_token_id", "eos_token_id", "padding_token_id", "add_bos_token")
    assert [said.get(f"tokenizer.ggml.{name}") for name in names] == [280, 281, 0, STARTS[kind][2]]


def test_what_is_measured_and_learned_begins_so_too() -> None:
    """Documents begin with the token, conversations as their template says; what scores a text reads it first."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = start_folder("template")
    theirs, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    rows = [{"text": "some words"}, {"text": "<s>of a book"}]
    talk = [{"role": "user", "content": "that"}, {"role": "assistant", "content": "nobody"}]
    write_rows("rows.jsonl", [*rows, {"messages": talk}] * 2)
    words = ["data=documents", "data.sources=[rows.jsonl]", "data.template=chatml"]
    assert main(["task=prepare", *words, "data.tokenizer=hub/tokenizer.json", "prepare.dir=ids"]) == 0
    files = [np.fromfile(f"ids/{split}.bin", np.uint16).tolist() for split in ("train", "val")]
    documents = {text for ids in files for text in theirs.decode(ids).split("</s>")}
    chat = "<|im_start|>user\nthat<|im_end|>\n<|im_start|>assistant\nnobody<|im_end|>"
    assert documents == {"<s>some words", "<s>of a book", chat, ""}

    def expected(text: str, skipped: int = 1) -> float:
        ids = torch.tensor([theirs(text).input_ids])
        with torch.no_grad():
            scores = torch.log_softmax(model(ids).logits[0].double(), -1)
        return float(scores[:-1].gather(1, ids[0, 1:, None])[skipped - 1 :].sum())

    Path("texts.jsonl").write_text(json.dumps({"text": "some words of"}) + "\n")
    Path("ask.jsonl").write_text(json.dumps({"ctx": "some", "endings": ["words", "book"], "label": 0}) + "\n")
    with opened(load(["task=eval", "model.from=hub", "device=cpu", "device.threads=1"])) as scorer:
        measured = Documents.read(scorer, "eval.text", ["texts.jsonl"], None).measure(scorer)
        pair = encoded_pair(scorer.tokenizer, "some", " words")
        (found,) = scorer.likelihoods([scorer.text(*pair)])
    assert measured["loss"] * measured["tokens"] == pytest.approx(-expected("some words of"), rel=1e-5)
    assert found.total == pytest.approx(expected("some words", len(pair[0])), rel=1e-5)


def test_a_new_model_of_one_long_text_begins_as_it_learnt() -> None:
    """It never sees a BOS, so none stands before a prompt, and exports say so."""
    import gguf
    from transformers import AutoTokenizer

    start_folder("template")
    sizes = ["model=llama", "model.layers=1", "model.width=16", "model.heads=2", "model.kv_heads=1", "model.context=8"]
    assert main([*QUIET, *sizes, "data.tokenizer=hub/tokenizer.json", "run.dir=run"]) == 0
    assert main(["task=export", "run.dir=run", "export.form=huggingface", "export.dir=out"]) == 0
    assert 280 not in AutoTokenizer.from_pretrained("out")("some words").input_ids
    assert main(["task=export", "run.dir=run", *GGUF]) == 0
    assert gguf.GGUFReader("made.gguf").fields["tokenizer.ggml.add_bos_token"].contents() is False
    assert main([*QUIET, "model.from=hub", "run.dir=further"]) == 0
    assert main(["task=export", "run.dir=further", "export.form=huggingface", "export.dir=more"]) == 0
    assert AutoTokenizer.from_pretrained("more")("some words").input_ids[0] == 280


def _changed(name: str = "config.json", /, **entries: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / name
        file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))

    return change


def _tensors(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors")

    return changed


def _indexed(**map_: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": map_}))


def _more_tokens(folder: Path) -> None:
    file = folder / "tokenizer.json"
    file.write_text(train_bpe([" ".join(f"{n}abc{n * 7}" for n in range(400))], 400).to_json())


_LAST, _WEIGHTS = "transformer.ln_f.weight", "model.safetensors"
WRONG: list[tuple[Any, list[str], str]] = [
    (_changed(n_layer="two"), [], "model.layers='two': must be an integer"),
    (_changed(n_layer=10**9), [], "model.layers=1000000000, but its weights are 28 tensors of at most 300 rows"),
    (_changed(vocab_size=10**12), ["task=plan"], "model.vocabulary=1000000000000, but its weights are"),
    (None, ["model.from=null", "model=llama", "model.layers=1000000000"], "model.layers=1000000000: must be at most"),
    (_changed(vocab_size=301), [], "transformer.wte.weight: got [300, 32], expected [301, 32]"),
    (_tensors(lambda weights: weights.pop(_LAST)), [], f"must agree: {_LAST}: missing"),
    (_tensors(lambda weights: weights[_LAST].fill(np.nan)), [], "norm.weight holds NaN or infinity"),
    (lambda folder: os.truncate(folder / _WEIGHTS, 9000), [], f"{_WEIGHTS} is not a safetensors file that can be read"),
    (lambda folder: (folder / _WEIGHTS).unlink(), [], f"has no {_WEIGHTS}"),
    (lambda folder: (folder / "config.json").write_text("{"), [], "config.json is not JSON that can be read"),
    (lambda folder: (folder / "tokenizer.json").unlink(), [], "has no tokenizer.json"),
    (lambda folder: (folder / "tokenizer.json").write_text("[]"), [], "tokenizers library cannot read the tokenizer"),
    (lambda folder: (folder / "adapter_config.json").write_text("{}"), [], "holds adapters too (adapter_config.json)"),
    (lambda folder: (folder / _WEIGHTS).rename(folder / "model.bin"), [], "pickles (model.bin), which could run code"),
    (_indexed(a="b.safetensors"), [], "names b.safetensors, which is not there"),
    (_indexed(**{_LAST: "model.safetensors"}), [], "do not agree about"),
    (_indexed(a="../evil.safetensors"), [], "names '../evil.safetensors'; weights are read from"),
    (_more_tokens, [], "model.vocabulary=300: the tokenizer has 400 ids. Give the tokenizer of model.from"),
    (None, ["model.layers=3"], "has 2. Leave it out, or give what"),
    (None, ["model=gpt2"], "model.preset=124M: hub has other sizes"),
    (None, ["model=agillm"], "model=agillm: hub has gpt. Leave it out"),
    (None, ["model.kv_heads=2"], "model.kv_heads: unknown key"),
    (None, ["model.context=8"], "model.context=8: "),
    (None, ["train.init_from=hub"], "Leave one of the two out"),
    (None, ["data.tokenizer=byte"], "its tokenizer is another one"),
    (None, ["model.from=some/model"], "hf download some/model --local-dir <folder>"),
    (None, ["model.from=book.txt"], "is no folder with a config.json"),
]


@pytest.mark.parametrize(("change", "overrides", "message"), WRONG, ids=[message[:40] for _, _, message in WRONG])
def test_one_line_before_any_step(change: Any, overrides: list[str], message: str, gpt2: Path, refused: Told) -> None:
    shutil.copytree(gpt2, "hub")
    if change is not None:
        change(Path("hub"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert refused(message, *QUIET, "model.from=hub", "run.dir=run", *overrides).count("\n") == 1


@pytest.mark.parametrize("key", ["num_experts", "moe_intermediate_size"])
def test_a_config_with_more_experts_than_weights_is_refused(key: str, inside: Path, refused: Told) -> None:
    """Before the names of so many experts are made."""
    save(FAMILIES["qwen3_moe"](), Path("mixture"))
    _changed(**{key: 10**12})(Path("mixture"))
    told = refused("=1000000000000, but its weights are", *QUIET, "model.from=mixture", "run.dir=run")
    assert told.count("\n") == 1


@pytest.mark.parametrize(("ids", "advice"), [(VOCABULARY, "Name one of its own: "), (280, "data.end_token=<one of")])
def test_a_folder_without_an_end_token_gets_the_advice_that_mends_it(
    ids: int, advice: str, gpt2: Path, refused: Told
) -> None:
    """With a row of the embedding for each id, and with rows to spare."""
    shutil.copytree(gpt2, "hub")
    tokenizer = train_bpe([" ".join(f"{n}abc{n * 7}" for n in range(400))], ids)
    assert tokenizer.vocabulary == ids
    Path("hub/tokenizer.json").write_text(tokenizer.to_json())
    Path("hub/tokenizer_config.json").write_text("{}")
    Path("docs").mkdir()
    for number in range(9):
        Path(f"docs/{number}.txt").write_text(f"{number} " * 20)
    words = [word for word in QUIET if not word.startswith("data")] + ["data=documents", "data.sources=[docs]"]
    refused(advice, *words, "model.from=hub", "run.dir=run")
    assert main([*words, "model.from=hub", "run.dir=run", "data.end_token=z"]) == 0


SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 9,
    "max_position_embeddings": 64, "rope_theta": 1e4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type=yarn: model=llama has default, linear"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, "rope_type=dynamic: "),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_type=llama3 has factor=None, low_freq_factor=None"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_type=linear has factor=None: must be a number"),
        ({"rope_scaling": {"type": "linear", "factor": "8"}}, "rope_type=linear has factor='8': must be a number"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_scaling": "llama3"}, "its config is damaged: "),
        ({"num_attention_heads": 0}, "its config is damaged: "),
        ({"hidden_size": "wide"}, "its config is damaged: "),
        ({"hidden_size": None}, "its config is damaged: "),
        ({"tie_word_embeddings": "no", "attention_bias": None}, ": tie_word_embeddings='no': expected true or false"),
        (
            {"model_type": "qwen3_moe", "norm_topk_prob": "no", "attention_bias": []},
            "attention_bias=[], norm_topk_prob",
        ),
        ({"quantization_config": {"bits": 4}}, "its weights are quantized"),
        ({"auto_map": {"AutoModel": "evil.Model"}}, "names code of its own (auto_map)"),
        ({"model_type": "gpt2", "activation_function": "quick_gelu"}, "activation_function=quick_gelu"),
        ({"model_type": "gpt2", "n_inner": 7}, "n_inner=7, which model=gpt2 does not compute"),
        ({"model_type": ["llama"]}, "has model_type=['llama']"),
        ({"model_type": "gemma3"}, "has model_type='gemma3'; ttrain has gpt2, llama, mistral, qwen2, qwen3"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}, "1 of 2"),
    ],
)
def test_what_no_model_here_computes_is_named(entries: dict[str, Any], message: str) -> None:
    Path("config.json").write_text(json.dumps({"model_type": "llama", **SIZES}))
    assert read_architecture(Path())["kv_heads"] == 4
    Path("config.json").write_text(json.dumps({"model_type": "llama", **SIZES, **entries}))
    with pytest.raises(CheckpointError) as error:
        read_architecture(Path())
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_context_of_rotary_positions_may_be_shorter() -> None:
    Path("hub").mkdir()
    Path("hub/config.json").write_text(json.dumps({"model_type": "llama", **SIZES}))
    Path("hub/tokenizer.json").write_text(ByteTokenizer().to_json())
    loaded = load(["model.from=hub", "model.context=32", "model.dropout=0.1"]).model
    assert (loaded.name, loaded.context, loaded.dropout, loaded.vocabulary) == ("llama", 32, 0.1, 9)
    assert load(["model.from=hub", "model=llama", "model.preset=null"]).model.context == 64
    assert load(["model.from=hub", "data.tokenizer=byte"]).data.tokenizer == "byte"
    for overrides in (["model.context=65"], ["model.rotary_base=1e6"], ["model=llama"], ["model=gpt2"]):
        with pytest.raises(ConfigError, match=r"hub has"):
            load(["model.from=hub", *overrides])


def test_weights_come_one_tensor_at_a_time(tmp_path: Path) -> None:
    """Python's peak memory is bounded while a model of 9 tensors of a MB each is read and placed."""
    config = LlamaConfig(layers=1, heads=4, width=256, hidden=1024, context=8, vocabulary=1024, tied=False)
    model = Llama(config)
    save_file(model.to_original(initial_values(model, 1)), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(written_config(config)))
    session = Session(model, SGD(SGDConfig()), rows=1)
    tracemalloc.start()
    open_warm_start(str(tmp_path), model, whole=True).apply(session.state)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    sizes = [4 * int(np.prod(parameter.shape)) for parameter in model.parameters().values()]
    assert max(sizes) == 1 << 20 and sum(sizes) > 6 << 20
    assert peak < 2 * max(sizes)
    assert (session.state.read("head.weight") == initial_values(model, 1)["head.weight"]).all()


def test_a_name_is_found_in_the_cache_of_the_hub_and_becomes_a_run(gpt2: Path, told: Told, monkeypatch: Any) -> None:
    """A warm start takes what fits."""
    asked: list[Any] = []

    def download(name: str, **options: Any) -> str:
        asked.append((name, options["local_files_only"]))
        return str(gpt2)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert main([*QUIET, "model.from=some/gpt", "run.dir=run"]) == 0
    assert main(["task=export", "model.from=some/gpt", "export.dir=bare"]) == 0
    assert set(asked) == {("some/gpt", True)}
    assert json.loads(Path("run/run.json").read_text())["attempts"][0]["model"] == "gpt"
    assert np.abs(our_logits("bare", tokens_of()) - their_logits(gpt2, tokens_of())).max() < 1e-4
    sizes = ["model.layers=1", "model.width=32", "model.heads=4", "model.context=8", "model.vocabulary=300"]
    overrides = [*QUIET, *sizes, "model.bias=true", f"data.tokenizer={gpt2}/tokenizer.json", f"train.init_from={gpt2}"]
    assert "positions.weight  [8, 32] starts anew" in told(*overrides, "run.dir=warm")


def test_the_recipe_trains_a_model_of_its_form_on_chats(tmp_path: Path) -> None:
    """SmolLM2-135M with 2 of its 30 layers, and with few rows in its embedding."""
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    made = decoder("Llama", **sizes, max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=True)()
    save(made.bfloat16(), tmp_path / "hub")
    answer = {"role": "assistant", "content": TEXT[:39]}
    chats = [{"messages": [{"role": "user", "content": f"what words, {number}?"}, answer]} for number in range(40)]
    write_rows("chats.jsonl", chats)
    overrides = ["recipe=smollm2-135m-finetune", "model.from=hub", "data.sources=[chats.jsonl]", "run.dir=run"]
    small = ["model.context=32", "train.steps=5", "train.batch_size=4", "train.gradient_accumulation=2"]
    small += ["schedule.warmup=0", "train.eval_every=null", "optimizer.lr=1e-3"]
    assert main([*overrides, *small, *QUIET[-5:]]) == 0
    config = find_checkpoint(Path("run"), "last").config
    found = config["model"]["name"], config["model"]["context"], config["data"]["end_token"]
    assert found == ("llama", 32, "<|endoftext|>")
    assert json.loads(Path("run/summary.json").read_text())["val/loss"] < 3.0  # of 6.0
    assert main(["task=export", "run.dir=run", "export.form=huggingface", "export.dir=out", "export.shard_mb=4"]) == 0
    assert len(list(Path("out").glob("model-*.safetensors"))) > 1
    tokens = tokens_of(32)
    assert np.abs(our_logits("run", tokens) - their_logits(Path("out"), tokens)).max() < 1e-5
