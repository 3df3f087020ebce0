"""Classification: logits, losses, metrics and folders against Transformers, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.train.reading import arrays, write_rows
from ttrain.cli import main
from ttrain.config.compose import load
from ttrain.objectives.settings import ClassificationConfig
from ttrain.objectives.texts import Classification

torch.set_num_threads(1)
WORDS = {"bad": "awful dull poor", "fair": "plain usual", "good": "great fine lovely kind"}
ROWS = [
    {"text": f"{word} {number}", "label": label}
    for number in range(6)
    for label, words in WORDS.items()
    for word in words.split()
]
TRAIN = ["data=documents", "data.sources=[rows.jsonl]", "data.held_out=0.2", "objective=classification"]
TRAIN += ["train.batch_size=4", "train.eval_every=2", "train.save_every=2", "logger=jsonl", "device=cpu"]
TRAIN += ["device.threads=1", "schedule=constant", "train.peak_tflops=1", "optimizer.lr=0.01"]
GPT = ["model=nano-gpt", "model.layers=1", "model.heads=2", "model.width=16", "model.context=16"]
LLAMA = ["model=llama", "model.layers=1", "model.heads=2", "model.kv_heads=1", "model.width=16", "model.hidden=24"]
LLAMA += ["model.context=16", "model.tied=false"]


@pytest.fixture(autouse=True, scope="module")
def rows(shared: Path) -> None:
    write_rows("rows.jsonl", ROWS)


def train(run: str, *overrides: str) -> int:
    return main([*TRAIN, "data.tokenizer=byte", *overrides, f"run.dir={run}"])


def last(run: str, key: str) -> float:
    lines = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    return float([line[key] for line in lines if key in line][-1])


def held_out(run: str) -> list[Any]:
    """Rows that a run holds out."""
    from ttrain.config import build

    config = load([*TRAIN, *GPT, "data.tokenizer=byte"])
    return list(build.build_dataset(config).rows["val"])  # type: ignore[attr-defined]


def judged(folder: str, texts: list[str]) -> Any:
    """Logits of texts by Transformers, all in one padded batch."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        return model(**tokenizer(texts, padding=True, return_tensors="pt")), model.config


@pytest.mark.parametrize(
    ("model", "more"),
    [
        (GPT, ["engine=static", "train.gradient_accumulation=2", "objective.class_weights=[2,1,0.5]"]),
        (LLAMA, ["engine=dynamic", "parallel.slices=2", "lora.rank=2"]),
    ],
)
def test_a_folder_has_the_losses_of_the_run(model: list[str], more: list[str]) -> None:
    run = f"run{model[0][6:]}"
    assert train(run, *model, *more, "train.steps=6") == 0
    assert main(["task=export", f"run.dir={run}", "export.form=huggingface", f"export.dir={run}-folder"]) == 0
    val = held_out(run)
    found, config = judged(f"{run}-folder", [row["text"] for row in val])
    assert list(config.id2label.values()) == sorted(WORDS)
    labels = torch.tensor([config.label2id[row["label"]] for row in val])
    losses = torch.nn.functional.cross_entropy(found.logits, labels, reduction="none")
    factors = torch.tensor([2, 1, 0.5] if "objective.class_weights=[2,1,0.5]" in more else [1.0, 1, 1])[labels]
    assert abs((losses * factors).mean().item() - last(run, "val/loss")) < 1e-5
    chosen = found.logits.argmax(1)
    assert abs((chosen == labels).float().mean().item() - last(run, "val/labels/accuracy")) < 1e-6
    scores = [2 * ((chosen == c) & (labels == c)).sum() / ((chosen == c).sum() + (labels == c).sum())
              for c in range(3) if (chosen == c).any() or (labels == c).any()]  # fmt: skip
    assert abs(float(sum(scores)) / len(scores) - last(run, "val/labels/f1")) < 1e-6


def test_a_folder_of_transformers_comes_in_and_a_run_goes_on_to_the_bit(capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": 257, "pad_token_id": 256}
    names = {0: "good", 1: "fair", 2: "bad"}
    config = transformers.GPT2Config(**sizes, id2label=names, label2id={name: n for n, name in names.items()})
    model = transformers.GPT2ForSequenceClassification(config).eval()
    model.save_pretrained("theirs")
    given = ["model.from=theirs", "data.tokenizer=byte", "engine=static"]
    still = ["optimizer.lr=0", "guard.check_learning=null"]
    assert train("taken", *given, *still, "train.steps=2") == 0
    assert "started_anew" not in json.loads(Path("taken/run.json").read_text())["attempts"][-1].get("x", {})
    losses = []
    for row in held_out("taken"):
        with torch.no_grad():
            logits = model(torch.tensor([list(row["text"].encode())])).logits
        losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor([config.label2id[row["label"]]])).item())
    assert last("taken", "val/loss") == pytest.approx(np.mean(losses), rel=1e-5)
    more = [*GPT, "lora.rank=2", "train.init_from=taken"]
    assert train("whole", *more, "train.steps=4") == 0
    assert train("halves", *more, "train.steps=2") == 0
    assert main(["resume=auto", "run.dir=halves", "train.steps=4"]) == 0
    whole, halves = arrays("whole"), arrays("halves")
    assert whole.keys() == halves.keys() and all(np.array_equal(whole[name], halves[name]) for name in whole)
    assert "classes.weight" in arrays("whole", files="param*")
    for form, told in (("peft", "export.form=peft: predicts tokens"), ("gguf", "export.form=gguf: predicts tokens")):
        capsys.readouterr()
        place = "export.file=x.gguf" if form == "gguf" else "export.dir=x"
        assert main(["task=export", "run.dir=whole", f"export.form={form}", place]) == 2
        assert told in capsys.readouterr().err
    for task in ("task=sample", "task=eval eval.text=[labels.jsonl]"):
        assert main([*task.split(), "run.dir=whole", "device=cpu"]) == 2
        assert "objective=classification: its model predicts no tokens. Give " in capsys.readouterr().err


def test_bad_rows_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for number, (row, told) in enumerate(
        (
            ({"text": "", "label": "bad"}, "a text is blank"),
            ({"text": "dull", "label": "odd"}, 'label "odd" is no class: good, bad'),
            ({"text": "dull"}, "has no 'label'"),
            ({"label": "good"}, "has no 'text'"),
            ({"text": "dull", "label": 0.5}, "label 0.5 is no class: good, bad"),
            ({"text": "dull", "label": True}, "label true is no class"),
        )
    ):
        rows = [{"text": f"dull {n}", "label": n % 2} for n in range(20)]
        write_rows(f"bad{number}.jsonl", [*rows, row])
        capsys.readouterr()
        given = [f"data.sources=[bad{number}.jsonl]", "objective.classes=[good,bad]"]
        assert train("none", *GPT, *given, "train.steps=2") == 2
        message = capsys.readouterr().err
        assert f"bad{number}.jsonl:21: {told}" in message and "Traceback" not in message
    assert train("none", *GPT, "data.sources=[bad0.jsonl]", "objective.classes=[only]", "train.steps=2") == 2
    for wrong in ("objective.class_weights=[1]", "objective.classes=[good,bad,fair,good]"):
        capsys.readouterr()
        assert train("none", *GPT, wrong, "train.steps=2") == 2
        assert "give at least two, all different, and as many class_weights or none." in capsys.readouterr().err


def test_a_plan_reads_the_classes() -> None:
    assert train("none", *GPT, "task=plan", "plan.json=plan.json") == 0
    assert json.loads(Path("plan.json").read_text())["parameters"]["groups"]["classes"] == 3 * 16


def test_given_classes_keep_their_order() -> None:
    objective = Classification(ClassificationConfig(classes=["b", "a"]))
    objective.read([{"label": "c"}])
    assert objective.config.classes == ["b", "a"]
    objective = Classification(ClassificationConfig())
    objective.read([{"label": 10}, {"label": 2}, {"label": "x"}, {"label": None}, {}])
    assert objective.config.classes == ["2", "10", "x"]
