"""Small config of each objective."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from ttrain.core.options import option, rule


@dataclass
class ObjectiveConfig:
    """Keys of every objective."""

    name: str = option("next_token", "registered name of the objective")

    reads_rows: ClassVar[bool] = False  # whether its batches are made of rows, see data/examples.py

    @rule
    def _has_rows(self, others: Any) -> Iterator[str]:
        data, train = others.data, others.train
        if not self.reads_rows or others.source.awaits_model(others.resume):
            return
        if not getattr(data, "has_rows", False):
            yield f"objective={self.name}: learns from rows. Give data=documents data.sources=[<file>.jsonl]."
        elif getattr(data, "weights", ()) or getattr(data, "attention", "sequence") == "document":
            told = "weights of sources and data.attention=document are for next-token prediction"
            yield f"objective={self.name}: {told}. Leave them out."
        if train.length_schedule:
            told = f"objective={self.name} takes rows as they are"
            yield f"train.length_schedule={train.length_schedule}: {told}. Leave it out."
        if others.task.name == "prepare":
            yield f"objective={self.name}: task=prepare writes texts for next-token prediction. Leave it out."
