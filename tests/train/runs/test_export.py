"""Weights leave by task=export, as files that other programs read and as runs. New runs take initial values."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from tests.conftest import Told
from tests.models.plain_agillm import next_scores, pair_scores
from tests.models.session import initial_values
from tests.train.reading import arrays, attempts
from ttrain.cli import main
from ttrain.data.library_tokenizer import parse_tokenizer
from ttrain.data.tokenizer import CharTokenizer
from ttrain.models.gpt import GPT
from ttrain.models.settings import GPTConfig, LlamaConfig
from ttrain.train.checkpoint.checkpoint import read_checkpoint
from ttrain.train.checkpoint.weights_file import read_metadata
from ttrain.train.runs.export_gguf import gguf_problem
from ttrain.train.runs.run_directory import read_config

SIZE = {"layers": 1, "heads": 2, "width": 16, "context": 8}
MODEL = ["model=nano-gpt", "model.bias=true", *(f"model.{key}={value}" for key, value in SIZE.items())]
AGILLM = ["model=agillm", "model.preset=null", "model.layers=2", "model.heads=2", "model.width=16", "model.rank=20"]
AGILLM += ["model.context=12"]
TRAIN = ["train.steps=2", "train.batch_size=2", "train.eval_every=null", "train.eval_sequences=2", "sample.tokens=5"]
TRAIN += ["train.peak_tflops=1", "logger=jsonl", "device.threads=1"]


DATA = ["data=text", "data.path=text.txt"]


@pytest.fixture(autouse=True, scope="module")
def runs(shared: Path) -> None:
    """A trained run of each model, and the original's file of the second."""
    Path("text.txt").write_text("abcdefg hijk\n" * 400)
    assert main([*DATA, *MODEL, *TRAIN, "run.dir=run"]) == main([*DATA, *AGILLM, *TRAIN, "run.dir=agillm"]) == 0
    assert main(["task=export", "run.dir=agillm", "export.file=whole.pt"]) == 0


def export(*overrides: str) -> int:
    return main(["task=export", "run.dir=run", *overrides])


def parameters(run: str) -> dict[str, np.ndarray]:
    return arrays(run, files="parameters-*")


def sampled(capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    capsys.readouterr()
    assert main(["task=sample", "sample.tokens=15", "sample.prompt=abc", *overrides]) == 0
    return capsys.readouterr().out


def test_a_pt_file_is_nanogpts(capsys: pytest.CaptureFixture[str]) -> None:
    assert export("export.file=made/nano.pt") == 0
    assert "made/nano.pt: " in capsys.readouterr().out
    content = torch.load("made/nano.pt", weights_only=True)
    sizes = content["model_args"]
    assert (sizes["n_layer"], sizes["n_head"], sizes["n_embd"], sizes["block_size"]) == (1, 2, 16, 8)
    transformers = pytest.importorskip("transformers", reason="the package transformers is not installed")
    named = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2)).state_dict()
    assert content["model"].keys() == named.keys()
    wanted = parameters("run")["blocks.0.attention.qkv.weight"]
    assert np.array_equal(content["model"]["transformer.h.0.attn.c_attn.weight"].numpy(), wanted)


@pytest.mark.parametrize("form", ["original", "huggingface", "ttrain"])
def test_a_safetensors_file_or_folder_becomes_the_same_run_again(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    file, made, expected = f"{form}.safetensors", f"again-{form}", parameters("run")
    assert export(f"export.{'dir' if form == 'huggingface' else 'file'}={file}", f"export.form={form}") == 0
    vocabulary = len(expected["embedding.weight"])
    overrides = [*MODEL, f"model.vocabulary={vocabulary}", f"export.source={file}", f"export.dir={made}"]
    assert main(["task=export", *overrides]) == 0
    assert "without optimizer state" in capsys.readouterr().out
    found = parameters(made)
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[path], value) for path, value in expected.items())


def test_a_run_becomes_a_run_without_optimizer_state(capsys: pytest.CaptureFixture[str]) -> None:
    assert export("export.dir=bare") == 0
    files = [path.name for path in Path("bare/checkpoints/step_00000002").iterdir()]
    assert not any(name.startswith("optimizer") for name in files)
    text = sampled(capsys, "run.dir=run")
    assert text == sampled(capsys, "run.dir=bare") and len(text) == 19


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["run.dir=run"], "nothing to write. Give export.file"),
        (["run.dir=run", "export.form=gguf"], "ttrain: export.form=gguf: writes a file. Give export.file="),
        (["run.dir=run", "export.form=peft"], "ttrain: export.form=peft: writes a folder. Give export.dir="),
        (["export.file=x.pt"], "needs parameters. Give run.dir=<run>, model.from="),
        (["run.dir=run", "export.file=x.bin"], "the name must end with .pt or .safetensors"),
        (["run.dir=run", "export.file=x.pt", "export.form=ttrain"], "Give export.file=x.safetensors"),
        (["run.dir=run", "export.file=x.pt", "export.form=huggingface"], "writes a folder. Give export.dir"),
        (["run.dir=run", "export.file=x.pt", "export.form=onnx"], "export.form=onnx"),
        (["run.dir=run", "export.file=x.pt", "export.checkpoint=9"], "no checkpoint of step 9"),
        (["run.dir=run", "export.file=x.pt", "export.checkpoint=newest"], "must be last, best or a step number"),
        (["run.dir=run", "export.dir=run"], "export.dir=run exists and is not empty"),
        (["run.dir=run", "export.dir=x", "export.compact=true"], "only AGILLM has rank matrices"),
        (["run.dir=gone", "export.file=x.pt"], "gone is not a run of ttrain"),
        (["export.source=gone.pt", "export.dir=x"], "gone.pt is not a file"),
        (["export.source=other.pt", "export.dir=x", *MODEL, "model.vocabulary=9"], "the weights do not fit this model"),
        (["export.source=other.pt", "export.dir=x", "model=agillm"], "holds no weights of AGILLM-3: got weight"),
        (["run.dir=run", "export.file=text.txt/x.pt"], "can't be written"),
        (["run.dir=agillm", "export.dir=x", "export.form=huggingface"], "has no model.name=agillm"),
        (["task=train", *AGILLM, *DATA, "model.objective=ar_only", "sample.mode=sat"], "has no SAT head"),
        (["task=train", *AGILLM, *DATA, "sample.slide=12"], "must be less than model.context=12"),
        (["task=sample", "run.dir=agillm", "sample.slide=12"], "must be less than model.context=12"),
        (["run.dir=agillm", "export.source=whole.pt", "export.dir=x", "model=agillm"], "Give one"),
        (["export.source=whole.pt", "export.file=whole.pt", "model=agillm"], "Give another name"),
    ],
)
def test_wrong_input_is_refused_and_leaves_nothing(overrides: list[str], message: str, refused: Told) -> None:
    torch.save({"weight": torch.zeros(3)}, "other.pt")
    refused(message, *(overrides if overrides[0].startswith("task=") else ["task=export", *overrides]))


def test_a_file_keeps_its_tokenizer_and_takes_no_other(refused: Told) -> None:
    (own,), file = Path("run/checkpoints").glob("*2/tokenizer.json"), "tokens.safetensors"
    Path("other.json").write_text(CharTokenizer("bcdefghijkl \n").to_json())
    assert export(f"export.file={file}") == 0
    overrides = ["task=export", *MODEL, f"export.source={file}"]
    refused("export.tokenizer=other.json is not", *overrides, "export.dir=x", "export.tokenizer=other.json")
    for more in ([], [f"export.tokenizer={own}"]):
        made = f"kept-{len(more)}-{file}"
        assert main([*overrides, f"export.dir={made}", *more]) == 0
        (kept,) = Path(made, "checkpoints").glob("*/tokenizer.json")
        assert json.loads(kept.read_text()) == json.loads(own.read_text())


@pytest.mark.parametrize("said", ["[1]", "{broken", '{"heads": [2], "activation": {}}', '{"name": 7}', "[" * 9999])
def test_what_a_stranger_says_of_a_model_never_ends_in_a_traceback(said: str, refused: Told) -> None:
    save_file(parameters("run"), "strange.safetensors", metadata={"ttrain_model": said, "tokenizer_json": "{}"})
    command = ["task=export", *MODEL, "export.source=strange.safetensors", "export.dir=strange"]
    refused("strange.safetensors holds a tokenizer that can't be used", *command)
    assert read_metadata(Path("strange.safetensors"), {}).of(GPT(GPTConfig(**SIZE, vocabulary=9))) in ({}, {"name": 7})


@pytest.mark.parametrize(
    ("config", "form"),
    [
        (GPTConfig(logit_cap=15.0), "ttrain"),
        (LlamaConfig(value_embeddings=True, window=8), "ttrain"),
        (LlamaConfig(window=8), "huggingface"),
    ],
)
def test_a_refusal_of_gguf_names_a_form_that_holds_the_model(config: Any, form: str) -> None:
    advised = str(gguf_problem(config)).split("Give export.form=")[1]
    assert advised.startswith(form) and (form == "huggingface") == (not config.switched_on())


def original(file: str) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(file, weights_only=True)
    return content


def test_the_originals_file_says_what_the_run_says(capsys: pytest.CaptureFixture[str]) -> None:
    """The likeliest text by the file's weights in torch is the one that task=sample writes."""
    content = original("whole.pt")
    assert content["step"] == 2 and content["cfg"] == {"d": 16, "layers": 2, "heads": 2, "rank": 20}
    text = sampled(capsys, "run.dir=agillm", "sample.temperature=0")
    tokenizer = parse_tokenizer(content["tokenizer_json"])
    ids = tokenizer.encode("abc")
    for _ in range(15):
        ids.append(int(next_scores(content, ids[-12:]).argmax()))
    assert text == tokenizer.decode(ids) + "\n"


def test_the_originals_file_becomes_a_run_again(capsys: pytest.CaptureFixture[str]) -> None:
    """Sizes and tokenizer come from the file; the model that is named only says how it is built."""
    assert main(["task=export", "export.source=whole.pt", "export.dir=again", "model=agillm", "model.context=12"]) == 0
    expected, found = parameters("agillm"), parameters("again")
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[path], value) for path, value in expected.items())
    for mode in ("ar", "sat", "speculative"):
        assert len({sampled(capsys, f"run.dir={run}", f"sample.mode={mode}") for run in ("agillm", "again")}) == 1


def test_compaction_changes_the_rank_and_no_score(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["run.dir=agillm", "export.compact=true", "export.dir=compact", "export.file=compact.pt"]
    assert main(["task=export", *overrides]) == 0
    printed = capsys.readouterr().out
    assert "    1       20     8" in printed and "rank 20 becomes 8" in printed
    whole, compact = original("whole.pt"), original("compact.pt")
    assert compact["cfg"]["rank"] == 8 and compact["core"]["blocks.1.mha.U"].shape == (8, 8)
    ids = [int(token) for token in np.random.default_rng(0).integers(0, len(whole["core"]["emb.weight"]), 12)]
    torch.testing.assert_close(next_scores(compact, ids), next_scores(whole, ids), rtol=0, atol=1e-5)
    torch.testing.assert_close(pair_scores(compact, ids), pair_scores(whole, ids), rtol=0, atol=1e-5)
    saved = read_checkpoint(Path("compact/checkpoints/step_00000002"))
    assert saved.progress["compacted"] is True and read_config(Path("compact"))["model"]["rank"] == 8
    assert not any(name.startswith("optimizer") for name in saved.files)
    assert sampled(capsys, "run.dir=compact") == sampled(capsys, "run.dir=agillm")


def test_a_compacted_run_can_start_another(refused: Told) -> None:
    assert main(["task=export", "run.dir=agillm", "export.compact=true", "export.dir=source"]) == 0
    assert main([*DATA, *AGILLM, "model.rank=8", *TRAIN, "train.init_from=source", "run.dir=next"]) == 0
    refused("first_moment", "run.dir=source", "resume=auto", *TRAIN, "train.steps=4", *DATA)


# initial values of a new run from elsewhere: what fits by name and shape, and what is refused


WIDE = {"layers": 2, "heads": 2, "width": 32, "context": 16, "vocabulary": 256}
GIVEN_SIZES = [f"model.{name}={size}" for name, size in WIDE.items()]
QUIET = ["logger=jsonl", "device=cpu", "device.threads=1", "sample.tokens=4", "model.preset=null", "data=text"]
BOOK = ["data.path=book.txt", "data.tokenizer=byte", "train.batch_size=2", "train.eval_sequences=2"]
BOOK += ["train.log_every=1"]
GIVEN = [*QUIET, *BOOK, *GIVEN_SIZES, "train.steps=1", "optimizer.lr=0"]


@pytest.fixture
def train(inside: Path) -> Any:
    Path("book.txt").write_text("some words of a book that nobody wrote\n" * 60)
    return lambda *overrides: main([*GIVEN, *overrides])


def moments(run: str) -> dict[str, np.ndarray]:
    return arrays(run, 1, "optimizer-*")


def first_values(**changes: Any) -> dict[str, np.ndarray]:
    return initial_values(GPT(GPTConfig(**{**WIDE, "bias": False, **changes})), 1337)


@pytest.fixture
def source(train: Any) -> str:
    """A run whose values are not those that a new run would draw."""
    assert train("run.dir=source", "run.seed=5", "optimizer.lr=1e-2", "schedule.warmup=0") == 0
    return "source"


def test_a_run_a_checkpoint_and_a_file_of_one(train: Any, source: str, told: Told) -> None:
    given = parameters(source)
    save_file(given, "weights.safetensors")
    for number, place in enumerate([source, f"{source}/checkpoints/step_00000001", "weights.safetensors"]):
        said = told(*GIVEN, f"run.dir=run{number}", f"train.init_from={place}")
        taken = parameters(f"run{number}")
        assert taken.keys() == given.keys() and all((taken[name] == given[name]).all() for name in given)
        assert f"Warm start from {place}: {len(given)} of {len(given)} parameters" in said
    (record,) = attempts("run0")
    assert record["init_from"] == source and sorted(record["taken"]) == sorted(given)
    assert json.loads(Path("run0/metrics.jsonl").read_text().splitlines()[0])["step"] == 1
    # The optimizer starts anew: after one step its moments are those of that step's gradient alone.
    assert train("run.dir=other", "run.seed=1337", "train.init_from=weights.safetensors") == 0
    assert all((moments("run0")[name] == moments("other")[name]).all() for name in moments("other"))


def test_only_what_fits_by_name_and_shape(source: str, told: Told) -> None:
    """Another context and one layer more: the rest is taken, and the table names what starts anew."""
    printed = told(*GIVEN, "run.dir=run", f"train.init_from={source}", "model.context=12", "model.layers=3")
    given, taken, own = parameters(source), parameters("run"), first_values(context=12, layers=3)
    for name, values in taken.items():
        fits = name in given and given[name].shape == values.shape
        assert (values == (given if fits else own)[name]).all(), name
    assert "positions.weight" in printed and "[12, 32] starts anew: has shape [16, 32] in the source" in printed
    assert "blocks.2.attention.qkv.weight         [96, 32] starts anew: not in the source" in printed
    fewer = told(*GIVEN, "run.dir=fewer", f"train.init_from={source}", "model.layers=1")
    assert "not used of the source: blocks.1." in fewer


FROZEN = {
    "model.context=12 lora.rank=2": ("positions.weight [12, 32] ([16, 32]", "lora.rank=null"),
    "model.layers=3 lora.rank=2": ("blocks.2.attention.qkv.weight [96, 32] (not", "more."),
    "data.tokenizer=char model.vocabulary=null optimizer.freeze=[embedding]": (
        "embedding.weight [17, 32] ([256, 32]", "optimizer.unfreeze",
    ),
}  # fmt: skip


def test_what_starts_anew_is_trained(train: Any, source: str, refused: Told) -> None:
    for overrides, parts in FROZEN.items():
        error = refused(parts[0], *GIVEN, "run.dir=run", f"train.init_from={source}", *overrides.split())
        assert parts[1] in error and error.startswith("ttrain: train.init_from=source: ") and error.count("\n") == 1
    more = ["model.context=12", "optimizer.freeze=[embedding]"]  # taken, and what starts anew is trained
    assert train("run.dir=run", f"train.init_from={source}", *more) == 0


def save_original(file: str, prefix: str = "", **changes: Any) -> dict[str, np.ndarray]:
    """Write a file as nanoGPT does, and return its values by our names."""
    model = GPT(GPTConfig(**{**WIDE, "bias": False, **changes}))
    values = initial_values(model, 3)
    torch.save({f"{prefix}{name}": torch.tensor(value) for name, value in model.to_original(values).items()}, file)
    return values


def test_an_original_with_fewer_layers_fills_the_first(train: Any) -> None:
    """By the names of a .pt file, as torch.compile writes them."""
    expected = save_original("plain.pt", "_orig_mod.", layers=1)
    assert train("run.dir=run", "train.init_from=plain.pt", "model.bias=false") == 0
    own, taken = first_values(), parameters("run")
    assert all((taken[name] == expected.get(name, own[name])).all() for name in taken)


def test_a_resumed_run_does_not_start_warm_again(train: Any, source: str, refused: Told) -> None:
    refused("is for new runs, but resume=source", *GIVEN, f"resume={source}", f"train.init_from={source}")
    overrides = ["run.dir=run", f"train.init_from={source}", "optimizer.lr=1e-2", "schedule.warmup=0"]
    assert train(*overrides, "resume=auto") == 0
    os.rename(source, "gone")
    assert train(*overrides, "resume=auto", "train.steps=2") == 0
    first, second = attempts("run")
    assert "taken" in first and "taken" not in second


def test_another_tokenizer_is_refused_unless_it_is_wanted(train: Any, source: str, told: Told, refused: Told) -> None:
    overrides = [f"train.init_from={source}", "data.tokenizer=char"]
    said = refused("the rows of embedding.weight mean other tokens", *GIVEN, "run.dir=run", *overrides)
    assert "train.init_anyway=true" in said
    said = told(*GIVEN, "run.dir=run", *overrides, "train.init_anyway=true")
    assert "WARNING: taken anyway: its tokenizer" in said
    taken, given = parameters("run"), parameters(source)
    assert all((taken[name] == given[name]).all() for name in given)
    # Rows that start anew mean what the data says, so another tokenizer is no matter then.
    assert train("run.dir=anew", *overrides, "model.vocabulary=99") == 0


def test_weights_of_another_function_are_refused(train: Any, source: str, told: Told, refused: Told) -> None:
    override, checkpoint = "model.activation=relu", f"{source}/checkpoints/step_00000001"
    difference = "model.activation: 'gelu_tanh' where the weights come from, 'relu' given"
    for form, file in (("ttrain", "own.safetensors"), ("original", "theirs.safetensors"), ("original", "theirs.pt")):
        assert main(["task=export", f"run.dir={source}", f"export.file={file}", f"export.form={form}"]) == 0
    places = [source, checkpoint, f"{checkpoint}/parameters-00001-of-00001.safetensors"]
    for place in [*places, "own.safetensors", "theirs.safetensors", "theirs.pt"]:
        refused(difference, *GIVEN, "run.dir=run", f"train.init_from={place}", override)
    said = told(*GIVEN, "run.dir=run", f"train.init_from={source}", override, "train.init_anyway=true")
    assert f"WARNING: taken anyway: {difference}" in said
    assert (parameters("run")["embedding.weight"] == parameters(source)["embedding.weight"]).all()
    no_matter = ["model.dropout=0.1", "model.recompute=block", "model.preset=0.8M"]
    assert train("run.dir=same", f"train.init_from={source}", *no_matter) == 0
    assert train(f"resume={source}", "run.dir=further", "train.steps=2", *no_matter) == 0
    assert attempts("run")[0]["taken_anyway"] == [difference]
    for overrides in (
        ["task=sample", f"run.dir={source}", override],
        ["task=export", f"run.dir={source}", "export.file=out.safetensors", override],
        [f"resume={source}", "run.dir=on", "train.steps=2", override],
        ["task=export", "export.source=own.safetensors", "export.dir=out", *GIVEN_SIZES, "model.bias=false", override],
        ["task=export", "export.source=theirs.pt", "export.dir=out", *GIVEN_SIZES, "model.bias=false", override],
    ):
        refused(difference, "device=cpu", "logger=jsonl", *overrides)


def test_a_head_of_its_own_does_not_become_a_tied_one(train: Any, refused: Told) -> None:
    save_original("plain.pt", tied=False)
    save_file(first_values(tied=False), "own.safetensors")
    for file in ("plain.pt", "own.safetensors"):
        refused("model.tied: False", *GIVEN, "run.dir=run", f"train.init_from={file}")
    assert train("run.dir=run", "train.init_from=plain.pt", "model.tied=false") == 0
    assert train("run.dir=other", "train.init_from=run") == 2


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"n_head": 2, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}, ""),
        ({"n_head": 4}, "model.heads: 4 where the weights come from, 2 given"),
        ({"layer_norm_epsilon": 1e-6}, "norm_eps: 1e-06 where the weights come from, 1e-05 given"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx: True where"),
    ],
)
def test_the_config_beside_a_file_of_hugging_face_counts(entry: Any, message: str, train: Any, told: Told) -> None:
    Path("hub").mkdir()
    model = GPT(GPTConfig(**WIDE, bias=False))
    save_file(model.to_original(initial_values(model, 1), transposed=True), "hub/model.safetensors")
    Path("hub/config.json").write_text(json.dumps({"model_type": "gpt2", **entry}))
    assert message in told(*GIVEN, "run.dir=run", "train.init_from=hub/model.safetensors", code=2 if message else 0)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("nowhere", "train.init_from=nowhere does not exist"),
        ("folder", "is neither a run nor a checkpoint"),
        ("wider.safetensors", "nothing fits this model by name and shape"),
        ("nan.safetensors", "embedding.weight holds NaN or infinity"),
        ("damaged", "the file was changed or damaged"),
    ],
)
def test_sources_that_are_refused(train: Any, place: str, message: str, refused: Told) -> None:
    """Before anything is made. What is no file of weights is refused where files are read."""
    Path("folder").mkdir()
    save_file({name: values.repeat(2, 0) for name, values in first_values().items()}, "wider.safetensors")
    save_file({"embedding.weight": np.full((256, 32), np.nan, np.float32)}, "nan.safetensors")
    if place == "damaged":
        assert train("run.dir=damaged") == 0
        (file,) = Path("damaged/checkpoints").glob("step_*/parameters-*")
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    refused(message, *GIVEN, "run.dir=run", f"train.init_from={place}")
