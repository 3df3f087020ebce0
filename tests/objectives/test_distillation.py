"""Distillation: losses, gradients and steps against PyTorch and TRL, and runs through the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.models.session import token_batch
from tests.train.reading import arrays, write_documents
from ttrain import Training, load_config
from ttrain.cli import main
from ttrain.objectives import distillation
from ttrain.train.runs.warm_start import WeightSource

SIZES = {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 16}
ROWS, CONTEXT, VOCABULARY = 4, 16, 40
TRAIN = ["train.batch_size=4", "train.eval_every=2", "train.save_every=2", "logger=jsonl", "device=cpu"]
TRAIN += ["device.threads=1", "schedule=constant", "sample.tokens=2", "train.peak_tflops=1"]
OWN = ["model=nano-gpt", "model.layers=1", "model.heads=2", "model.width=16", "model.context=16"]


@pytest.fixture(autouse=True, scope="module")
def folders(shared: Path) -> None:
    """Folders of a small llama, `student`, and of a gpt2 with more ids, `teacher`."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    llama = {"hidden_size": 16, "intermediate_size": 24, "num_key_value_heads": 1, "vocab_size": VOCABULARY}
    student = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **llama))
    gpt = {"n_embd": 24, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": VOCABULARY + 8}
    teacher = transformers.GPT2LMHeadModel(transformers.GPT2Config(**gpt))
    for model, name in ((student, "student"), (teacher, "teacher")):
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        model.save_pretrained(name)


def expected(student: Any, teacher: Any, beta: float) -> Any:
    """Mean divergence of rows of log-probabilities, in plain PyTorch."""

    def kl(p: Any, q: Any) -> Any:
        return (p.exp() * (p - q)).sum(-1).mean()

    if beta in (0, 1):
        return kl(teacher, student) if beta == 0 else kl(student, teacher)
    mixed = (beta * teacher.exp() + (1 - beta) * student.exp()).log()
    return beta * kl(teacher, mixed) + (1 - beta) * kl(student, mixed)


def steps_of_torch(batches: list[Any], beta: float, heat: float, share: float) -> tuple[list[float], list[float], Any]:
    """Losses and cross-entropies of SGD steps in fp64, and the model behind them."""
    import transformers

    load = transformers.AutoModelForCausalLM.from_pretrained
    student, teacher = (load(name).double() for name in ("student", "teacher"))
    optimizer, losses, entropies = torch.optim.SGD(student.parameters(), lr=0.5), [], []
    for batch in batches:
        tokens, targets = (torch.from_numpy(batch[name]) for name in ("tokens", "targets"))
        counts = targets >= 0
        own, its = (model(tokens).logits[counts][:, :VOCABULARY] for model in (student, teacher))
        entropy = torch.nn.functional.cross_entropy(own, targets[counts])
        found = expected((own / heat).log_softmax(-1), (its.detach() / heat).log_softmax(-1), beta)
        loss = (1 - share) * found + share * entropy
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        entropies.append(entropy.item())
    return losses, entropies, student


def batches() -> list[Any]:
    return [token_batch(VOCABULARY, ROWS, CONTEXT, index, masked=5) for index in range(3)]


CONFIG = ["model.from=student", "data.tokenizer=byte", "model.context=16", "optimizer=sgd", "optimizer.momentum=0"]
CONFIG += ["optimizer.lr=0.5", "optimizer.clip_norm=null", "objective=distillation", "objective.teacher=teacher"]


@pytest.mark.parametrize(
    ("beta", "heat", "share", "more"),
    [
        (0, 1, 0, ["engine=dynamic"]),
        (1, 2, 0, ["engine=static", "train.gradient_accumulation=2"]),
        (0.3, 0.7, 0.25, ["engine=traced", "parallel.slices=2"]),
    ],
)
def test_steps_are_those_of_pytorch(
    beta: float, heat: float, share: float, more: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distillation, "_AT_ONCE", 11 * VOCABULARY)  # in several parts
    wanted = [f"objective.beta={beta}", f"objective.temperature={heat}", f"objective.cross_entropy={share}"]
    config = load_config(*CONFIG, *wanted, *more, *TRAIN)
    losses, entropies, student = steps_of_torch(batches(), beta, heat, share)
    with Training(config) as training:
        found = [training.step(batch) for batch in batches()]
        weights = training.parameters()
    assert np.allclose([each.loss for each in found], losses, rtol=1e-5)
    assert np.allclose([each.metrics["student/ce"] for each in found], entropies, rtol=1e-5)
    wanted_weights = dict(student.named_parameters())
    for name, path in (("model.embed_tokens.weight", "embedding.weight"), ("lm_head.weight", "head.weight")):
        assert np.allclose(weights[path], wanted_weights[name].detach().numpy(), atol=1e-5)
    assert not any(name.startswith("frozen.") for name in weights)


def test_the_divergence_is_that_of_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    loss = pytest.importorskip("trl.experimental.gkd").GKDTrainer.generalized_jsd_loss
    given = torch.randn(2, 6, 7, dtype=torch.float64).unbind()
    for beta in (0, 0.3, 0.5, 1):
        logs = [(each / 0.7).log_softmax(-1) for each in given]
        theirs = loss(*(each[None] for each in given), beta=beta, temperature=0.7, labels=torch.ones(1, 6))
        assert torch.isclose(theirs, expected(*logs, beta), rtol=1e-9)


def train(run: str, *overrides: str) -> int:
    write_documents(words=30)
    data = ["data=documents", "data.sources=[words.jsonl]", "data.tokenizer=byte", "data.held_out=0.3"]
    return main([*data, *OWN, *TRAIN, *overrides, f"run.dir={run}"])


def test_a_run_with_a_teacher_goes_on_and_notices_another(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("big", "model.layers=2", "train.steps=2") == 0
    learns = ["objective=distillation", "objective.teacher=big", "lora.rank=2"]
    assert train("whole", *learns, "train.steps=4", "parallel.slices=2") == 0
    assert train("parts", *learns, "train.steps=2", "parallel.slices=2") == 0
    assert main(["resume=auto", "run.dir=parts", "train.steps=4"]) == 0
    whole, parts = arrays("whole"), arrays("parts")
    assert whole.keys() == parts.keys() and all(np.array_equal(whole[name], parts[name]) for name in whole)
    assert not any(name.startswith("frozen.") for name in whole)
    lines = [json.loads(line) for line in Path("parts/metrics.jsonl").read_text().splitlines()]
    assert all(lines[-1][f"val/{name}"] > 0 for name in ("student/ce", "teacher/ce", "loss"))
    assert main(["resume=auto", "run.dir=big", "train.steps=4"]) == 0
    capsys.readouterr()
    assert main(["resume=auto", "run.dir=parts", "train.steps=6"]) == 2
    assert "objective.teacher: its weights have the SHA-256" in capsys.readouterr().err
    assert main(["resume=auto", "run.dir=parts", "train.steps=5", *learns[:2]]) == 0
    shutil.rmtree("big")
    assert main(["resume=auto", "run.dir=parts", "train.steps=6"]) == 2
    assert "objective.teacher=big: is no folder with a config.json" in capsys.readouterr().err
    Path("big").mkdir()
    assert main(["resume=auto", "run.dir=parts", "train.steps=6"]) == 2
    assert "objective.teacher=big: big is neither a run nor a checkpoint of ttrain" in capsys.readouterr().err


def test_a_teacher_that_does_not_fit_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train("short", "model.context=8", "train.steps=1") == 0
    assert train("letters", "data.tokenizer=char", "train.steps=1") == 0
    learns = ["objective=distillation", "train.steps=1"]
    for teacher, told in (
        ("short", "reads 8 tokens, expected a llama or gpt that reads 16"),
        ("letters", "its tokenizer gives tokens other ids"),
        ("null", "there is nobody to learn from"),
        ("letters model.future_weight=0.1", "teaches the next token alone"),
    ):
        capsys.readouterr()
        assert train("other", *learns, *f"objective.teacher={teacher}".split()) == 2
        assert told in capsys.readouterr().err
    bad = lambda _, model: {path: np.full(each.shape, np.nan) for path, each in model.persistent().items()}  # noqa: E731
    monkeypatch.setattr(WeightSource, "values", bad)
    assert train("other", *learns, "model.context=8", "objective.teacher=short") == 2
    assert "objective.teacher: " in (told := capsys.readouterr().err) and "holds NaN or infinity" in told


def test_a_plan_counts_the_teacher(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("wide", "model.width=32", "train.steps=1") == 0
    constant = 0
    for more in ([], ["objective=distillation", "objective.teacher=wide"]):
        assert train("none", "task=plan", "plan.json=plan.json", *more) == 0
        report = json.loads(Path("plan.json").read_text())
        constant = report["memory"].get("constant", 0) - constant
    weights = arrays("wide", files="param*")
    assert constant >= 4 * sum(weight.size for weight in weights.values())
