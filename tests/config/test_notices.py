"""Notices at the start of a run."""

from __future__ import annotations

import pytest

from ttrain.config.compose import load
from ttrain.config.schema import to_dict
from ttrain.tasks.training.notices import notices
from ttrain.tasks.training.run import Rate, rate_jump, train_on
from ttrain.train.checkpoint.checkpoint import Progress

GROWING = ("model.context=64", "train.length_schedule=[16,32,64]", "train.phase_steps=10")
PAIRS = ("model=agillm", "model.preset=femto_1x")


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ((), None),
        (("optimizer.lr=0",), "no parameter changes"),
        (("lora.targets=[qkv]",), "lora.targets is given without lora.rank"),
        (("lora.targets=[qkv]", "lora.rank=0"), "lora.targets is given without lora.rank"),
        (("lora.targets=[qkv]", "lora.rank=2", "train.init_from=x"), None),
        (("model=gpt2",), "data.tokenizer=bpe"),
        (("model=gpt2", "data.tokenizer=bpe"), None),
        (("model=gpt2", "data.tokenizer=char"), None),
        (("model=gpt2", "data=tokens", "data.path=x"), None),
        ((*GROWING, "train.steps=21"), None),
        ((*GROWING, "train.steps=20"), "64 tokens begin at step 21"),
        (("train.batch_schedule=[8,16]", "train.gradient_accumulation=2", "train.steps=10"), "batches of 16 begin"),
        (("schedule=constant", "schedule.min_lr_ratio=0.2"), "schedule.min_lr_ratio=0.2 changes nothing"),
        (("schedule.decay=0.3",), "schedule.decay=0.3 changes nothing: it is for schedule=wsd"),
        (("optimizer.weight_decay=0.2", "optimizer.decay_rule=none"), "optimizer.weight_decay=0.2 changes nothing"),
        (("optimizer.weight_decay=0", "optimizer.decay_rule=all"), "optimizer.decay_rule=all changes nothing"),
        (("optimizer.weight_decay=0", "optimizer.cautious=true"), "optimizer.cautious=True changes nothing"),
        (("train.phase_steps=7",), "train.phase_steps=7 changes nothing"),
        (("train.eval_every=null", "train.early_stop=3"), "train.early_stop=3 changes nothing"),
        (("train.init_anyway=true",), "there is no train.init_from"),
        (("model.base_head_width=16",), "it is for model.parametrization=mup"),
        (("model=llama", "model.rotary_factor=4"), "model.rotary_factor=4.0 changes nothing"),
        (("model=llama", "model.rotary_scaling=linear", "model.rotary_low=2"), "model.rotary_scaling=linear does not"),
        (("model=llama", "model.rotary_scaling=linear", "model.rotary_factor=4"), None),
        (("model=llama", "model.router=biased"), "model.router=biased changes nothing: the model has no experts"),
        (("model=llama", "model.preset=moe-tiny", "model.router=sigmoid"), None),
        ((*PAIRS, "model.objective=ar_only", "model.sat_stride=2"), "model.sat_stride=2 changes nothing"),
        (("sample.temperature=0", "sample.top_k=5"), "sample.top_k=5 changes nothing"),
        (("sample.penalty_window=5",), "sample has no penalty"),
        (("sample.penalty_window=5", "sample.repetition=1.2"), None),
        ((*PAIRS, "model.context=4"), None),
        ((*PAIRS, "model.context=3"), "sequences of 3 tokens hold no SAT window"),
        ((*PAIRS, "model.context=3", "model.objective=ar_only"), None),
        ((*PAIRS, "model.context=8", "train.length_schedule=[2,8]", "train.phase_steps=1"), "sequences of 2 tokens"),
    ],
)
def test_what_is_seldom_meant_is_told(overrides: tuple[str, ...], told: str | None) -> None:
    found = list(notices(load(overrides)))
    assert len(found) == (told is not None)
    assert told is None or told in found[0]


def rate_of(overrides: str) -> Rate:
    config = load(overrides.split())
    return Rate(config.optimizer.lr, config.schedule, config.train.steps)


TO_ZERO = "schedule=linear schedule.min_lr_ratio=0"


@pytest.mark.parametrize(
    ("before", "now", "step", "told"),
    [
        # (1 - r) from 1 to 0.1: the end of 100 steps, then the step after it of a line over 200 steps.
        ("schedule=linear", "train.steps=200", 100, (1e-4, 1e-3 * (1 - 0.9 * 100 / 199))),
        ("schedule=linear", "train.steps=200 schedule.steps=100", 100, None),
        ("schedule=linear", "", 50, None),
        ("schedule=linear", "train.steps=105", 50, None),  # a rate 2 percent higher
        ("schedule=linear", "optimizer.lr=5e-4", 99, (1e-3 * (1 - 0.9 * 98 / 99), 5e-5)),
        (TO_ZERO, "train.steps=101", 100, None),
        (TO_ZERO, "train.steps=200", 100, (0.0, 1e-3 * (1 - 100 / 199))),
        ("schedule=constant", "train.steps=200", 100, None),
        ("schedule=linear schedule.warmup=50", "", 10, None),
        ("schedule=wsd", "train.steps=200", 100, (1e-4, 1e-3)),
        ("schedule=linear", "", 100, None),  # all is done
    ],
)
def test_a_resume_tells_a_rate_that_jumps(before: str, now: str, step: int, told: tuple[float, float] | None) -> None:
    base = f"train.steps=100 optimizer.lr=1e-3 {before}"
    note = rate_jump(to_dict(load(base.split())), rate_of(f"{base} {now}"), Progress(step, lr_factor=0.5))
    if told is None:
        assert note is None
    else:
        old, new = (rate / 2 for rate in told)  # a rollback halved it
        assert note is not None and f"from {old:.2e} at step {step} to {new:.2e} at step {step + 1}" in note
        assert ("schedule.steps=100 keeps its end" in note) == ("train.steps=200" in now)


@pytest.mark.parametrize(
    ("given", "step", "overrides", "rate"),
    [
        ("schedule=linear", 100, "train.steps=200 schedule.steps=100", "goes on at 1.00e-04; with"),
        ("schedule=linear schedule.steps=100", 100, "train.steps=200", "goes on at 1.00e-04; with"),
        ("schedule=linear", 40, "train.steps=200 schedule.steps=100", f"goes on at {1e-3 * (1 - 0.9 * 40 / 99):.2e}"),
        (TO_ZERO, 100, "train.steps=200", "rises from 0.00e+00 to 4.97e-04"),
        (f"{TO_ZERO} schedule.steps=100", 100, "train.steps=200 schedule.steps=200", "rises from 0.00e+00 to 4.97e-04"),
        ("schedule=constant", 100, "train.steps=200", None),
    ],
)
def test_the_command_that_trains_on(given: str, step: int, overrides: str, rate: str | None) -> None:
    """If a rate is left out, the command leads to no jump, and tells the effect of the other choice."""
    base = f"train.steps=100 optimizer.lr=1e-3 {given}"
    found, told = train_on(rate_of(base), Progress(step))
    assert found == overrides
    assert told == rate or (told is not None and rate is not None and told.startswith(rate))
    jump = rate_jump(to_dict(load(base.split())), rate_of(f"{base} {found}"), Progress(step))
    assert (jump is not None) == (told is not None and told.startswith("rises"))
