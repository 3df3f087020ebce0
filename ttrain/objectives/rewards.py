"""Rewards of completions, by name: functions of a row and of the text after its prompt.

A module that the command line names by plugins=[module] adds its own with `register`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ttrain.core.errors import ConfigError, UserError

Row = Mapping[str, Any]
_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")


def _answer(row: Row) -> str:
    answer = row.get("answer")
    if not isinstance(answer, str | int | float):
        raise ValueError(f"the row's 'answer' is {answer!r}, not a text or a number")
    return str(answer).strip()


def exact(row: Row, completion: str) -> float:
    """1 where the completion is the row's `answer`, space around both aside; else 0."""
    return float(completion.strip() == _answer(row))


def contains(row: Row, completion: str) -> float:
    """1 where the row's `answer` is in the completion, else 0."""
    return float(_answer(row) in completion)


def number(row: Row, completion: str) -> float:
    """1 where the last numbers of completion and `answer` are equal, such as 1,250.0 and 1250; else 0."""
    found, wanted = (_NUMBER.findall(text) for text in (completion, _answer(row)))
    if not wanted:
        raise ValueError(f"the row's answer {row['answer']!r} has no number")
    return float(bool(found) and float(found[-1].replace(",", "")) == float(wanted[-1].replace(",", "")))


def length(row: Row, completion: str) -> float:
    """Minus the number of characters. With a small weight it prefers the shorter one of two right completions."""
    return -float(len(completion))


def valid_json(row: Row, completion: str) -> float:
    """1 where the completion is JSON, else 0."""
    try:
        json.loads(completion)
    except (ValueError, RecursionError):
        return 0.0
    return 1.0


REWARDS = {"exact": exact, "contains": contains, "number": number, "length": length, "json": valid_json}


def register(name: str, reward: Any) -> None:
    """Add a reward, a function of a row and a completion that returns a number. Raises ConfigError for a taken name."""
    if REWARDS.setdefault(name, reward) is not reward:
        raise ConfigError(f"reward {name}: is registered twice. Give one of the two another name.")


class BadReward(UserError):
    """A reward that raises, or that is no finite number."""


def rewards_of(names: Sequence[str], row: Row, completion: str) -> list[float]:
    """Return the rewards of a completion in the order of their names. Raises BadReward that names the reward."""
    found = list[float]()
    for name in names:
        try:
            found.append(float(REWARDS[name]({**row}, completion)))  # a copy, lest the row changes
        except Exception as error:  # a plugin's function may raise anything
            raise BadReward(f"reward {name} raised {type(error).__name__}: {error}") from error
        if not math.isfinite(found[-1]):
            raise BadReward(f"reward {name} is {found[-1]} for {completion!r}, not a finite number")
    return found
