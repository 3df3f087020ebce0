"""Runs with objective=grpo: what they write, kills in the middle of a rollout, ranks, rewards that fail, mistakes."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Told
from tests.parallel.forks import Forks
from tests.train.reading import events, steps_on_disk, tensors, write_rows
from ttrain.cli import main
from ttrain.objectives import rewards
from ttrain.train.logging.metrics import read_metrics
from ttrain.train.sampling.rollouts import Completion

RUN = [
    "data=sums", "data.largest=9", "model=llama", "model.layers=1", "model.width=16", "model.heads=2",
    "model.context=12", "objective=grpo", "objective.max_completion_length=4", "objective.num_generations=4",
    "objective.num_iterations=2", "objective.reward=[contains,length]", "objective.reward_weights=[1,0.1]",
    "train.steps=7", "train.batch_size=16", "train.save_every=3", "train.eval_every=3", "train.eval_sequences=6",
    "train.log_every=1", "train.peak_tflops=1", "train.keep_last=9", "parallel.slices=4", "logger=jsonl", "device=cpu",
    "device.threads=1", "engine=dynamic", "sample.tokens=2", "optimizer.lr=0.01",
]  # fmt: skip
TIMED = ("seconds", "tokens_per_s", "step_ms", "mfu", "memory_bytes")


def curve(run: Path) -> list[dict[str, Any]]:
    """Return all that a run recorded of its steps but times."""
    return [{k: v for k, v in line.items() if k not in TIMED} for line in read_metrics(run / "metrics.jsonl")]


def samples(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that nobody disturbed."""
    run = tmp_path_factory.mktemp("whole") / "run"
    assert main([*RUN, f"run.dir={run}"]) == 0
    return run


def test_a_run_records_rewards_lengths_and_samples(whole: Path) -> None:
    lines = curve(whole)
    steps = [line for line in lines if "train/loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 8))
    for line in steps:
        assert line["reward"] == pytest.approx(line["rewards/contains/mean"] + 0.1 * line["rewards/length/mean"])
        assert 1 <= line["completions/mean_length"] <= 4
        assert 0 < line["policy/entropy"] <= math.log(13) + 1e-6
    assert [line["clip_ratio/region_mean"] for line in steps[::2]] == [0] * 4  # the sampler's probabilities are its own
    assert steps[0]["reward"] == steps[1]["reward"] != steps[2]["reward"]
    evaluated = [line for line in lines if "val/loss" in line]
    assert [line["step"] for line in evaluated] == [3, 6, 7]
    assert all(line["val/loss"] == -line["val/reward"] for line in evaluated)
    shown = samples(whole)
    assert [row["step"] for row in shown] == [step for step in (1, 3, 5, 7) for _ in range(4)]
    assert len({row["prompt"] for row in shown[:4]}) == 1  # a group
    assert shown[0]["rewards/length/mean"] == -len(shown[0]["completion"])
    assert {event["step"] for event in events(whole, "sample")} == {3, 6, 7}


def test_a_policy_stays_near_the_model_it_starts_from(whole: Path, tmp_path: Path, told: Told) -> None:
    near = ["objective.beta=0.5", f"train.init_from={whole}", "objective.num_iterations=1", "schedule.steps=7"]
    run, parts = tmp_path / "run", tmp_path / "parts"
    assert main([*RUN, *near, f"run.dir={run}"]) == 0
    first, *others = (line["policy/kl"] for line in curve(run) if "policy/kl" in line)
    assert len(others) == 6 and first == 0 < min(others)
    assert not any(name.startswith("frozen.") for name in tensors(run))
    for given, steps in (([*RUN, *near], 4), ([], 7)):
        assert main([*given, f"run.dir={parts}", "resume=auto", f"train.steps={steps}"]) == 0
    assert tensors(parts) == tensors(run)
    assert "train.init_from, model.from or lora.rank" in told(*RUN, "objective.beta=0.5", code=2)


class Killed(BaseException):
    """The end of a process."""


def test_a_run_killed_in_rollouts_goes_on_with_the_same_tokens(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save of step 3 holds completions that step 4 trains on too."""
    run, calls = tmp_path / "run", iter(range(10**6))

    def dies(*given: Any) -> Completion:
        if next(calls) in (78, 145):
            raise Killed
        return Completion(*given)

    monkeypatch.setattr("ttrain.train.sampling.rollouts.Completion", dies)
    for saved in ([3], [3, 6]):
        with pytest.raises(Killed):
            main([*RUN, f"run.dir={run}", "resume=auto"])
        assert steps_on_disk(run) == saved
    assert main([*RUN, f"run.dir={run}", "resume=auto"]) == 0
    assert curve(run) == curve(whole)
    assert tensors(run) == tensors(whole)
    assert {json.dumps(row) for row in samples(run)} == {json.dumps(row) for row in samples(whole)}


def test_two_ranks_learn_the_same_policy(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    ranks = Forks([[*RUN, f"run.dir={run}", "parallel=ddp"]] * 2, tmp_path / "log")
    assert ranks.wait()
    assert ranks.codes == [0, 0], ranks.logs[0].read_text()
    assert curve(run) == curve(whole)
    assert tensors(run) == tensors(whole)
    assert samples(run) == samples(whole)


def test_a_reward_that_fails_ends_the_run_with_its_state_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Told
) -> None:
    run, own = tmp_path / "run", [f"run.dir={tmp_path / 'run'}", "train.save_every=null", "train.eval_every=null"]

    def fails(row: Any, text: str) -> float:
        """Fail in the third rollout."""
        return math.nan if (run / "samples.jsonl").exists() and len(samples(run)) == 8 else 0.5

    monkeypatch.setitem(rewards.REWARDS, "mine", fails)
    words = told(*RUN, *own, "objective.reward=mine", "objective.reward_weights=[]", code=2)
    assert "reward mine is nan for" in words
    assert re.search(r"ttrain: \d\+\d: reward", words)
    assert steps_on_disk(run) == [4]


def test_bad_rows_are_told_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Told) -> None:
    rows = [{"prompt": f"{n}+1=", "answer": n + 1} for n in range(8)]
    own = [x for x in RUN if not x.startswith(("data", "run.dir"))] + ["data=documents", "data.tokenizer=byte"]
    for row, why in (
        ({"answer": 1}, "it has no 'prompt'"),
        ({"prompt": "1+1="}, "reward contains raised ValueError: the row's 'answer' is None, not a text"),
        (
            {"prompt": "1 plus 1 = ", "answer": 2},
            "its prompt of 11 tokens leaves no 4 of model.context=12",
        ),
    ):
        file = write_rows(tmp_path / "rows.jsonl", [*rows, row])
        assert f":9: {why}" in told(*own, f"data.sources=[{file}]", f"run.dir={tmp_path / 'run'}", code=2)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["train.batch_size=10"], "train.batch_size=10: give a multiple of objective.num_generations=4."),
        (["objective.max_completion_length=12"], "must hold a prompt too"),
        (["objective.beta=0.1"], "objective.beta=0.1: needs a model that training starts from. Give train.init_from"),
        (["objective.reward=[exakt]"], "objective.reward=exakt: not registered. Did you mean 'exact'"),
        (["objective.reward_weights=[1]"], "give one or more, and one of reward_weights for each"),
        (["train.minutes=1", "train.steps=null"], "objective=grpo: needs task=train, train.steps and one batch size"),
    ],
)  # fmt: skip
def test_mistakes_are_told(given: list[str], words: str, told: Told) -> None:
    assert words in told(*RUN, *given, code=2)


DIFFERENCE = "sampling/sampling_logp_difference/mean"


LORA = ["lora.rank=4", "objective.beta=0.1", "train.gradient_accumulation=2", "engine=static"]


@pytest.mark.parametrize("given", [["objective.temperature=1.5"], ["precision=bf16"], LORA], ids=lambda given: given[0])
def test_the_sampler_and_the_trainer_agree(given: list[str], tmp_path: Path) -> None:
    assert main([*RUN, *given, "objective.num_iterations=1", "train.steps=2", f"run.dir={tmp_path / 'run'}"]) == 0
    found = [line[DIFFERENCE] for line in curve(tmp_path / "run") if DIFFERENCE in line]
    kl = [line["policy/kl"] for line in curve(tmp_path / "run") if "policy/kl" in line]
    assert len(found) == 2
    assert kl == [] if given is not LORA else kl[0] == 0 < kl[1]  # adapters add nothing at first
    assert max(found) < (1e-2 if "precision=bf16" in given else 1e-5)


def test_traced_and_batch_invariant_they_agree_to_the_bit(tmp_path: Path) -> None:
    own = ["engine=traced", "device.batch_invariant=true", "objective.num_iterations=1", "objective.epsilon=1e-9"]
    assert main([*RUN, *own, "train.steps=3", f"run.dir={tmp_path / 'run'}"]) == 0
    lines = [line for line in curve(tmp_path / "run") if DIFFERENCE in line]
    assert [line[DIFFERENCE] for line in lines] == [0, 0, 0]
