"""Every problem of a config over several fields: what was given, what is expected, how to fix it."""

from __future__ import annotations

from collections.abc import Set
from typing import Any, Protocol

from ttrain.config.checks import device, parallel, tasks, training  # noqa: F401 - they fill the table
from ttrain.config.checks.check import CHECKS
from ttrain.config.schema import Config


class BuiltData(Protocol):
    """What the checks after building the data look at."""

    vocabulary: int | None


def cross_field_problems(config: Config, bad_sections: Set[str] = frozenset()) -> list[str]:
    """Every problem that needs no data, in the order of declaration."""
    return [
        problem
        for sections, run in CHECKS
        if bad_sections.isdisjoint(sections)
        for problem in run(*(getattr(config, section) for section in sections))
    ]


def data_problems(data: BuiltData, name: str, model: Any, lengths: list[int]) -> list[str]:
    """Every problem that only shows once the data is built and before a device is touched."""
    found: list[str] = []
    if lengths and not hasattr(data, "at"):
        found.append(
            f"train.length_schedule={lengths}: data={name} can't change the length of its sequences. Leave it empty."
        )
    vocabulary = getattr(model, "vocabulary", None)
    if vocabulary is not None and data.vocabulary is not None and vocabulary < data.vocabulary:
        larger = f"Give model.vocabulary={data.vocabulary} or more, or null to take the tokenizer's."
        added = getattr(data, "description", {}).get("end_token", {})
        if getattr(model, "from_", None) is None:
            advice = larger
        elif added.get("added") and data.vocabulary == vocabulary + 1:
            advice = (
                f"One of them, {added['text']}, is added to end a document, because the tokenizer has no token known "
                "for that. Name one of its own: data.end_token=<token>."
            )
        else:
            advice = "Give the tokenizer of model.from."
        found.append(f"model.vocabulary={vocabulary}: the tokenizer has {data.vocabulary} ids. {advice}")
    return found
