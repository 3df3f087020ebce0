"""Small config of each objective."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from ttrain.core.names import did_you_mean
from ttrain.core.options import option, rule
from ttrain.objectives.rewards import REWARDS


@dataclass
class ObjectiveConfig:
    """Keys of every objective."""

    name: str = option("next_token", "registered name of the objective")

    reads_rows: ClassVar[bool] = False  # whether its batches are made of rows, see data/examples.py

    def frozen_source(self, others: Any) -> tuple[str, str] | None:
        """Return the option that names a second, frozen model in the steps, and its value; None where there is none."""
        return None

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
        for key, plain in {"objective": "ar_only", "future_weight": 0.0}.items():
            if getattr(others.model, key, plain) != plain and not others.lora.rank:
                yield f"objective={self.name}: reads no head but that of the next token. Give model.{key}={plain}."


@dataclass
class ClassificationConfig(ObjectiveConfig):
    """A text has one of some labels."""

    reads_rows: ClassVar[bool] = True

    name: str = option("classification", "registered name of the objective")
    classes: list[str] = option([], "names of the labels in the order of the scores; [] takes those of folder or rows")
    class_weights: list[float] = option([], "factors of the losses of classes; [] is 1 for all", above=0)


@dataclass
class EmbeddingConfig(ObjectiveConfig):
    """Texts that belong together get vectors that are near each other."""

    reads_rows: ClassVar[bool] = True

    name: str = option("embedding", "registered name of the objective")
    pooling: str = option("mean", "hidden states that make the vector of a text", choices=("mean", "last"))
    temperature: float = option(0.05, "divisor of the cosines of vectors", above=0)

    @rule
    def _one_slice(self, others: Any) -> Iterator[str]:
        if others.train.batch_schedule:
            yield "train.batch_schedule: objective=embedding compares the rows of batches of one size. Leave it out."


@dataclass
class DistillationConfig(ObjectiveConfig):
    """A teacher's distribution of the next token is learned."""

    name: str = option("distillation", "registered name of the objective")
    teacher: str | None = option(None, "folder of Transformers, GGUF file, hub name, run or checkpoint", path=True)
    frozen_hash: str | None = option(None, "SHA-256 of the teacher's weights; a run notes it, null takes any")
    top_k: int | None = option(
        None, "likeliest tokens of each distribution that task=prepare stores; null stores none", minimum=1
    )
    beta: float = option(
        0.5, "0 is KL(teacher || student), 1 the reverse, between them is GKD's divergence", minimum=0, maximum=1
    )
    temperature: float = option(1.0, "divisor of the logits of both models in the divergence", above=0)
    cross_entropy: float = option(0.0, "share of the cross-entropy of the data in the loss", minimum=0, below=1)

    def frozen_source(self, others: Any) -> tuple[str, str] | None:
        return None if self.teacher is None else ("objective.teacher", self.teacher)

    @rule
    def _has_teacher(self, others: Any) -> Iterator[str]:
        stores, key = others.task.name == "prepare", f"objective.top_k={self.top_k}"
        if self.teacher is None and (self.top_k is None or stores):
            yield "objective.teacher=null: there is nobody to learn from. Give a folder, .gguf file, run or checkpoint."
        elif stores and self.top_k is None:
            yield "objective.top_k=null: task=prepare stores a teacher's likeliest tokens. Give how many, such as 64."
        elif self.top_k and not stores and self.teacher is not None:
            yield f"{key}: the teacher's distributions are in data.path. Leave objective.teacher out, or top_k."
        elif self.top_k and not stores and others.data.name != "tokens":
            yield f"{key}: task=prepare stores them. Give data=tokens data.path=<folder of task=prepare>."
        if self.top_k and others.train.length_schedule:
            yield f"train.length_schedule: {key} has sequences of one length. Leave one of the two out."
        if others.source.awaits_model(others.resume):
            return
        if others.model.name not in ("gpt", "llama"):
            yield f"objective=distillation: model={others.model.name} is no plain decoder. Give model=llama or gpt."
        elif others.model.future_weight:
            yield "model.future_weight: objective=distillation teaches the next token alone. Leave it out."


@dataclass
class GRPOConfig(ObjectiveConfig):
    """Group relative policy optimization: completions of each prompt are compared with one another by rewards."""

    reads_rows: ClassVar[bool] = True

    name: str = option("grpo", "registered name of the objective")
    reward: list[str] = option(
        ["exact"], "rewards that are added up: exact, contains, number, length, json, or a plugin's own", one=True
    )
    reward_weights: list[float] = option([], "factor of each reward in the sum; empty is 1 for all")
    num_generations: int = option(8, "completions of each prompt; train.batch_size counts completions", minimum=2)
    num_iterations: int = option(1, "optimizer steps on the same completions", minimum=1)
    max_completion_length: int = option(256, "most tokens of a completion", minimum=1)
    temperature: float = option(1.0, "divisor of the logits, in sampling and in the loss", above=0)
    beta: float = option(0.0, "weight of the KL to the model that training starts from; 0 needs none", minimum=0)
    frozen_hash: str | None = option(None, "SHA-256 of that model's weights; a run notes it, null takes any")
    epsilon: float = option(0.2, "ratios of probabilities are clipped below 1 - epsilon", above=0, below=1)
    epsilon_high: float | None = option(None, "ratios are clipped above 1 + epsilon_high; null is epsilon", above=0)
    loss_type: str = option(
        "dapo",
        "mean over tokens (dapo), completions (grpo), most tokens (dr_grpo)",
        choices=("grpo", "dr_grpo", "dapo"),
    )
    scale_rewards: str = option("group", "deviation that divides advantages", choices=("group", "batch", "none"))
    mask_truncated_completions: bool = option(False, "learn nothing from completions that did not end")

    def frozen_source(self, others: Any) -> tuple[str, str] | None:
        """Return the model that training starts from. With LoRA it is the trained one without its adapters."""
        named = {"model.from": getattr(others.model, "from_", None), "train.init_from": others.train.init_from}
        found = [(key, value) for key, value in named.items() if value is not None]
        return found[0] if found and self.beta and not others.lora.rank else None

    @rule
    def _has_rewards(self, others: Any) -> Iterator[str]:
        for name in (name for name in self.reward if name not in REWARDS):
            yield f"objective.reward={name}: not registered. {did_you_mean(name, REWARDS)}"
        if not self.reward or len(self.reward_weights) not in (0, len(self.reward)):
            yield f"objective.reward={self.reward}: give one or more, and one of reward_weights for each, or none."

    @rule
    def _writes_completions(self, others: Any) -> Iterator[str]:
        train, count, most = others.train, self.num_generations, self.max_completion_length
        if others.source.awaits_config(others.resume):
            return
        if train.batch_size % count:
            yield f"train.batch_size={train.batch_size}: give a multiple of objective.num_generations={count}."
        if most >= (context := getattr(others.model, "context", most + 1)):
            yield f"objective.max_completion_length={most}: model.context={context} must hold a prompt too. Give fewer."
        if self.beta and not others.lora.rank and self.frozen_source(others) is None:
            told = "needs a model that training starts from. Give train.init_from, model.from or lora.rank"
            yield f"objective.beta={self.beta:g}: {told}, or objective.beta=0."
        if train.steps is None or train.batch_schedule or others.task.name == "lr_finder":
            yield "objective=grpo: needs task=train, train.steps and one batch size. Leave out what sets others."


@dataclass
class PairsConfig(ObjectiveConfig):
    """Keys of objectives over pairs of completions, named and set as in TRL."""

    reads_rows: ClassVar[bool] = True

    beta: float = option(0.1, "weight of preferences; a larger one keeps the model closer to its reference", above=0)


@dataclass
class DPOConfig(PairsConfig):
    """Direct preference optimization."""

    label_smoothing: float = option(0.0, "share of pairs taken to be the wrong way round", minimum=0, below=0.5)


@dataclass
class SimPOConfig(PairsConfig):
    """Simple preference optimization."""

    simpo_gamma: float = option(0.5, "margin of rewards beyond which a pair teaches less", minimum=0)


@dataclass
class KTOConfig(PairsConfig):
    """Kahneman-Tversky optimization."""

    desirable_weight: float = option(1.0, "weight of completions whose label is true", minimum=0)
    undesirable_weight: float = option(1.0, "weight of completions whose label is false", minimum=0)
