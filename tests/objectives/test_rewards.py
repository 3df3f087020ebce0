"""Rewards: what each gives, and what is said of one that can't be used."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ttrain.core.errors import ConfigError
from ttrain.objectives import rewards
from ttrain.objectives.rewards import BadReward, register, rewards_of


@pytest.mark.parametrize(
    ("name", "answer", "completion", "reward"),
    [
        ("exact", "122", " 122\n", 1), ("exact", 122, "122", 1), ("exact", "122", "1220", 0), ("exact", "122", "", 0),
        ("contains", "cat", "a cat.", 1), ("contains", "cat", "a dog", 0),
        ("number", "1250", "so it is 1,250.0", 1), ("number", "#### -3", "first 4, then -3.", 1),
        ("number", "3", "three", 0), ("number", "3", "3 or 4", 0),
        ("length", None, "four", -4), ("json", None, '{"a": [1]}', 1), ("json", None, "{a: 1}", 0),
        ("json", None, "[" * 100_000, 0),
    ],
)  # fmt: skip
def test_rewards(name: str, answer: Any, completion: str, reward: float) -> None:
    assert rewards_of([name], {"answer": answer}, completion) == [reward]


def test_several_are_given_in_their_order() -> None:
    assert rewards_of(["length", "exact"], {"answer": "7"}, "7") == [-1, 1]


def test_a_reward_can_not_change_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rewards.REWARDS, "takes", lambda row, completion: float(row.pop("answer")))
    assert rewards_of(["takes", "exact"], {"answer": "7"}, "7") == [7, 1]


def raises(row: Any, completion: str) -> float:
    return 1 / len(completion)


@pytest.mark.parametrize(
    ("reward", "told"),
    [
        (raises, "reward mine raised ZeroDivisionError: division by zero"),
        (lambda row, text: math.nan, "reward mine is nan for '', not a finite number"),
        (lambda row, text: -math.inf, "reward mine is -inf for '', not a finite number"),
        (lambda row, text: "good", "reward mine raised ValueError: could not convert string to float: 'good'"),
        (
            lambda row, text: None,
            "reward mine raised TypeError: float() argument must be a string or a real number, not 'NoneType'",
        ),
    ],
)
def test_a_bad_reward_is_named(monkeypatch: pytest.MonkeyPatch, reward: Any, told: str) -> None:
    monkeypatch.setitem(rewards.REWARDS, "mine", reward)
    with pytest.raises(BadReward) as error:
        rewards_of(["mine"], {}, "")
    assert str(error.value) == told


def test_rows_without_an_answer_are_told() -> None:
    with pytest.raises(BadReward, match="reward exact raised ValueError: the row's 'answer' is None, not a text or"):
        rewards_of(["exact"], {"prompt": "1+1="}, "2")
    with pytest.raises(BadReward, match=r"'answer' is \['2'\], not a text or a number"):
        rewards_of(["exact"], {"answer": ["2"]}, "2")
    with pytest.raises(BadReward, match="the row's answer 'none' has no number"):
        rewards_of(["number"], {"answer": "none"}, "2")


def test_a_name_is_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards, "REWARDS", dict(rewards.REWARDS))
    register("mine", raises)
    register("mine", raises)
    with pytest.raises(ConfigError, match="reward mine: is registered twice"):
        register("mine", len)
