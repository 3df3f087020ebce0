"""Distributions of a teacher that task=prepare stores: their values, and losses of them, against PyTorch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from tests.models.session import token_batch
from tests.objectives.test_distillation import CONFIG, CONTEXT, ROWS, TRAIN, VOCABULARY, expected, folders  # noqa: F401
from tests.train.reading import arrays
from ttrain import Training, load_config
from ttrain.cli import main
from ttrain.data.sequences import taught
from ttrain.data.sequences.taught import IDS, LOG_PROBS, OF_TARGETS
from ttrain.objectives import distillation

TOP, HEAT = 3, 0.7
TEXT = "the quick brown fox jumps over the lazy dog\n" * 12
STUDENT = ["model=nano-gpt", "model.layers=1", "model.heads=2", "model.width=16", "model.context=16"]
PREPARE = ["task=prepare", "objective=distillation", "objective.teacher=run", f"objective.top_k={TOP}"]
PREPARE += [f"objective.temperature={HEAT}", "data=text", "data.path=text.txt", "data.tokenizer=char"]
PREPARE += ["model.context=16", "train.batch_size=4", "device=cpu", "device.threads=1", "prepare.dir=tokens"]
LEARN = ["objective=distillation", f"objective.top_k={TOP}", f"objective.temperature={HEAT}", "data=tokens"]
LEARN += ["data.path=tokens", *STUDENT, *TRAIN]


@pytest.fixture(scope="module", autouse=True)
def prepared(shared: Path) -> None:
    """A text, a run `run` on it, and `tokens` with what it says of them."""
    Path("text.txt").write_text(TEXT)
    text = ["data=text", "data.path=text.txt", "data.tokenizer=char"]
    assert main([*STUDENT, *text, *TRAIN, "train.steps=3", "run.dir=run", "optimizer.lr=0.05"]) == 0
    assert main(PREPARE) == 0


def logits_of_run(tokens: Any) -> Any:
    """Logits of the run in Transformers, exported."""
    import transformers

    if not Path("exported").exists():
        assert main(["task=export", "run.dir=run", "export.form=huggingface", "export.dir=exported"]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained("exported").double()
    return model(torch.from_numpy(tokens)).logits


def top_of(logs: Any, ids: Any) -> Any:
    """Log-probabilities of some ids and of all others together, in fp64."""
    picked = logs.gather(-1, ids)
    return torch.cat([picked, torch.log1p(-picked.exp().sum(-1, keepdim=True))], -1)


def test_prepare_stores_what_transformers_computes() -> None:
    header = json.loads(Path("tokens/tokens.json").read_text())
    for split in ("train", "val"):
        stream = np.fromfile(f"tokens/{split}.bin", header["dtype"]).astype(np.int64)
        count = (len(stream) - 1) // 16
        sequences = np.stack([stream[16 * at : 16 * at + 17] for at in range(count)])
        logits = logits_of_run(sequences[:, :-1].copy())[..., : header["vocabulary"]].detach()
        stored = np.load(f"tokens/{split}.teacher.npy")
        logs = (logits / HEAT).log_softmax(-1)
        ids = torch.from_numpy(stored[IDS].astype(np.int64))
        assert stored[IDS].shape == (count, 16, TOP)
        assert torch.allclose(logs.gather(-1, ids), logs.topk(TOP).values, atol=1e-5)
        assert np.allclose(stored[LOG_PROBS], top_of(logs, ids), atol=1e-5)
        targets = logits.log_softmax(-1).gather(-1, torch.from_numpy(sequences[:, 1:, None]))[..., 0]
        assert np.allclose(stored[OF_TARGETS], targets, atol=1e-5)


def stored_batch(index: int) -> dict[str, Any]:
    """A batch with distributions of a random teacher of more than `TOP` ids."""
    generator = torch.Generator().manual_seed(index)
    logs = torch.randn(ROWS, CONTEXT, VOCABULARY, generator=generator, dtype=torch.float64).log_softmax(-1)
    ids = logs.topk(TOP).indices
    batch = token_batch(VOCABULARY, ROWS, CONTEXT, index, masked=5)
    targets = torch.from_numpy(batch["targets"])
    own = logs.gather(-1, targets.clamp(0)[..., None])[..., 0].where(targets >= 0, 0)
    found = {IDS: ids.numpy(), LOG_PROBS: top_of(logs, ids).float().numpy(), OF_TARGETS: own.float().numpy()}
    return {**batch, **found}


@pytest.mark.parametrize(
    ("beta", "share", "more"),
    [
        (0, 0, ["engine=dynamic"]),
        (1, 0, ["engine=static", "train.gradient_accumulation=2"]),
        (0.3, 0.25, ["engine=traced", "parallel.slices=2"]),
    ],
)
def test_steps_are_those_of_pytorch(
    beta: float, share: float, more: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    monkeypatch.setattr(distillation, "_AT_ONCE", 11 * VOCABULARY)  # in several parts
    wanted = [f"objective.beta={beta}", f"objective.temperature={HEAT}", f"objective.cross_entropy={share}"]
    given = [each for each in CONFIG if not each.startswith("objective.teacher")]
    given += ["data=tokens", "data.path=tokens", f"objective.top_k={TOP}", "data.tokenizer=null"]
    batches = [stored_batch(index) for index in range(3)]
    with Training(load_config(*given, *wanted, *more, *TRAIN)) as training:
        found = [training.step(batch) for batch in batches]
    student = transformers.AutoModelForCausalLM.from_pretrained("student").double()
    optimizer, losses = torch.optim.SGD(student.parameters(), lr=0.5), []
    for batch in batches:
        tokens, targets, ids, kept = (torch.from_numpy(batch[name]) for name in ("tokens", "targets", IDS, LOG_PROBS))
        counts = targets >= 0
        logits = student(tokens).logits[counts]
        own = top_of((logits / HEAT).log_softmax(-1), ids[counts])
        entropy = torch.nn.functional.cross_entropy(logits, targets[counts])
        loss = (1 - share) * expected(own, kept[counts].double(), beta) + share * entropy
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert np.allclose([each.loss for each in found], losses, rtol=1e-5)
    entropies = [-batch[OF_TARGETS].sum() / (batch["targets"] >= 0).sum() for batch in batches]
    assert np.allclose([each.metrics["teacher/ce"] for each in found], entropies, rtol=1e-5)


def losses(run: Path) -> list[float]:
    rows = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    return [row["train/loss"] for row in rows if "train/loss" in row]


def test_all_tokens_stored_teach_as_the_teacher_itself(tmp_path: Path) -> None:
    count = json.loads(Path("tokens/tokens.json").read_text())["vocabulary"]
    whole = [f"objective.top_k={count}", "train.steps=3", "optimizer.lr=0.05", "data.order=sequential"]
    assert main([*PREPARE, f"objective.top_k={count}", f"prepare.dir={tmp_path / 'all'}"]) == 0
    assert main([*LEARN, *whole, f"data.path={tmp_path / 'all'}", f"run.dir={tmp_path / 'stored'}"]) == 0
    live = [each for each in (*LEARN, *whole) if not each.startswith("objective.top_k")]
    live += [f"data.path={tmp_path / 'all'}", "objective.teacher=run", f"run.dir={tmp_path / 'live'}"]
    assert main(live) == 0
    assert np.allclose(losses(tmp_path / "stored"), losses(tmp_path / "live"), rtol=1e-4)


def test_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    words = [*LEARN, "engine=traced", "schedule.steps=4"]
    for run, steps, more in (("whole", 4, []), ("cut", 2, []), ("cut", 4, ["resume=auto"])):
        assert main([*words, f"train.steps={steps}", f"run.dir={tmp_path / run}", *more]) == 0
    whole, cut = (arrays(tmp_path / run) for run in ("whole", "cut"))
    assert whole.keys() == cut.keys() and all(np.array_equal(whole[name], cut[name]) for name in whole)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([*LEARN, "objective.top_k=4"], "objective.top_k=4: the teacher of tokens has 3"),
        ([*LEARN, "objective.temperature=1"], "objective.temperature=1.0: the teacher of tokens has 0.7"),
        ([*LEARN, "model.context=8"], "model.context=8: the teacher of tokens has 16"),
        ([*LEARN, "objective.teacher=run"], "Leave objective.teacher out, or top_k"),
        ([*LEARN, "data=text", "data.path=text.txt"], "Give data=tokens data.path="),
        ([*LEARN, "data.path=plain"], "data.path=plain: no teacher read it"),
        ([*LEARN, "data.path=broken"], "train.teacher.npy is damaged"),
        ([*LEARN, "data.path=empty"], "train.teacher.npy is damaged"),
        ([*LEARN, "data.path=unlisted"], "train.teacher.npy is damaged"),
        ([*LEARN, "train.length_schedule=[8,16]"], "has sequences of one length"),
        ([*PREPARE, "prepare.dir=new", "objective.top_k=null"], "objective.top_k=null"),
        ([*PREPARE, "prepare.dir=new", "model.context=64"], "objective.teacher: is a gpt that reads 16 tokens"),
        ([*PREPARE, "prepare.dir=new", "objective.teacher=nowhere"], "objective.teacher=nowhere"),
        ([*PREPARE, "prepare.dir=new", "data.tokenizer=byte"], "its tokenizer gives tokens other ids"),
        ([*PREPARE, "prepare.dir=new", "objective.top_k=999"], "objective.top_k=999"),
    ],
)
def test_bad_input_ends_in_one_line(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    if not Path("broken").exists():
        for name in ("plain", "broken", "empty", "unlisted"):
            shutil.copytree("tokens", name)
        header = json.loads(Path("plain/tokens.json").read_text())
        Path("plain/tokens.json").write_text(json.dumps({key: header[key] for key in header if key != "teacher"}))
        whole = Path("broken/train.teacher.npy").read_bytes()
        Path("broken/train.teacher.npy").write_bytes(whole[:-5])
        Path("empty/train.teacher.npy").write_bytes(b"")
        Path("unlisted/tokens.json").write_text(json.dumps({**header, "teacher": {**header["teacher"], "sha256": "x"}}))
    assert main([*words, "run.dir=none", "train.steps=1"]) == 2
    assert told in capsys.readouterr().err
    assert not Path("new").exists() and not Path("none").exists()


@pytest.mark.parametrize("data", [b"", b"PK\3\4 an archive", b"\x93NUMPY\1\0\2\0{}"])
def test_a_large_file_that_is_no_array_is_told(
    data: bytes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that is too large to be verified."""
    monkeypatch.setattr(taught, "VERIFIED_BYTES", -1)
    shutil.copytree("tokens", "large", dirs_exist_ok=True)
    Path("large/train.teacher.npy").write_bytes(data)
    assert main([*LEARN, "data.path=large", "run.dir=none", "train.steps=1"]) == 2
    assert "train.teacher.npy is damaged" in capsys.readouterr().err


def test_a_teacher_whose_numbers_overflow_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["task=export", "run.dir=run", "export.form=huggingface", "export.dir=huge"]) == 0
    file = Path("huge/model.safetensors")
    save_file({name: weight * np.float32(1e20) for name, weight in load_file(file).items()}, file, {"format": "pt"})
    assert main([*PREPARE, "prepare.dir=new", "objective.teacher=huge"]) == 2
    assert "objective.teacher=huge: computes NaN. Give another" in capsys.readouterr().err
    assert not Path("new").exists()


def test_a_full_disk_is_told_before_the_teacher_reads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 1000})())
    assert main([*PREPARE, "prepare.dir=new"]) == 2
    assert "and 1000 B are free" in capsys.readouterr().err and not Path("new").exists()
