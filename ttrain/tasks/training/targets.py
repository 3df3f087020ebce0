"""Rows without a single target: nothing is learnt of such a row, and no loss can be measured on it."""

from __future__ import annotations

from typing import Any, Literal

from ttrain.config.schema import Config
from ttrain.core.errors import DataError
from ttrain.data.batches import Dataset, TokenDataset
from ttrain.data.settings import DataConfig, DocumentsConfig
from ttrain.models.base import valid_targets
from ttrain.train.steps.phases import PhaseSchedule

_ROWS, _TOKENS = 4096, 1 << 20  # at most that are looked at,
_MORE = 16  # and times as many where none of these has a target


def empty_rows(dataset: Dataset, split: Literal["train", "val"], seed: int, rows: int) -> tuple[int, int]:
    """Look at the first `rows` samples of a split, or at as many of them as take about a second.

    More are looked at where none of those has a target. Return how many were, and how many of them have none.
    """
    length = max(dataset.fields["targets"].size, 1)
    at_once = max(1, min(64, _TOKENS // length))
    most, done, empty = max(at_once, min(_ROWS, _TOKENS // length)), 0, 0
    while done < min(rows, most if done > empty else _MORE * most):
        count = min(at_once, rows - done)
        batch = dataset.batch(split, seed, done, count)
        empty += sum(not valid_targets({"targets": row}) for row in batch["targets"])
        done += count
    return done, empty


def check_targets(dataset: Dataset, config: Config, schedule: PhaseSchedule) -> list[str]:
    """Return what to tell of rows without a target. Raises DataError where no row that a run reads has one."""
    if isinstance(dataset, TokenDataset) or dataset.fields["targets"].dtype.is_floating:  # all have targets
        return []
    found, data, train, seed = [], config.data, config.train, config.run.seed
    samples = schedule.read(0, train.steps).samples
    for length in dict.fromkeys(phase.length for phase in schedule.phases):
        shorter: Any = dataset.at(length, 0, 0) if train.length_schedule else dataset  # type: ignore[attr-defined]
        look = empty_rows(shorter, "train", seed, samples)
        of = f"training sequences of {length} tokens" if train.length_schedule else "training sequences"
        found += _told(look, samples, of, "nothing is learnt of them", data)
    held_out = min(dataset.val_samples, train.eval_sequences or dataset.val_samples)
    more = ", or give a larger " + ("data.held_out" if held_out == dataset.val_samples else "train.eval_sequences")
    look = empty_rows(dataset, "val", seed, held_out)
    return [*found, *_told(look, held_out, "held-out sequences", "val/loss says nothing of them", data, more)]


def _told(look: tuple[int, int], samples: int, of: str, so: str, data: DataConfig, more: str = "") -> list[str]:
    rows, empty = look
    if not empty:
        return []
    why, fix = _reason(data)
    first = "" if rows == samples else "first "
    if empty < rows:
        count = f"{empty:,} of the {first}{rows:,} {of} that are read"
        return [f"{count} have no target, so {so}: {why}. To mend it, {fix}."]
    raise DataError(
        f"none of the {first}{rows:,} {of} that are read has a target, so there would be no loss: {why}. "
        f"To go on, {fix}{more}."
    )


def _reason(data: DataConfig) -> tuple[str, str]:
    """Return why a row has no target, and what helps."""
    if isinstance(data, DocumentsConfig) and data.loss_on == "replies":
        whole = "" if data.long_documents == "skip" else ", or leave longer documents out with data.long_documents=skip"
        return "no part of a reply lies in them (data.loss_on=replies)", f"give a larger model.context{whole}"
    if isinstance(data, DocumentsConfig) and data.attention == "document":
        return (
            "each of their documents has one token (data.attention=document)",
            "leave such documents out, or give data.attention=sequence",
        )
    return f"data={data.name} gives no target of zero or more", "look at the targets of its batches"
