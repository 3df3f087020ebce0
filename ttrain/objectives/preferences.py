"""Preferences: pairs of completions of a prompt, a chosen and a rejected one, or completions with a label.

DPO (Rafailov et al., 2023; with label_smoothing the robust one of Chowdhury et al., 2024), IPO (Azar et al., 2023) and
KTO (Ethayarajh et al., 2024) measure completions against a reference, which is the model as it was before training;
ORPO (Hong et al., 2024) and SimPO (Meng et al., 2024) have none. Losses and metrics are those of TRL 1.16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from operator import eq
from typing import Any, ClassVar

import numpy as np

from ttrain import ops
from ttrain.core.spec import DType, TensorSpec
from ttrain.data.batches import Baseline, Batch, unigram_entropy
from ttrain.data.examples import ROW, ExampleDataset, RowEncoder
from ttrain.graph import Graph, Value
from ttrain.models.base import LOSS_WEIGHT, SCALAR, TOKENS
from ttrain.nn.lora import starts_bare, without_adapters
from ttrain.objectives.base import RowObjective
from ttrain.objectives.settings import DPOConfig, KTOConfig, PairsConfig, SimPOConfig

REFERENCE = "reference"  # field fp32 [rows, 2]: log-probabilities of both texts of a row by the reference
SIDES = "chosen", "rejected"
NLL = "nll_loss"  # ORPO's metric, with a weight of its own: one over the tokens of chosen texts
KL = "kl"  # step input and metric of KTO, fp32 []: the estimate of the divergence
OTHER: Any = 0  # key of KTO's rows, of which JSON has texts alone: the row whose completion is borrowed
Terms = tuple[Value, Value, Value, dict[str, Value]]


class Preference(RowObjective):
    """The base: rows of two texts, each a prompt with a completion."""

    config: PairsConfig
    referenced: ClassVar[bool] = False

    def fields(self, model: Any, rows: int) -> dict[str, TensorSpec]:
        """`tokens` and `targets` int64 [rows, 2, length]; `lengths` [rows, 2] counts the targets of each text."""
        ids, each = TensorSpec((rows, 2, model.length), DType.INT64), TensorSpec((rows, 2))
        found = {"tokens": ids, "targets": ids, "lengths": each}
        return {**found, REFERENCE: each} if self.reads_reference(model) else found

    def reads_reference(self, model: Any) -> bool:
        """Return whether batches have the reference's log-probabilities.

        With new adapters a step computes them itself, without the adapters.
        """
        return self.referenced and not starts_bare(model)

    def derive(self, fields: Batch) -> dict[str, int]:
        """Add `lengths`. Targets count as tokens."""
        fields["lengths"] = lengths = (fields["targets"] >= 0).sum(-1)
        if ROW in fields:
            fields.setdefault(REFERENCE, 0.0 * lengths)  # for a step that is only timed
        return {LOSS_WEIGHT: int(lengths.all(-1).sum()), TOKENS: int(lengths.sum())}

    def log_probs(self, model: Any, tokens: Value, targets: Value, training: bool) -> Value:
        """Return log-probabilities of the targets, 0 where there is none: int64 [..., length] both -> fp32."""
        count, length = tokens.spec.size // tokens.shape[-1], tokens.shape[-1]
        hidden = model.hidden(tokens.graph, count, training, tokens=ops.reshape(tokens, (count, length)))
        with tokens.graph.scope("loss"):
            (found,) = model.log_probs(hidden, ops.reshape(targets, (count * length,)))
            return ops.reshape(found, tokens.shape)

    def sums(self, model: Any, given: Mapping[str, Value], training: bool, at: int | None = None) -> Value:
        """Return log-probabilities of both texts, fp32 [rows, 2], or of one, [rows]."""
        found = self.log_probs(model, part(given["tokens"], at), part(given["targets"], at), training)
        return ops.reduce_sum(found, [found.spec.rank - 1])

    def compared(self, model: Any, given: Any, training: bool, at: int | None = None) -> tuple[Value, Value]:
        """Return log-probabilities as `sums` does, and their differences from the reference's, if there is one."""
        sums = self.sums(model, given, training, at)
        if not self.referenced:
            return sums, sums
        with without_adapters(model):
            read = REFERENCE in given
            return sums, sums - (part(given[REFERENCE], at) if read else self.sums(model, given, False, at))

    def reference(self, model: Any, graph: Graph, rows: int) -> dict[str, Value]:
        return {REFERENCE: self.sums(model, self.given(model, graph, rows), training=False)}


class Pairs(Preference):
    """Rows have `prompt`, `chosen` and `rejected`, or the latter two with a common start.

    `terms` takes log-probabilities and ratios [rows, 2] of texts of so many targets. It returns losses [rows], rewards
    and log-probabilities [rows, 2], and further metrics [rows] by name.
    """

    terms: Callable[..., Terms]

    def encode(self, row: Mapping[str, Any], encoder: RowEncoder) -> Batch:
        """Return `tokens` and `targets` int64 [2, context] of a row. Raises ValueError for a bad one."""
        prompt, *both = row.get("prompt"), *(required(row, side) for side in SIDES)
        if prompt is None and all(isinstance(each, str | list) for each in both):
            start = len([*takewhile(bool, map(eq, *both))])
            start -= isinstance(both[0], str) and both[0][:start].endswith(" ")
            prompt, *both = both[0][:start], *(text[start:] for text in both)
        found = _stacked([encoder.fit(*encoder.continued(prompt, completion)) for completion in both])
        if np.array_equal(*found["targets"]):
            raise ValueError("its chosen and rejected completions are equal")
        return found

    def loss(self, model: Any, graph: Graph, rows: int, training: bool) -> tuple[Value, dict[str, Value]]:
        """Return the mean loss of a pair, and the metrics of TRL."""
        given = self.given(model, graph, rows)
        return self.averaged(*self.compared(model, given, training), given["lengths"])

    def averaged(self, sums: Value, ratios: Value, lengths: Value) -> tuple[Value, dict[str, Value]]:
        """Return loss and metrics from log-probabilities and ratios [rows, 2] of texts of so many targets."""
        with sums.graph.scope("loss"):
            losses, rewards, log_probs, metrics = self.terms(sums, ratios, ops.at_least(lengths, 1.0))
            for at, side in enumerate(SIDES):
                metrics |= {f"rewards/{side}": part(rewards, at), f"logps/{side}": part(log_probs, at)}
            metrics |= {"rewards/margins": (margins := difference(rewards)), "rewards/accuracies": positive(margins)}
            weights = positive(part(lengths, 0)) * sums.graph.input(LOSS_WEIGHT, SCALAR)
            metrics = {name: ops.reduce_sum(value * weights, [0]) for name, value in metrics.items()}
            return ops.reduce_sum(losses * weights, [0]), metrics


class DPO(Pairs):
    """loss = -ln sigmoid(beta d) for the difference d of both log-ratios to the reference, without smoothing."""

    config: DPOConfig
    referenced = True

    def terms(self, sums: Value, ratios: Value, lengths: Value) -> Terms:
        rewards, smoothing = ratios * self.config.beta, self.config.label_smoothing
        margins = difference(rewards)
        losses = ops.log_sigmoid(-margins) * smoothing - ops.log_sigmoid(margins) * (1 - smoothing)
        return losses * (1 / (1 - 2 * smoothing)), rewards, sums, {}

    def baseline(self, dataset: ExampleDataset) -> Baseline:
        """Return the loss of the reference itself."""
        return Baseline("the reference", math.log(2))


class IPO(Pairs):
    """loss = (d - 1 / (2 beta))^2 for the difference d of both log-ratios to the reference, per token."""

    referenced = True

    def terms(self, sums: Value, ratios: Value, lengths: Value) -> Terms:
        apart = difference(ratios / lengths) - 1 / (2 * self.config.beta)
        return apart * apart, ratios * self.config.beta, sums, {}

    def baseline(self, dataset: ExampleDataset) -> Baseline:
        """Return the loss of the reference itself."""
        return Baseline("the reference", 1 / (2 * self.config.beta) ** 2)


class SimPO(Pairs):
    """loss = -ln sigmoid(beta d - gamma) for the difference d of both log-probabilities per token."""

    config: SimPOConfig

    def terms(self, sums: Value, ratios: Value, lengths: Value) -> Terms:
        rewards = sums / lengths * self.config.beta
        return -ops.log_sigmoid(difference(rewards) - self.config.simpo_gamma), rewards, sums / lengths, {}

    def baseline(self, dataset: ExampleDataset) -> Baseline:
        """Return the loss where both completions are as likely."""
        return Baseline("no preference", math.log1p(math.exp(self.config.simpo_gamma)))


class ORPO(Pairs):
    """loss = cross-entropy of the chosen text, prompt included, - beta ln sigmoid(log of the odds ratio)."""

    def fields(self, model: Any, rows: int) -> dict[str, TensorSpec]:
        """Pairs' fields with all tokens of the texts as targets, and `completions` fp32, 1 for those of completions."""
        found = super().fields(model, rows)
        return {**found, "completions": found["targets"].with_dtype(DType.FP32)}

    def derive(self, fields: Batch) -> dict[str, int]:
        counts, targets, following = super().derive(fields), fields["targets"], np.roll(fields["tokens"], -1, -1)
        last = (targets >= 0) * np.arange(targets.shape[-1])
        prompts = (targets < 0) & (np.arange(targets.shape[-1]) < last.max(-1, keepdims=True))
        fields |= {"completions": targets >= 0, "targets": np.where(prompts, following, targets)}
        return {**counts, f"{NLL}_weight": int((fields["targets"][:, 0] >= 0).sum())}

    def loss(self, model: Any, graph: Graph, rows: int, training: bool) -> tuple[Value, dict[str, Value]]:
        given = self.given(model, graph, rows)
        found = self.log_probs(model, given["tokens"], given["targets"], training)
        sums = ops.reduce_sum(found * given["completions"], [2])
        loss, metrics = self.averaged(sums, sums, given["lengths"])
        entropy = ops.reduce_sum(part(found, 0), [0, 1]) * -graph.input(f"{NLL}_weight", SCALAR)
        return loss + entropy, {**metrics, NLL: entropy}

    def terms(self, sums: Value, ratios: Value, lengths: Value) -> Terms:
        each, beta = sums / lengths, self.config.beta
        odds = difference(each - ops.log(ops.at_least(-ops.expm1(each), 1e-30)))
        ratio = ops.log_sigmoid(odds)
        return ratio * -beta, each * beta, each, {"log_odds_ratio": ratio, "log_odds_chosen": odds}

    def baseline(self, dataset: ExampleDataset) -> Baseline:
        """Return the unigram entropy of the chosen completions, plus the other term where both are as likely."""
        batch, ids = dataset.batch("val", 0, 0, dataset.val_samples), dataset.vocabulary or 0
        entropy = unigram_entropy([batch["targets"][:, 0]], ids)
        return Baseline("unigram entropy, no preference", entropy + self.config.beta * math.log(2))


class KTO(Preference):
    """loss = the mean of w (1 - sigmoid(beta s (ratio - kl))), s being 1 for wanted completions, else -1.

    Rows have `prompt`, `completion` and `label`. kl is the mean ratio, over a slice, of prompts with completions that
    do not belong to them. A row borrows that of the row before it in its split, so that the reference's ratios can be
    computed once.
    """

    config: KTOConfig
    referenced = True

    def fields(self, model: Any, rows: int) -> dict[str, TensorSpec]:
        """The second text has the borrowed completion; `label` fp32 [rows] is 0 or 1."""
        return {**super().fields(model, rows), "label": TensorSpec((rows,))}

    def arranged(self, rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return the rows of a split, each with the one before it."""
        return [{**row, OTHER: rows[number - 1]} for number, row in enumerate(rows)]

    def encode(self, row: Mapping[str, Any], encoder: RowEncoder) -> Batch:
        """Return the fields of a row. Raises ValueError for a bad one."""
        label, other = required(row, "label"), row.get(OTHER, row)
        if not isinstance(label, bool):
            raise ValueError(f"its label is {label!r}, not true or false")
        prompt, completion = encoder.continued(required(row, "prompt"), required(row, "completion"))
        _, borrowed = encoder.continued(other["prompt"], other["completion"])
        texts = completion, borrowed[: max(encoder.context + 1 - len(prompt), 1)]
        return {**_stacked([encoder.fit(prompt, text) for text in texts]), "label": np.array(label, np.int64)}

    def derive(self, fields: Batch) -> dict[str, int]:
        super().derive(fields)
        lengths, label = fields["lengths"][:, 0], fields["label"]
        sides = {f"{side}_{LOSS_WEIGHT}": int((lengths[label == at] > 0).sum()) for at, side in enumerate(SIDES[::-1])}
        return {**sides, LOSS_WEIGHT: sum(sides.values()), TOKENS: int(lengths.sum())}

    def loss(self, model: Any, graph: Graph, rows: int, training: bool) -> tuple[Value, dict[str, Value]]:
        given, config, metrics = self.given(model, graph, rows), self.config, dict[str, Value]()
        sums, ratios = self.compared(model, given, training, 0)
        with graph.scope("loss"):
            label, kl = given["label"], graph.input(KL, SCALAR)
            weights = label * config.desirable_weight + (1.0 - label) * config.undesirable_weight
            losses = weights * (1.0 - ops.sigmoid((label * 2.0 - 1.0) * (ratios - kl) * config.beta))
            valid = positive(part(given["lengths"], 0))
            for side, mine in zip(SIDES, (label, 1.0 - label), strict=True):
                mine = mine * valid * graph.input(f"{side}_{LOSS_WEIGHT}", SCALAR)
                metrics[f"rewards/{side}"] = ops.reduce_sum(mine * ratios, [0]) * config.beta
                metrics[f"logps/{side}"] = ops.reduce_sum(mine * sums, [0])
            metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
            valid = valid * graph.input(LOSS_WEIGHT, SCALAR)
            return ops.reduce_sum(losses * valid, [0]), {**metrics, KL: kl * ops.reduce_sum(valid, [0])}

    def probe(self, model: Any, graph: Graph, rows: int) -> dict[str, Value]:
        """Return log-ratios of the borrowed completions, and `valid`, 1 for rows that count, else 0, each [rows]."""
        given = self.given(model, graph, rows)
        valid = positive(part(given["lengths"], 0))
        return {"ratios": self.compared(model, given, False, 1)[1] * valid, "valid": valid}

    def coupled(self, outputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the estimate of the divergence, which can't be below 0."""
        return {KL: max(float(outputs["ratios"].sum() / max(outputs["valid"].sum(), 1.0)), 0.0)}

    def baseline(self, dataset: ExampleDataset) -> Baseline:
        """Return the loss of the reference itself."""
        weights = self.config.undesirable_weight, self.config.desirable_weight
        return Baseline("the reference", float(np.mean([weights[row["label"]] for row in dataset.rows["val"]])) / 2)


def required(row: Mapping[str, Any], key: str) -> Any:
    """Return a value of a row. Raises ValueError where it has none."""
    if row.get(key) is None:
        raise ValueError(f"has no {key!r}")
    return row[key]


def part(x: Value, at: int | None) -> Value:
    """The texts of number `at` in each row, x [rows, 2, ...] -> [rows, ...], or None for all."""
    if at is None:
        return x
    rows, texts, *others = x.shape
    flat = ops.reshape(x, (rows, texts, x.spec.size // (rows * texts)))
    return ops.reshape(ops.index_select(flat, (at,)), (rows, *others))


def difference(pairs: Value) -> Value:
    """Values of chosen texts minus those of rejected ones: [rows, 2] -> [rows]."""
    return part(pairs, 0) - part(pairs, 1)


def positive(x: Value) -> Value:
    """Return 1 where x > 0, else 0."""
    return ops.greater(x, ops.full(x.graph, x.spec, 0.0))


def _stacked(texts: Sequence[tuple[Any, Any]]) -> Batch:
    return {name: np.stack(each) for name, each in zip(("tokens", "targets"), zip(*texts, strict=True), strict=True)}
