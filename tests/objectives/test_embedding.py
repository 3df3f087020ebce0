"""Embedding: InfoNCE and its gradients against PyTorch, whatever the micro-batches; folders in and out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.train.reading import arrays, write_rows
from ttrain import Training, load_config
from ttrain.cli import main

torch.set_num_threads(1)
WORDS = ["red", "green", "blue", "grey", "pink", "gold", "teal", "navy"]
ROWS = [{"anchor": f"{word} {n}", "positive": f"{n} of the {word}"} for n in range(5) for word in WORDS]
TRAIN = ["data=documents", "data.sources=[rows.jsonl]", "data.tokenizer=byte", "data.held_out=0.2", "device=cpu"]
TRAIN += ["objective=embedding", "train.batch_size=8", "train.eval_every=2", "train.save_every=2", "logger=jsonl"]
TRAIN += ["device.threads=1", "schedule=constant", "train.peak_tflops=1", "optimizer.lr=0.01"]
SIZES = ["model.layers=1", "model.heads=2", "model.width=16", "model.context=24"]
GPT, LLAMA = ["model=nano-gpt", *SIZES], ["model=llama", *SIZES, "model.kv_heads=1", "model.hidden=24"]


@pytest.fixture(autouse=True, scope="module")
def rows(shared: Path) -> None:
    write_rows("rows.jsonl", ROWS)


def train(run: str, *overrides: str) -> int:
    return main([*TRAIN, *overrides, f"run.dir={run}"])


def last(run: str, key: str) -> float:
    lines = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    return float([line[key] for line in lines if key in line][-1])


def batch(rows: int, length: int) -> dict[str, Any]:
    """Texts of random tokens, of different lengths."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(3, length, (rows, 2, 1))
    pooling = (np.arange(length) < lengths) / lengths
    tokens = generator.integers(0, 64, (rows, 2, length))
    return {"tokens": tokens, "pooling": pooling.astype(np.float32), "targets": np.zeros(rows, np.int64),
            "weight": np.ones(rows, np.float32)}  # fmt: skip


def by_torch(given: Any, slices: int, recall: int) -> tuple[float, float, dict[str, Any]]:
    """Loss, recall and gradients of the folder `base`, in fp64."""
    import transformers

    model = transformers.AutoModel.from_pretrained("base").double()
    tokens, pooling = torch.from_numpy(given["tokens"]).flatten(0, 1), torch.from_numpy(given["pooling"]).flatten(0, 1)
    vectors = (model(tokens).last_hidden_state * pooling.double()[:, :, None]).sum(1)
    units = torch.nn.functional.normalize(vectors, dim=-1).unflatten(0, (-1, 2))
    losses, near = [], []
    for part in units.chunk(slices):
        scores = part[:, 0] @ part[:, 1].T / 0.05
        losses.append(torch.nn.functional.cross_entropy(scores, torch.arange(len(scores)), reduction="none"))
        near.append((scores > scores.diagonal()[:, None]).sum(1) < recall)
    torch.cat(losses).mean().backward()
    gradients = {name: each.grad.numpy() for name, each in model.named_parameters() if each.grad is not None}
    return torch.cat(losses).mean().item(), torch.cat(near).double().mean().item(), gradients


@pytest.mark.parametrize(
    ("slices", "parts", "engine"), [(1, 1, "dynamic"), (2, 1, "traced"), (1, 4, "static"), (2, 2, "static")]
)
def test_gradients_are_those_of_whole_slices(slices: int, parts: int, engine: str) -> None:
    transformers = pytest.importorskip("transformers")
    if not Path("base").exists():
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = transformers.LlamaConfig(**sizes, num_key_value_heads=1, vocab_size=64, max_position_embeddings=24)
        transformers.LlamaForCausalLM(config).save_pretrained("base")
    sizes = [f"parallel.slices={slices}", f"train.gradient_accumulation={parts}", f"engine={engine}"]
    sgd = ["optimizer=sgd", "optimizer.momentum=0", "optimizer.lr=1", "optimizer.clip_norm=null", "model.from=base"]
    given = batch(8, 24)
    loss, recall, gradients = by_torch(given, slices, 1)
    with Training(load_config(*TRAIN, *sizes, *sgd)) as training:
        before = training.parameters()
        found = training.step(given)
        after = training.parameters()
    assert abs(found.loss - loss) < 1e-5 and found.metrics["retrieval/recall@1"] == pytest.approx(recall)
    for name, path in (("embed_tokens.weight", "embedding.weight"), ("norm.weight", "norm.weight")):
        assert np.abs(before[path] - after[path] - gradients[name]).max() < 2e-6 * np.abs(gradients[name]).max()


@pytest.mark.parametrize(("model", "pooling"), [(GPT, "last"), (LLAMA, "mean")])
def test_sentence_transformers_opens_the_folder(model: list[str], pooling: str) -> None:
    sentences = pytest.importorskip("sentence_transformers")
    run, texts = f"run-{pooling}", ["red 1", "1 of the red", "blue 4"]
    assert train(run, *model, f"objective.pooling={pooling}", "train.steps=2") == 0
    assert main(["task=export", f"run.dir={run}", "export.form=huggingface", f"export.dir={run}-folder"]) == 0
    encoder = sentences.SentenceTransformer(f"{run}-folder", device="cpu")
    theirs = encoder.encode(texts)
    transformer = encoder[0].auto_model
    ids = [list(text.encode()) for text in texts]
    with torch.no_grad():
        hidden = [transformer(torch.tensor([each])).last_hidden_state[0] for each in ids]
    ours = torch.stack([each[-1] if pooling == "last" else each.mean(0) for each in hidden])
    assert np.allclose(theirs, torch.nn.functional.normalize(ours, dim=-1).numpy(), atol=1e-5)
    units = dict(zip(texts, theirs, strict=True))
    assert len(units) == 3
    again = [f"model.from={run}-folder", "model.context=24", "optimizer.lr=0", "guard.check_learning=null"]
    assert train(f"{run}-again", *again, f"objective.pooling={pooling}", "train.steps=2") == 0
    assert last(f"{run}-again", "val/loss") == pytest.approx(last(run, "val/loss"), rel=1e-5)


def test_a_run_goes_on_to_the_bit() -> None:
    parts = [*GPT, "train.gradient_accumulation=2", "engine=static"]
    assert train("whole", *parts, "train.steps=4") == 0
    assert train("halves", *parts, "train.steps=2") == 0
    assert main(["resume=auto", "run.dir=halves", "train.steps=4"]) == 0
    whole, halves = arrays("whole"), arrays("halves")
    assert whole.keys() == halves.keys() and all(np.array_equal(whole[name], halves[name]) for name in whole)
    assert 0 < last("whole", "val/retrieval/recall@5") <= 1


def test_what_does_not_fit_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    write_rows("bad.jsonl", [*ROWS, {"anchor": "red", "positive": " "}])
    for more, told in (
        (["data.sources=[bad.jsonl]"], "bad.jsonl:41: a text is blank, not words"),
        (["train.batch_schedule=[8,16]", "train.phase_steps=1"], "compares the rows of batches"),
        (["parallel.slices=8"], "objective=embedding: a slice of one row has no other to tell it from."),
    ):
        capsys.readouterr()
        assert train("none", *GPT, *more, "train.steps=2") == 2
        assert told in capsys.readouterr().err
