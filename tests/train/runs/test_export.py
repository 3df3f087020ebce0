"""task=export through the command line: files that other programs read, runs that can be sampled, wrong input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from tests.conftest import cache_home
from ttrain.cli import main
from ttrain.data.tokenizer import CharTokenizer
from ttrain.models.gpt import GPT
from ttrain.models.settings import GPTConfig, LlamaConfig
from ttrain.train.checkpoint.checkpoint import read_checkpoint
from ttrain.train.checkpoint.weights_file import read_metadata
from ttrain.train.runs.export_gguf import gguf_problem

SIZE = {"layers": 1, "heads": 2, "width": 16, "context": 8}
MODEL = ["model=nano-gpt", "model.bias=true", *(f"model.{key}={value}" for key, value in SIZE.items())]
TRAIN = ["train.steps=2", "train.batch_size=2", "train.eval_every=null", "train.eval_sequences=2", "sample.tokens=5"]
TRAIN += ["train.peak_tflops=1", "logger=jsonl", "device.threads=1"]


def with_run(path: Path, *model: str) -> Path:
    """A folder with a trained run in it."""
    (path / "text.txt").write_text("abcdefg hijk\n" * 400)
    overrides = ["data=text", f"data.path={path / 'text.txt'}", *model, *TRAIN, f"run.dir={path / 'run'}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", cache_home(path))
        assert main(overrides) == 0
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_run(tmp_path_factory.mktemp("export"), *MODEL)


@pytest.fixture(autouse=True)
def inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def export(*overrides: str) -> int:
    return main(["task=export", "run.dir=run", *overrides])


def parameters(run: str, step: int = 2) -> dict[str, np.ndarray]:
    return dict(read_checkpoint(Path(run) / "checkpoints" / f"step_{step:08d}").weights())


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
    found = parameters(made, step=0)
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[path], value) for path, value in expected.items())


def test_a_run_becomes_a_run_without_optimizer_state(capsys: pytest.CaptureFixture[str]) -> None:
    assert export("export.dir=bare") == 0
    files = [path.name for path in Path("bare/checkpoints/step_00000002").iterdir()]
    assert not any(name.startswith("optimizer") for name in files)
    texts = []
    for run in ("run", "bare"):
        capsys.readouterr()
        assert main(["task=sample", f"run.dir={run}", "sample.tokens=20", "sample.prompt=abc"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and len(texts[0]) == 24


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
    ],
)
def test_wrong_input_is_refused_and_leaves_nothing(overrides: list[str], message: str, capsys: Any) -> None:
    torch.save({"weight": torch.zeros(3)}, "other.pt")
    before = sorted(Path().iterdir())
    assert main(["task=export", *overrides]) == 2
    errors = capsys.readouterr().err
    assert message in errors and "Traceback" not in errors
    assert sorted(Path().iterdir()) == before


def test_a_file_keeps_its_tokenizer_and_takes_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    (own,), file = Path("run/checkpoints").glob("*2/tokenizer.json"), "tokens.safetensors"
    Path("other.json").write_text(CharTokenizer("bcdefghijkl \n").to_json())
    assert export(f"export.file={file}") == 0
    overrides = ["task=export", *MODEL, f"export.source={file}"]
    assert main([*overrides, f"export.dir=other-{file}", "export.tokenizer=other.json"]) == 2
    assert f"export.tokenizer=other.json is not the tokenizer that {file} holds" in capsys.readouterr().err
    assert not Path(f"other-{file}").exists()
    for more in ([], [f"export.tokenizer={own}"]):
        made = f"kept-{len(more)}-{file}"
        assert main([*overrides, f"export.dir={made}", *more]) == 0
        (kept,) = Path(made, "checkpoints").glob("*/tokenizer.json")
        assert json.loads(kept.read_text()) == json.loads(own.read_text())


@pytest.mark.parametrize("said", ["[1]", "{broken", '{"heads": [2], "activation": {}}', '{"name": 7}', "[" * 9999])
def test_what_a_stranger_says_of_a_model_never_ends_in_a_traceback(said: str, capsys: Any) -> None:
    save_file(parameters("run"), "strange.safetensors", metadata={"ttrain_model": said, "tokenizer_json": "{}"})
    assert main(["task=export", *MODEL, "export.source=strange.safetensors", "export.dir=strange"]) == 2
    errors = capsys.readouterr().err
    assert "Traceback" not in errors and "strange.safetensors holds a tokenizer that can't be used" in errors
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
