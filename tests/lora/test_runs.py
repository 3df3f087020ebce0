"""Runs that train adapters, through the command line: resumed, exported, started from others, refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.train.reading import arrays as tensors
from ttrain import Training, load_config
from ttrain.cli import main
from ttrain.train.checkpoint.checkpoint import read_checkpoint

MODEL = ["model=nano-gpt", "model.layers=1", "model.heads=2", "model.width=16", "model.context=8"]
TRAIN = ["train.batch_size=2", "train.eval_every=null", "train.eval_sequences=2", "train.save_every=2"]
TRAIN += ["sample.tokens=5", "train.peak_tflops=1", "logger=jsonl", "device.threads=1", "device=cpu"]
TRAIN += ["schedule=constant", "data=text"]
STILL = ("train.steps=1", "optimizer.lr=0", "guard.check_learning=null")
ADAPTERS = ["lora.rank=2", "lora.dropout=0.1", "optimizer.lr=0.05"]


@pytest.fixture(autouse=True, scope="module")
def runs(shared: Path) -> None:
    """A run `base`, and a run `tuned` of adapters beside its weights."""
    Path("text.txt").write_text("abcdefg hijk\n" * 400)
    assert train("base", "train.steps=2") == 0
    assert train("tuned", "train.steps=4", *ADAPTERS, "train.init_from=base") == 0
    assert export("export.form=peft", "export.dir=peft") == 0


def train(run: str, *overrides: str) -> int:
    return main(["data.path=text.txt", *MODEL, *TRAIN, *overrides, f"run.dir={run}"])


def export(*overrides: str, run: str = "tuned") -> int:
    return main(["task=export", f"run.dir={run}", *overrides])


def checkpoint(run: str, step: int) -> Path:
    return Path(run) / "checkpoints" / f"step_{step:08d}"


def test_a_run_goes_on_to_the_bit() -> None:
    assert train("parts", "train.steps=2", *ADAPTERS, "train.init_from=base") == 0
    assert main(["run.dir=parts", "resume=auto", "train.steps=4"]) == 0
    parts, whole = tensors("parts", 4), tensors("tuned", 4)
    assert parts.keys() == whole.keys() and all(np.array_equal(parts[name], value) for name, value in whole.items())
    base, adapters = tensors("base", 2), [name for name in whole if name.endswith("lora.b.weight")]
    assert all(np.array_equal(whole[name], value) for name, value in base.items() if "/" not in name)
    assert len(adapters) == 4 and all(whole[name].any() for name in adapters)


def changed(name: str, change: dict[str, Any]) -> None:
    """Copy the adapters, with another config."""
    shutil.copytree("peft", name, dirs_exist_ok=True)
    file = Path(name) / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))


def test_what_is_frozen_lies_on_the_disk_once_and_every_checkpoint_has_it() -> None:
    files = [checkpoint("tuned", step) / "frozen-00001-of-00001.safetensors" for step in (2, 4)]
    assert os.path.samefile(*files)
    assert "frozen-00001-of-00001.safetensors" in read_checkpoint(checkpoint("tuned", 4)).files  # verified as a whole
    shutil.copytree(checkpoint("tuned", 4), "alone")
    assert main(["resume=alone", "run.dir=elsewhere", "train.steps=5"]) == 0
    assert set(tensors("elsewhere", 5)) == set(tensors("tuned", 4))


def added(whole: Any, path: str, value: np.ndarray) -> np.ndarray:
    """Return a weight with what its adapters add to it."""
    layer = path.removesuffix(".weight") + ".lora."
    if f"{layer}b.weight" not in whole:
        return value
    return value + 16 / 2 * whole[f"{layer}b.weight"].astype(np.float64) @ whole[f"{layer}a.weight"]


def test_merged_weights_are_weights_and_adapters(capsys: pytest.CaptureFixture[str]) -> None:
    assert export("export.dir=merged", "export.form=ttrain", "export.file=m.safetensors") == 0
    whole, made = tensors("tuned", 4), load_file("m.safetensors")
    assert made.keys() == {name for name in tensors("base", 2) if "/" not in name}
    for name, value in made.items():
        np.testing.assert_allclose(value, added(whole, name, whole[name]), atol=1e-6)
    assert export("export.dir=apart", "export.merge=false") == 0
    texts = set()
    for run in ("tuned", "merged", "apart"):
        capsys.readouterr()
        assert main(["task=sample", f"run.dir={run}", "sample.temperature=0", "sample.tokens=30"]) == 0
        texts.add(capsys.readouterr().out)
    assert len(texts) == 1


@pytest.mark.parametrize("source", ["train.init_from=plain", "model.from=plain-hub"])
def test_weights_are_merged_as_their_source_has_them(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A run in bf16 keeps its frozen weights rounded; what it exports is made of those that it started from."""
    name = source.partition("=")[2]
    if name == "plain":
        shutil.copytree("base", name)
    else:
        assert export("export.form=huggingface", f"export.dir={name}", run="base") == 0
    sizes = MODEL if name == "plain" else []
    words = ["data.path=text.txt", *sizes, *TRAIN, "train.steps=2", "precision=bf16", *ADAPTERS, source]
    assert main([*words, f"run.dir=half-{name}"]) == 0, capsys.readouterr().err
    whole, base = read_checkpoint(checkpoint(f"half-{name}", 2)).weights(), tensors("base", 2)
    for there in (True, False):
        if not there:
            Path(name).rename(f"{name}-away")
        file = f"{name}-{there}.safetensors"
        capsys.readouterr()
        assert export("export.form=ttrain", f"export.file={file}", run=f"half-{name}") == 0
        said = capsys.readouterr().err
        assert ("frozen weights are exported as the run keeps them, in fewer bits" in said) == (not there)
        made = {path: value for path, value in load_file(file).items() if path in base}
        error = max(np.abs(value - added(whole, path, base[path])).max() for path, value in made.items())
        assert (error < 1e-6) == there


def test_adapters_come_back_from_pefts_files(capsys: pytest.CaptureFixture[str]) -> None:
    said = json.loads(Path("peft/adapter_config.json").read_text())
    assert (said["r"], said["lora_alpha"], said["peft_type"]) == (2, 16.0, "LORA")
    named = load_file("peft/adapter_model.safetensors")
    assert len(named) == 8
    a = "base_model.model.transformer.h.0.attn.c_attn.lora_A.weight"
    assert np.array_equal(named[a], tensors("tuned", 4)["blocks.0.attention.qkv.lora.a.weight"])
    assert train("again", *STILL, "lora.from=peft", "train.init_from=base") == 0
    assert "Adapters start as those of peft." in capsys.readouterr().err
    again, tuned = tensors("again", 1), tensors("tuned", 4)
    assert all(np.array_equal(value, tuned[name]) for name, value in again.items() if "/" not in name)


def test_adapters_are_added_to_weights_that_are_no_run(capsys: pytest.CaptureFixture[str]) -> None:
    """A model of Transformers with adapters of PEFT becomes one plain model, and Training starts from the two."""
    assert export("export.form=huggingface", "export.dir=hub", run="base") == 0
    assert export("export.form=huggingface", "export.dir=merged-hub") == 0
    words = ["model.from=hub", "lora.from=peft"]
    assert main(["task=export", *words, "export.form=huggingface", "export.dir=added"]) == 0
    added, expected = load_file("added/model.safetensors"), load_file("merged-hub/model.safetensors")
    assert added.keys() == expected.keys() and all(np.array_equal(added[n], value) for n, value in expected.items())
    assert main(["task=export", "model.from=hub", "lora.rank=2", "export.dir=x"]) == 2
    assert "Give lora.from=<folder of adapters>" in capsys.readouterr().err
    assert main(["task=export", "model.from=merged-hub", "lora.from=peft", "export.dir=x"]) == 2
    assert "was trained beside another model" in capsys.readouterr().err
    with Training(load_config(*words, "train.batch_size=2", "device=cpu", "device.threads=1")) as training:
        found, tuned = training.parameters(), tensors("tuned", 4)
        assert all(np.array_equal(value, tuned.get(name, np.zeros_like(value))) for name, value in found.items())


def test_a_file_system_without_hard_links_gets_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    assert train("copied", "train.steps=4", *ADAPTERS, "train.init_from=base") == 0
    files = [checkpoint("copied", step) / "frozen-00001-of-00001.safetensors" for step in (2, 4)]
    assert not os.path.samefile(*files) and files[0].read_bytes() == files[1].read_bytes()


def test_another_run_starts_from_a_tuned_one() -> None:
    assert train("full", *STILL, "train.init_from=tuned") == 0
    assert export("export.form=ttrain", "export.file=whole.safetensors") == 0
    full = tensors("full", 1)
    assert all(np.array_equal(full[name], value) for name, value in load_file("whole.safetensors").items())
    assert train("same", *STILL, "train.init_from=tuned", *ADAPTERS[:2]) == 0
    name = "blocks.0.attention.qkv.lora.b.weight"
    assert np.array_equal(tensors("same", 1)[name], tensors("tuned", 4)[name])


WRONG = {  # what is added to a command that trains
    "lora.alpha=0": "lora.alpha=0.0: must be above 0",
    "model=llama lora.from=peft train.init_from=base": "no linear layer of a block is 'transformer.h.0.attn.c_attn', ",
    "model=llama lora.from=renamed model.kv_heads=2": "is of another model or other lora.targets: ",
    "lora.from=peft lora.rank=3": "has rank 2, not 3",
    "lora.from=peft model.width=32": "got [2, 16], expected [2, 32]",
    "lora.from=peft": "was trained beside another model",  # without train.init_from
    "lora.from=base": "holds no adapters of PEFT that can be read",
    "lora.from=dora": "use_dora=True: only plain LoRA is understood",
    "lora.from=torn": "lora_A.weight: missing",
    "run.dir=tuned resume=auto lora.rank=3 train.steps=9": "has other adapters: lora.",
    "run.dir=tuned task=sample lora.alpha=1": "has other adapters: lora.",
    "resume=tuned lora.from=peft train.steps=9": "lora.from=peft: is for new runs",
    "run.dir=base resume=auto lora.rank=2 train.steps=9": "lora.rank: None there, 2 given",
    "task=export run.dir=base export.form=peft export.dir=p": "has no adapters",
    "task=export run.dir=tuned export.form=peft export.file=p.safetensors": "export.form=peft: writes a folder",
    "task=export run.dir=tuned export.merge=false export.file=x.safetensors": "a file of weights has no adapters",
}


@pytest.mark.parametrize("words", WRONG)
def test_a_mistake_is_told_before_anything_is_done(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    changed("dora", {"use_dora": True})
    changed("renamed", {"target_modules": "all-linear"})
    changed("torn", {})
    save_file(dict(list(load_file("peft/adapter_model.safetensors").items())[1:]), "torn/adapter_model.safetensors")
    capsys.readouterr()
    given = words.split()
    if not ("run.dir=" in words or "resume=" in words):
        given = ["data.path=text.txt", *MODEL, *TRAIN, "lora.rank=2", "train.steps=1", "run.dir=refused", *given]
    assert main(given) == 2
    told = capsys.readouterr().err
    assert WRONG[words] in told and "Traceback" not in told and not Path("refused").exists()


def test_a_plan_compares_with_training_the_whole_model() -> None:
    words = ["task=plan", "data.path=text.txt", *MODEL, *TRAIN, "plan.time=false", "plan.json=plan.json"]
    assert main([*words, "lora.rank=2"]) == 0
    found = json.loads(Path("plan.json").read_text())["lora"]
    assert found["trained"] == 2 * (16 + 48 + 16 + 16 + 2 * (16 + 64)) and found["memory_without"] > found["memory"]
    assert main(words) == 0
    whole = json.loads(Path("plan.json").read_text())
    assert "lora" not in whole and "frozen" not in whole["memory"]
