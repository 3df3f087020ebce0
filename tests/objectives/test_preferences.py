"""Runs on preferences: the same numbers however a batch is cut, kept reference values, bad rows, and the recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Told
from tests.parallel.forks import Forks
from tests.train.reading import tensors, write_rows
from ttrain.cli import main
from ttrain.data.library_tokenizer import train_bpe
from ttrain.objectives import preferences
from ttrain.parallel.world import World
from ttrain.train.logging.metrics import read_metrics
from ttrain.train.runs import reference

SUMS = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": f"{n}{n % 7}"} for n in range(40)]
LABELLED = [{"prompt": row["prompt"], "completion": row["chosen"], "label": n % 3 > 0} for n, row in enumerate(SUMS)]
DATA = ["data=documents", "data.tokenizer=byte", "data.held_out=0.2"]
COMMAND = [*DATA, "model.layers=1", "model.width=16", "model.heads=2", "model.context=12", "train.steps=2"]
COMMAND += [
    "train.batch_size=8",
    "train.log_every=1",
    "train.eval_every=2",
    "train.eval_sequences=7",
    "sample.tokens=1",
]
COMMAND += ["device=cpu", "device.threads=1", "engine=static", "logger=jsonl", "optimizer.lr=0.01", "schedule=constant"]
COMMAND += ["sample.tokens=1"]
MODELS = {
    "llama": ["model=llama"], "gpt": ["model=nano-gpt"],
    "agillm": ["model=agillm", "model.preset=null", "model.rank=8", "model.objective=ar_only", "model.dropout=0"],
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def rows(shared: Path) -> None:
    write_rows("dpo.jsonl", SUMS)
    write_rows("kto.jsonl", LABELLED)


def command(objective: str, model: str, *overrides: str) -> list[str]:
    file = "kto" if objective == "kto" else "dpo"
    return [*COMMAND, *MODELS[model], f"objective={objective}", f"data.sources=[{file}.jsonl]", *overrides]


def run(name: str, objective: str, model: str, *overrides: str) -> list[dict[str, float]]:
    """Losses, rewards and divergences of a run's steps and evaluations."""
    assert main([*command(objective, model, *overrides), f"run.dir={name}"]) == 0
    return numbers(name)


def numbers(name: str) -> list[dict[str, float]]:
    parts = ("loss", "rewards/", "logps/", "kl", "nll")
    lines = read_metrics(Path(name, "metrics.jsonl"))
    return [{key: line[key] for key in line if any(part in key for part in parts)} for line in lines]


def close(one: list[dict[str, float]], other: list[dict[str, float]], within: float = 1e-5) -> None:
    assert len(one) == len(other) == 3
    for mine, its in zip(one, other, strict=True):
        assert mine == pytest.approx(its, abs=within, rel=within) and len(mine) > 5


@pytest.mark.parametrize(("objective", "model"), [("dpo", "gpt"), ("kto", "llama"), ("orpo", "agillm")])
def test_numbers_do_not_hang_on_micro_batches_and_engines(objective: str, model: str) -> None:
    whole = run(f"{objective}_whole", objective, model)
    close(whole, run(f"{objective}_parts", objective, model, "train.gradient_accumulation=4"))
    close(whole, run(f"{objective}_tape", objective, model, "engine=dynamic", "train.gradient_accumulation=2"))


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_the_model_without_its_adapters_is_the_reference(objective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Computed in the step or once before training: the log-probabilities are those of the first weights."""
    lora = "lora.rank=2", "train.gradient_accumulation=2"
    in_step = run(f"{objective}_lora", objective, "llama", *lora)
    assert not Path(f"{objective}_lora/reference.safetensors").exists()
    monkeypatch.setattr(preferences, "starts_bare", lambda model: False)
    close(in_step, run(f"{objective}_stored", objective, "llama", *lora), 1e-6)
    assert Path(f"{objective}_stored/reference.safetensors").exists()


def test_a_run_goes_on_with_the_reference_that_it_began_with(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run("whole", "dpo", "llama", "train.steps=4")
    run("half", "dpo", "llama")
    monkeypatch.setenv("XDG_CACHE_HOME", str(Path("elsewhere").resolve()))
    assert main(["resume=half", "run.dir=on", "train.steps=4"]) == 0
    assert tensors("on") == tensors("whole")
    assert numbers("on")[-2:] == numbers("whole")[-2:]
    Path("half/reference.safetensors").unlink()
    capsys.readouterr()
    assert main(["resume=half", "run.dir=lost", "train.steps=4"]) == 2
    assert "half/reference.safetensors" in capsys.readouterr().err


def test_ranks_learn_the_same(tmp_path: Path) -> None:
    """Two processes, and one that computes both slices: the same bits of KTO, whose divergence is that of a slice."""
    one = run("one", "kto", "llama", "parallel.slices=2", "train.gradient_accumulation=2")
    command_ = command("kto", "llama", "parallel=ddp", "parallel.slices=2", "train.gradient_accumulation=2")
    ranks = Forks([[*command_, "run.dir=two"]] * 2, tmp_path / "log")
    assert ranks.wait()
    assert ranks.codes == [0, 0], ranks.logs[0].read_text()
    assert numbers("two") == one


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "1", "rejected": "2"}, "has no 'chosen'"),
        ({"prompt": "1", "chosen": "2", "rejected": "2"}, "completions are equal"),
        ({"prompt": "1", "chosen": " ", "rejected": "2"}, "completion is empty"),
        ({"chosen": "12", "rejected": "12 3"}, "completion is empty"),  # behind what both begin with
    ],
)
def test_a_bad_pair_is_named(row: dict[str, Any], problem: str, refused: Told) -> None:
    write_rows("bad.jsonl", [*SUMS[:3], row])
    assert "bad.jsonl:4" in refused(problem, *command("dpo", "llama", "data.sources=[bad.jsonl]"))


@pytest.mark.parametrize(("label", "problem"), [(1, "label is 1, not true or false"), (None, "has no 'label'")])
def test_a_bad_label_is_named(label: Any, problem: str, refused: Told) -> None:
    write_rows("bad.jsonl", [*LABELLED[:3], {**LABELLED[0], "label": label}])
    assert "bad.jsonl:4" in refused(problem, *command("kto", "llama", "data.sources=[bad.jsonl]"))


def test_no_key_of_a_row_is_taken_for_the_row_before_it() -> None:
    write_rows("keys.jsonl", [{**row, "other": "x"} for row in LABELLED])
    assert run("keys", "kto", "llama", "data.sources=[keys.jsonl]")


def test_all_ranks_compute_the_reference_where_one_has_no_cache_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of zero3 gather weights meanwhile, so one alone would wait for the others forever."""
    calls: list[int] = []
    computed = reference._computed
    monkeypatch.setattr(reference, "_computed", lambda *given: calls.append(1) or computed(*given))
    settings = "dpo", "llama", "run.seed=7"
    run("caching", *settings)
    run("cached", *settings)
    assert len(calls) == 1
    monkeypatch.setattr(World, "first", lambda world, found: "missing on rank 1")
    run("apart", *settings)
    assert len(calls) == 2 and numbers("apart") == numbers("cached")


def test_heads_that_pairs_do_not_read_are_refused(refused: Told) -> None:
    refused("Give model.objective=ar_only", *command("dpo", "agillm", "model.objective=joint"))


def test_the_recipe_prefers_the_chosen_replies() -> None:
    """SmolLM2-135M with 2 of its 30 layers and a small vocabulary, on conversations without prompts of their own."""
    from tokenizers import Tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    sizes |= {"num_hidden_layers": 2, "vocab_size": 300, "max_position_embeddings": 8192}
    config = LlamaConfig(**sizes, rms_norm_eps=1e-5, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0)
    LlamaForCausalLM(config).bfloat16().save_pretrained("hub")
    tokenizer = Tokenizer.from_str(train_bpe(["yes no maybe 0123456789 user assistant\n"] * 9, 270).to_json())
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save("hub/tokenizer.json")
    asked = [{"role": "user", "content": "?"}]
    replies = {"chosen": "yes", "rejected": "no"}
    pairs = [
        {side: [*asked, {"role": "assistant", "content": f"{reply} {n}"}] for side, reply in replies.items()}
        for n in range(40)
    ]
    write_rows("chats.jsonl", pairs)
    overrides = ["recipe=smollm2-135m-dpo", "model.from=hub", "data.sources=[chats.jsonl]", "run.dir=tuned"]
    small = [
        "model.context=64",
        "train.steps=6",
        "train.batch_size=8",
        "train.gradient_accumulation=2",
        "schedule=constant",
    ]
    small += ["schedule.warmup=0", "train.eval_every=null", "optimizer.lr=1e-3", *COMMAND[-7:-4], "sample.tokens=2"]
    assert main([*overrides, *small]) == 0
    summary = json.loads(Path("tuned/summary.json").read_text())
    assert summary["val/loss"] < 0.3 and numbers("tuned")[-1]["val/rewards/margins"] > 1
