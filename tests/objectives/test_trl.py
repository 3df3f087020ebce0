"""Preferences against TRL: losses and metrics of a batch, and a run of DPO, of a tiny llama on the CPU."""

from __future__ import annotations

import json
import random
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ttrain.cli import main
from ttrain.config import build
from ttrain.config.compose import load
from ttrain.train.logging.metrics import read_metrics

pytest.importorskip("trl", minversion="1.16")

CONTEXT, ROWS = 16, 8
WORDS = [f"w{number}" for number in range(28)]
SPECIAL = ["<pad>", "<unk>", "<s>", "</s>"]
DATA = ["data=documents", "data.sources=[rows.jsonl]", "data.order=sequential", "data.held_out=0.2"]
COMMAND = ["model.from=base", f"model.context={CONTEXT}", *DATA, f"train.batch_size={ROWS}", "device=cpu"]
COMMAND += ["device.threads=1", "engine=static", "logger=jsonl", "optimizer.weight_decay=0", "optimizer.clip_norm=1"]
COMMAND += ["optimizer.betas=[0.9,0.999]", "schedule=constant", "optimizer.lr=1e-3", "schedule.warmup=0"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of Transformers, another as its reference, and rows of pairs; completions alone are KTO's rows."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    made = tmp_path_factory.mktemp("trl")
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate([*SPECIAL, *WORDS])}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(SPECIAL)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>", unk_token="<unk>")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "vocab_size": len(SPECIAL + WORDS)}
    ids = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
    for name in ("base", "reference"):
        torch.manual_seed(len(name))
        LlamaForCausalLM(LlamaConfig(**sizes, **ids, initializer_range=0.2)).save_pretrained(made / name)
        fast.save_pretrained(made / name)
    draw = random.Random(0)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(1, 4))) for _ in range(36)]
    rows = [
        {"prompt": texts[at], "chosen": f" {texts[at + 1]}", "rejected": f" {texts[at + 2]}"} for at in range(0, 36, 3)
    ]
    labelled = [{**row, "completion": row["chosen"], "label": number % 3 > 0} for number, row in enumerate(rows)]
    (made / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in labelled))
    return made


@pytest.fixture(autouse=True)
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def trainer_of(kind: str, rows: list[dict[str, Any]], reference: str = "reference", **settings: Any) -> Any:
    """The trainer of TRL for an objective, over these rows in their order."""
    import trl
    from datasets import Dataset
    from transformers import AutoTokenizer, LlamaForCausalLM
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    if kind == "kto":
        rows = [{key: row[key] for key in ("prompt", "completion", "label")} for row in rows]
    else:
        rows = [{key: row[key] for key in ("prompt", "chosen", "rejected")} for row in rows]
    own: Any = {
        "orpo": (ORPOTrainer, ORPOConfig),
        "simpo": (CPOTrainer, CPOConfig),
        "kto": (trl.KTOTrainer, trl.KTOConfig),
    }
    trainer, config = own.get(kind, (trl.DPOTrainer, trl.DPOConfig))
    kinds = {
        "simpo": {"loss_type": "simpo", "cpo_alpha": 0},
        "ipo": {"loss_type": "ipo"},
        "robust": {"loss_type": "robust"},
    }
    common = {"output_dir": "out", "per_device_train_batch_size": ROWS, "learning_rate": 1e-3, "report_to": "none"}
    common |= {
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "logging_steps": 1,
    }
    common |= {"lr_scheduler_type": "constant", "disable_tqdm": True, "max_length": CONTEXT, "optim": "adamw_torch"}
    common |= {"train_sampling_strategy": "sequential", "remove_unused_columns": False}
    second = {} if kind in ("orpo", "simpo") else {"ref_model": LlamaForCausalLM.from_pretrained(reference)}
    return trainer(
        model=LlamaForCausalLM.from_pretrained("base"), args=config(**{**common, **kinds.get(kind, {}), **settings}),
        train_dataset=Dataset.from_list(rows), processing_class=AutoTokenizer.from_pretrained("base"), **second,
    )  # fmt: skip


def of_reference(tokens: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Log-probabilities of the targets [..., length] by the reference, [...]."""
    from transformers import LlamaForCausalLM

    model, flat = LlamaForCausalLM.from_pretrained("reference"), torch.tensor(targets).reshape(-1, CONTEXT)
    with torch.no_grad():
        each = model(torch.tensor(tokens).reshape(-1, CONTEXT)).logits.log_softmax(-1)
    picked = each.gather(-1, flat.clamp(min=0)[..., None])[..., 0] * (flat >= 0)
    return picked.sum(-1).reshape(targets.shape[:-1]).numpy()


def step_of(objective: str, *overrides: str) -> tuple[dict[str, float | None], list[dict[str, Any]]]:
    """Loss and metrics of a step on the first training rows, with the reference's fields; and the rows."""
    config = load([*COMMAND, f"objective={objective}", *overrides])
    data: Any = build.build_dataset(config)
    model, objective_ = build.build_model(config, data.vocabulary), build.made("objective", config.objective)
    batch = data.batch("train", 0, 0, ROWS)
    for name in ("", "kl_"):
        if objective_.referenced and f"{name}tokens" in batch:
            batch[f"{name}reference"] = of_reference(batch[f"{name}tokens"], batch[f"{name}targets"])
    with (
        closing(build.build_device(config.device)) as device,
        closing(build.build_session(model, device, config)) as session,
    ):
        session.initialize(0)
        start = build.build_warm_start(config, model, data.tokenizer)
        assert start is not None
        start.apply(session.state)
        result = session.train_step(session.build_training(further=False), 0)(batch, {"lr": 0.0}, 1)
    return {"loss": result.loss, **result.metrics}, data.rows["train"][:ROWS]


CASES = {
    "dpo": ("dpo",), "robust": ("dpo", "objective.label_smoothing=0.1"), "ipo": ("ipo", "objective.beta=0.3"),
    "orpo": ("orpo", "train.gradient_accumulation=4"), "simpo": ("simpo", "objective.beta=2"),
    "kto": ("kto", "objective.desirable_weight=1.5", "train.gradient_accumulation=2"),
}  # fmt: skip
SETTINGS = {
    "robust": {"label_smoothing": 0.1},
    "ipo": {"beta": 0.3},
    "simpo": {"beta": 2.0},
    "kto": {"desirable_weight": 1.5},
}


@pytest.mark.parametrize("kind", CASES)
def test_a_batch_has_trls_loss_and_metrics(kind: str) -> None:
    found, rows = step_of(*CASES[kind])
    trainer = trainer_of(kind, rows, **SETTINGS.get(kind, {}))
    trainer.model.eval()
    batch = next(iter(trainer.get_train_dataloader()))
    if kind in ("orpo", "simpo"):
        loss, metrics = trainer.get_batch_loss_metrics(trainer.model, batch)
    else:
        loss = trainer._compute_loss(trainer.model, batch, False)
        metrics = {name: values[-1] for name, values in trainer._metrics["eval"].items()}
    assert found.pop("loss") == pytest.approx(float(loss.detach()), abs=1e-5)
    assert set(found) <= set(metrics) and "rewards/margins" in found
    for name, value in found.items():
        assert value == pytest.approx(metrics[name], abs=1e-5, rel=1e-5), name
    extra = {"entropy", "num_tokens", "mean_token_accuracy", "logits/chosen", "logits/rejected"}
    assert set(metrics) - set(found) <= extra | ({"nll_loss"} if kind == "simpo" else set())


def test_a_run_of_dpo_is_trls() -> None:
    command = [
        *COMMAND,
        "objective=dpo",
        "train.steps=10",
        "train.log_every=1",
        "train.eval_every=10",
        "sample.tokens=1",
    ]
    assert main([*command, "run.dir=run", "train.batch_size=4", f"data.limit={ROWS}"]) == 0
    lines = [line for line in read_metrics(Path("run/metrics.jsonl")) if "train/loss" in line]
    config = load([*COMMAND, "objective=dpo"])
    data: Any = build.build_dataset(config)
    trainer = trainer_of("dpo", data.rows["train"][:ROWS], "base", max_steps=10, per_device_train_batch_size=4)
    trainer.train()
    for line, told in zip(lines, trainer.state.log_history, strict=False):
        assert line["train/loss"] == pytest.approx(told["loss"], abs=1e-4)
        for name in ("grad_norm", "rewards/chosen", "rewards/margins", "rewards/accuracies", "logps/rejected"):
            assert line[name] == pytest.approx(told[name], abs=1e-4, rel=1e-4), name
    assert lines[-1]["train/loss"] < lines[0]["train/loss"] - 0.1
