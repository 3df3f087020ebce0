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


@dataclass
class DistillationConfig(ObjectiveConfig):
    """A teacher's distribution of the next token is learned."""

    name: str = option("distillation", "registered name of the objective")
    teacher: str | None = option(None, "folder of Transformers, hub name, run or checkpoint of the teacher", path=True)
    teacher_hash: str | None = option(None, "SHA-256 of the teacher's weights; a run notes it, null takes any")
    beta: float = option(
        0.5,
        "divergence: 0 is KL(teacher || student), 1 is KL(student || teacher), between them is the generalised "
        "Jensen-Shannon divergence of GKD",
        minimum=0,
        maximum=1,
    )
    temperature: float = option(1.0, "what divides the scores of both models in the divergence", above=0)
    cross_entropy: float = option(0.0, "share of the cross-entropy of the data in the loss", minimum=0, below=1)

    @rule
    def _has_teacher(self, others: Any) -> Iterator[str]:
        if self.teacher is None:
            yield "objective.teacher=null: there is nobody to learn from. Give a folder, a run or a checkpoint."
        if others.model.name not in ("gpt", "llama") and not others.source.awaits_model(others.resume):
            yield f"objective=distillation: model={others.model.name} is no plain decoder. Give model=llama or gpt."
