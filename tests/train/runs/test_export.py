"""task=export through the command line: files that other programs read, runs that can be sampled, wrong input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from tests.conftest import Told, cache_home
from tests.models.plain_agillm import next_scores, pair_scores
from tests.train.reading import arrays
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trained run of each model in it, and the original's file of the second."""
    path = tmp_path_factory.mktemp("export")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        patch.setenv("XDG_CACHE_HOME", cache_home(path))
        Path("text.txt").write_text("abcdefg hijk\n" * 400)
        assert main([*DATA, *MODEL, *TRAIN, "run.dir=run"]) == main([*DATA, *AGILLM, *TRAIN, "run.dir=agillm"]) == 0
        assert main(["task=export", "run.dir=agillm", "export.file=whole.pt"]) == 0
    return path


@pytest.fixture(autouse=True)
def inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


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
        (["export.file=x.pt"], "needs parameters. Give run.dir"),
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
        (["export.source=text.txt", "export.dir=x"], "must end with .pt or .safetensors"),
        (["export.source=other.pt", "export.dir=x", *MODEL, "model.vocabulary=9"], "the weights do not fit this model"),
        (["export.source=other.pt", "export.dir=x", "model=agillm"], "holds no weights of AGILLM-3: got weight"),
        (["run.dir=run", "export.file=text.txt/x.pt"], "can't be written"),
        (["run.dir=agillm", "export.dir=x", "export.form=huggingface"], "has no model.name=agillm"),
        (["export.source=odd.pt", "export.dir=x", "model=agillm"], "core.blocks.0.mha.U"),
        (["export.source=short.pt", "export.dir=x", "model=agillm"], "core.ln.bias: missing"),
        (["task=train", *AGILLM, *DATA, "model.objective=ar_only", "sample.mode=sat"], "needs a SAT head"),
        (["task=train", *AGILLM, *DATA, "sample.slide=12"], "must be less than model.context=12"),
        (["task=sample", "run.dir=agillm", "sample.slide=12"], "must be less than model.context=12"),
        (["run.dir=agillm", "export.source=whole.pt", "export.dir=x", "model=agillm"], "Give one"),
        (["export.source=whole.pt", "export.file=whole.pt", "model=agillm"], "Give another name"),
    ],
)
def test_wrong_input_is_refused_and_leaves_nothing(overrides: list[str], message: str, refused: Told) -> None:
    torch.save({"weight": torch.zeros(3)}, "other.pt")
    for name, gone in (("odd.pt", "blocks.0.mha.U"), ("short.pt", "ln.bias")):
        content = original("whole.pt")
        del content["core"][gone]
        torch.save(content, name)
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
