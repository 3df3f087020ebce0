"""First values of a new run from elsewhere: what fits by name and shape, and what is refused."""

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
from tests.models.session import initial_values
from tests.train.reading import arrays, attempts
from ttrain.cli import main
from ttrain.models.gpt import GPT
from ttrain.models.settings import GPTConfig

SIZE = {"layers": 2, "heads": 2, "width": 32, "context": 16, "vocabulary": 256}
MODEL = [f"model.{name}={size}" for name, size in SIZE.items()]
QUIET = ["logger=jsonl", "device=cpu", "device.threads=1", "sample.tokens=4", "model.preset=null", "data=text"]
DATA = ["data.path=book.txt", "data.tokenizer=byte", "train.batch_size=2", "train.eval_sequences=2"]
DATA += ["train.log_every=1"]
GIVEN = [*QUIET, *DATA, *MODEL, "train.steps=1", "optimizer.lr=0"]


@pytest.fixture
def train(inside: Path) -> Any:
    Path("book.txt").write_text("some words of a book that nobody wrote\n" * 60)
    return lambda *overrides: main([*GIVEN, *overrides])


def parameters(run: str) -> dict[str, np.ndarray]:
    return arrays(run, 1, "parameters-*")


def moments(run: str) -> dict[str, np.ndarray]:
    return arrays(run, 1, "optimizer-*")


def first_values(**changes: Any) -> dict[str, np.ndarray]:
    return initial_values(GPT(GPTConfig(**{**SIZE, "bias": False, **changes})), 1337)


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
    model = GPT(GPTConfig(**{**SIZE, "bias": False, **changes}))
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
        ["task=export", "export.source=own.safetensors", "export.dir=out", *MODEL, "model.bias=false", override],
        ["task=export", "export.source=theirs.pt", "export.dir=out", *MODEL, "model.bias=false", override],
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
    model = GPT(GPTConfig(**SIZE, bias=False))
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
