"""The learning rate of a run that goes on: whether it jumps at a resume, and how to train on without a jump."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ttrain.config.build import build_schedule
from ttrain.config.validate import section_type
from ttrain.optim.settings import ScheduleConfig
from ttrain.train.checkpoint.progress import Progress

_SAME = 0.1  # a change by less than this share of the larger rate is none that anyone has to be told of


@dataclass(frozen=True)
class Rate:
    """The learning rate over the steps of a run."""

    peak: float
    schedule: ScheduleConfig
    steps: int

    @property
    def end(self) -> int:
        """The step at which the schedule ends."""
        return self.schedule.steps or self.steps

    def at(self, step: int) -> float:
        """The peak times the schedule at a step, counted from 1."""
        return self.peak * build_schedule(self.schedule, self.steps)(step)


def rate_jump(saved: Mapping[str, Any], rate: Rate, progress: Progress) -> str | None:
    """A sentence where a resumed run's rate is far from what it was and from what it would have become, else None.

    `saved` is the config of the checkpoint, as plain nested dicts.
    """
    step = progress.step
    if step == 0 or step >= rate.steps:
        return None
    kind = section_type("schedule", saved["schedule"]["name"])
    schedule = rate.schedule if kind is None else kind(**saved["schedule"])  # one that is not registered any more
    before = Rate(saved["optimizer"]["lr"], schedule, saved["train"]["steps"])
    last, planned, new = before.at(step), before.at(step + 1), rate.at(step + 1)
    if _close(new, last) or _close(new, planned):
        return None
    end, old_end = rate.end, before.end
    why = f", as the schedule now ends at step {end} instead of {old_end}; schedule.steps={old_end} keeps its end"
    return (
        f"the learning rate goes from {last * progress.lr_factor:.2e} at step {step} to "
        f"{new * progress.lr_factor:.2e} at step {step + 1}{why if end != old_end else ''}."
    )


def train_on(rate: Rate, progress: Progress) -> tuple[str, str | None]:
    """Overrides of a command that trains for as long again, and what the learning rate does then, where it depends.

    The schedule keeps its end, so that the rate goes on where it is; where that is 0, it is stretched.
    """
    step, schedule = progress.step, rate.schedule
    more = 2 * max(rate.steps, step)
    kept = rate.at(step + 1)
    stretched = replace(rate, schedule=replace(schedule, steps=more)).at(step + 1)
    overrides = f"train.steps={more}"
    if _close(kept, stretched):
        return overrides, None
    factor, fixed = progress.lr_factor, schedule.steps is not None
    if kept > 0:
        return overrides + ("" if fixed else f" schedule.steps={rate.end}"), (
            f"goes on at {kept * factor:.2e}; with schedule.steps={more} it would begin at {stretched * factor:.2e}"
        )
    return overrides + (f" schedule.steps={more}" if fixed else ""), (
        f"rises from {rate.at(step) * factor:.2e} to {stretched * factor:.2e}, as the schedule then ends at step {more}"
    )


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= _SAME * max(one, other)
