"""The learning rate of a run that goes on: whether it jumps at a resume, and how to train on without a jump."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ttrain.config.build import build_schedule
from ttrain.config.schema import Config
from ttrain.config.validate import section_type
from ttrain.train.checkpoint.progress import Progress

_SAME = 0.1  # a change by less than this share of the larger rate is none that anyone has to be told of


def rate_jump(saved: Mapping[str, Any], config: Config, progress: Progress) -> str | None:
    """A sentence where a resumed run's rate is far from what it was and from what it would have become, else None.

    `saved` is the config of the checkpoint, as plain nested dicts.
    """
    step = progress.step
    if step == 0 or step >= config.train.steps:
        return None
    before = _as_saved(saved, config)
    last, planned, new = (_rate(before, step), _rate(before, step + 1), _rate(config, step + 1))
    if _close(new, last) or _close(new, planned):
        return None
    end, old_end = _end(config), _end(before)
    why = f", as the schedule now ends at step {end} instead of {old_end}; schedule.steps={old_end} keeps its end"
    return (
        f"the learning rate goes from {last * progress.lr_factor:.2e} at step {step} to "
        f"{new * progress.lr_factor:.2e} at step {step + 1}{why if end != old_end else ''}."
    )


def train_on(config: Config, progress: Progress) -> tuple[str, str | None]:
    """Words of a command that trains for as long again, and what the learning rate does then, where it depends.

    The schedule keeps its end, so that the rate goes on where it is; where that is 0, it is stretched.
    """
    step, schedule = progress.step, config.schedule
    more = 2 * max(config.train.steps, step)
    kept = _rate(config, step + 1)
    stretched = _rate(replace(config, schedule=replace(schedule, steps=more)), step + 1)
    words = f"train.steps={more}"
    if _close(kept, stretched):
        return words, None
    factor, fixed = progress.lr_factor, schedule.steps is not None
    if kept > 0:
        return words + ("" if fixed else f" schedule.steps={_end(config)}"), (
            f"goes on at {kept * factor:.2e}; with schedule.steps={more} it would begin at {stretched * factor:.2e}"
        )
    return words + (f" schedule.steps={more}" if fixed else ""), (
        f"rises from {_rate(config, step) * factor:.2e} to {stretched * factor:.2e}, as the schedule then ends at step "
        f"{more}"
    )


def _as_saved(saved: Mapping[str, Any], config: Config) -> Config:
    """The config with the learning rate and the schedule of a saved one."""
    schedule, kind = saved["schedule"], section_type("schedule", saved["schedule"]["name"])
    return replace(
        config,
        schedule=config.schedule if kind is None else kind(**schedule),
        train=replace(config.train, steps=saved["train"]["steps"]),
        optimizer=replace(config.optimizer, lr=saved["optimizer"]["lr"]),
    )


def _end(config: Config) -> int:
    return config.schedule.steps or config.train.steps


def _rate(config: Config, step: int) -> float:
    """optimizer.lr times the schedule at a step, counted from 1."""
    return config.optimizer.lr * build_schedule(config.schedule, config.train.steps)(step)


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= _SAME * max(one, other)
