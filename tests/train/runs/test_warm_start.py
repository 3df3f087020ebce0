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

from tests.models.session import initial_values
from tests.train.reading import arrays, attempts
from ttrain.cli import main
from ttrain.models.agillm import AGILLM
from ttrain.models.gpt import GPT
from ttrain.models.settings import AGILLMConfig, GPTConfig

SIZE = {"layers": 2, "heads": 2, "width": 32, "context": 16, "vocabulary": 256}
MODEL = [f"model.{name}={size}" for name, size in SIZE.items()]
QUIET = ["logger=jsonl", "device=cpu", "device.threads=1", "sample.tokens=4", "model.preset=null", "data=text"]
DATA = ["data.path=book.txt", "data.tokenizer=byte", "train.batch_size=2", "train.eval_sequences=2"]
DATA += ["train.log_every=1"]


@pytest.fixture
def train(inside: Path) -> Any:
    Path("book.txt").write_text("some words of a book that nobody wrote\n" * 60)
    return lambda *overrides: main([*QUIET, *DATA, *MODEL, "train.steps=1", "optimizer.lr=0", *overrides])


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


def test_a_run_a_checkpoint_and_a_file_of_one(train: Any, source: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = parameters(source)
    save_file(given, "weights.safetensors")
    for number, place in enumerate([source, f"{source}/checkpoints/step_00000001", "weights.safetensors"]):
        capsys.readouterr()
        assert train(f"run.dir=run{number}", f"train.init_from={place}") == 0
        taken = parameters(f"run{number}")
        assert taken.keys() == given.keys() and all((taken[name] == given[name]).all() for name in given)
        assert f"Warm start from {place}: {len(given)} of {len(given)} parameters" in capsys.readouterr().err
    (record,) = attempts("run0")
    assert record["init_from"] == source and sorted(record["taken"]) == sorted(given)
    assert json.loads(Path("run0/metrics.jsonl").read_text().splitlines()[0])["step"] == 1
    # The optimizer starts anew: after one step its moments are those of that step's gradient alone.
    assert train("run.dir=other", "run.seed=1337", "train.init_from=weights.safetensors") == 0
    assert all((moments("run0")[name] == moments("other")[name]).all() for name in moments("other"))


def test_only_what_fits_by_name_and_shape(train: Any, source: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Another context and one layer more: the rest is taken, and the table names what starts anew."""
    assert train("run.dir=run", f"train.init_from={source}", "model.context=12", "model.layers=3") == 0
    given, taken, own = parameters(source), parameters("run"), first_values(context=12, layers=3)
    for name, values in taken.items():
        fits = name in given and given[name].shape == values.shape
        assert (values == (given if fits else own)[name]).all(), name
    printed = capsys.readouterr().err
    assert "positions.weight" in printed and "[12, 32] starts anew: has shape [16, 32] in the source" in printed
    assert "blocks.2.attention.qkv.weight         [96, 32] starts anew: not in the source" in printed
    assert train("run.dir=fewer", f"train.init_from={source}", "model.layers=1") == 0
    assert "not used of the source: blocks.1." in capsys.readouterr().err


FROZEN = {
    "model.context=12 lora.rank=2": ("positions.weight [12, 32] ([16, 32]", "lora.rank=null"),
    "model.layers=3 lora.rank=2": ("blocks.2.attention.qkv.weight [96, 32] (not", "more."),
    "data.tokenizer=char model.vocabulary=null optimizer.freeze=[embedding]": (
        "embedding.weight [17, 32] ([256, 32]", "optimizer.unfreeze",
    ),
    "model.context=12 optimizer.freeze=[embedding]": (),  # taken, and what starts anew is trained
}  # fmt: skip


@pytest.mark.parametrize("overrides", FROZEN)
def test_what_starts_anew_is_trained(overrides: str, train: Any, source: str, capsys: Any) -> None:
    capsys.readouterr()
    code = train("run.dir=run", f"train.init_from={source}", *overrides.split())
    error = capsys.readouterr().err
    assert code == (2 if FROZEN[overrides] else 0) and Path("run").exists() == (code == 0)
    assert all(part in error for part in FROZEN[overrides])
    assert code == 0 or (error.startswith("ttrain: train.init_from=source: ") and error.count("\n") == 1)


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


def test_a_resumed_run_does_not_start_warm_again(train: Any, source: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(f"resume={source}", f"train.init_from={source}") == 2
    assert "is for new runs, but resume=source continues one" in capsys.readouterr().err
    overrides = ["run.dir=run", f"train.init_from={source}", "optimizer.lr=1e-2", "schedule.warmup=0"]
    assert train(*overrides, "resume=auto") == 0
    os.rename(source, "gone")
    assert train(*overrides, "resume=auto", "train.steps=2") == 0
    first, second = attempts("run")
    assert "taken" in first and "taken" not in second


def test_another_tokenizer_is_refused_unless_it_is_wanted(train: Any, source: str, capsys: Any) -> None:
    overrides = [f"train.init_from={source}", "data.tokenizer=char"]
    assert train("run.dir=run", *overrides) == 2 and not Path("run").exists()
    said = capsys.readouterr().err
    assert "its tokenizer is another one, so the rows of embedding.weight mean other tokens" in said
    assert "train.init_anyway=true" in said
    assert train("run.dir=run", *overrides, "train.init_anyway=true") == 0
    assert "WARNING: taken anyway: its tokenizer is another one" in capsys.readouterr().err
    taken, given = parameters("run"), parameters(source)
    assert all((taken[name] == given[name]).all() for name in given)
    # Rows that start anew mean what the data says, so another tokenizer is no matter then.
    assert train("run.dir=anew", *overrides, "model.vocabulary=99") == 0


def test_weights_of_another_function_are_refused(train: Any, source: str, capsys: pytest.CaptureFixture[str]) -> None:
    override, checkpoint = "model.activation=relu", f"{source}/checkpoints/step_00000001"
    difference = "model.activation: 'gelu_tanh' where the weights come from, 'relu' given"
    for form, file in (("ttrain", "own.safetensors"), ("original", "theirs.safetensors"), ("original", "theirs.pt")):
        assert main(["task=export", f"run.dir={source}", f"export.file={file}", f"export.form={form}"]) == 0
    places = [source, checkpoint, f"{checkpoint}/parameters-00001-of-00001.safetensors"]
    for place in [*places, "own.safetensors", "theirs.safetensors", "theirs.pt"]:
        capsys.readouterr()
        assert train("run.dir=run", f"train.init_from={place}", override) == 2, place
        assert difference in capsys.readouterr().err
        assert not Path("run").exists()
    assert train("run.dir=run", f"train.init_from={source}", override, "train.init_anyway=true") == 0
    assert f"WARNING: taken anyway: {difference}" in capsys.readouterr().err
    assert (parameters("run")["embedding.weight"] == parameters(source)["embedding.weight"]).all()
    no_matter = ["model.dropout=0.1", "model.recompute=block", "model.preset=0.8M"]
    assert train("run.dir=same", f"train.init_from={source}", *no_matter) == 0
    assert train(f"resume={source}", "run.dir=further", "train.steps=2", *no_matter) == 0
    assert attempts("run")[0]["taken_anyway"] == [difference]
    capsys.readouterr()
    for overrides in (
        ["task=sample", f"run.dir={source}", override],
        ["task=export", f"run.dir={source}", "export.file=out.safetensors", override],
        [f"resume={source}", "run.dir=on", "train.steps=2", override],
        ["task=export", "export.source=own.safetensors", "export.dir=out", *MODEL, "model.bias=false", override],
        ["task=export", "export.source=theirs.pt", "export.dir=out", *MODEL, "model.bias=false", override],
    ):
        assert main(["device=cpu", "logger=jsonl", *overrides]) == 2, overrides
        assert difference in capsys.readouterr().err, overrides
    assert not Path("out.safetensors").exists() and not Path("out").exists() and not Path("on").exists()


def test_a_head_of_its_own_does_not_become_a_tied_one(train: Any, capsys: pytest.CaptureFixture[str]) -> None:
    save_original("plain.pt", tied=False)
    save_file(first_values(tied=False), "own.safetensors")
    for file in ("plain.pt", "own.safetensors"):
        assert train("run.dir=run", f"train.init_from={file}") == 2
        assert "model.tied: False where the weights come from, True given" in capsys.readouterr().err
    assert train("run.dir=run", "train.init_from=plain.pt", "model.tied=false") == 0
    assert train("run.dir=other", "train.init_from=run") == 2


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"n_head": 2, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}, None),
        ({"n_head": 4}, "model.heads: 4 where the weights come from, 2 given"),
        ({"layer_norm_epsilon": 1e-6}, "norm_eps: 1e-06 where the weights come from, 1e-05 given"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx: True where"),
    ],
)
def test_the_config_beside_a_file_of_hugging_face_counts(
    entry: dict[str, Any], message: str | None, train: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("hub").mkdir()
    model = GPT(GPTConfig(**SIZE, bias=False))
    save_file(model.to_original(initial_values(model, 1), transposed=True), "hub/model.safetensors")
    Path("hub/config.json").write_text(json.dumps({"model_type": "gpt2", **entry}))
    assert train("run.dir=run", "train.init_from=hub/model.safetensors") == (0 if message is None else 2)
    assert message is None or message in capsys.readouterr().err


class Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harmed",)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("nowhere", "train.init_from=nowhere does not exist"),
        ("folder", "is neither a run nor a checkpoint"),
        ("book.txt", "the name must end with .pt or .safetensors"),
        ("harmful.pt", "could run code"),
        ("strange.safetensors", "holds no weight of gpt: got other"),
        ("wider.safetensors", "nothing fits this model by name and shape"),
        ("nan.safetensors", "embedding.weight holds NaN or infinity"),
        ("damaged", "the file was changed or damaged"),
    ],
)
def test_sources_that_are_refused(train: Any, place: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is made: exit code 2, no traceback, no run directory."""
    Path("folder").mkdir()
    torch.save({"weight": Harmful()}, "harmful.pt")
    save_file({"other": np.zeros(3, np.float32)}, "strange.safetensors")
    save_file({name: values.repeat(2, 0) for name, values in first_values().items()}, "wider.safetensors")
    save_file({"embedding.weight": np.full((256, 32), np.nan, np.float32)}, "nan.safetensors")
    if place == "damaged":
        assert train("run.dir=damaged") == 0
        (file,) = Path("damaged/checkpoints").glob("step_*/parameters-*")
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    capsys.readouterr()
    assert train("run.dir=run", f"train.init_from={place}") == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert not Path("run").exists() and not Path("harmed").exists()


def test_an_original_agillm_file_of_another_vocabulary(train: Any, capsys: Any) -> None:
    """Nested and compiled as the original writes it: the core is taken, what counts ids starts anew."""
    sizes: dict[str, Any] = {"layers": 1, "width": 32, "heads": 2, "rank": 24, "context": 16}
    given = AGILLM(AGILLMConfig(**sizes, vocabulary=99))
    values = initial_values(given, 3)
    content: dict[str, Any] = {"step": 7}
    for name, value in given.to_original(values).items():
        part, _, rest = name.partition(".")
        content.setdefault(part, {})[f"_orig_mod.{rest}" if part == "core" else rest] = torch.from_numpy(value)
    torch.save(content, "final.pt")
    overrides = [word for word in QUIET if "preset" not in word] + [*DATA, "optimizer.lr=0", "model=agillm"]
    overrides += [f"model.{name}={size}" for name, size in sizes.items()]
    assert main([*overrides, "train.steps=1", "run.dir=run", "train.init_from=final.pt"]) == 0
    taken, printed = parameters("run"), capsys.readouterr().err
    others = {"embedding.weight": [256, 32], "ar_head.weight": [256, 32], "ar_head.bias": [256]}
    others |= {name.replace("ar", "sat"): shape for name, shape in others.items() if "ar_head" in name}
    assert all((taken[name] == value).all() for name, value in values.items() if name not in others)
    assert f"Warm start from final.pt: {len(values) - len(others)} of {len(values)} parameters" in printed
    for name, shape in others.items():
        assert any(name in line and f"{shape} starts anew: has shape [99" in line for line in printed.splitlines())
