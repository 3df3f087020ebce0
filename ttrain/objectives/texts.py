"""Objectives that learn from whole texts, each as one vector: its hidden states, pooled over its tokens."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ttrain import ops
from ttrain.core.errors import ConfigError
from ttrain.core.names import listed
from ttrain.core.spec import DType, TensorSpec
from ttrain.data.batches import Baseline, Batch
from ttrain.data.examples import ExampleDataset, RowEncoder
from ttrain.graph import Graph, Value
from ttrain.models.base import LOSS_WEIGHT, SCALAR
from ttrain.models.decoder import linear
from ttrain.nn.module import Role
from ttrain.objectives.base import RowObjective
from ttrain.objectives.distillation import log_softmax
from ttrain.objectives.preferences import required


class TextObjective(RowObjective):
    """The base: rows of one text or two.

    Fields of a step: `tokens` int64 [rows, texts, length]; `pooling` fp32 [rows, texts, length], the weights of hidden
    states in the vector of a text; `targets` int64 [rows], the class, or below 0 for a row that does not count;
    `weight` fp32 [rows], the factor of its loss; `place` int64 [rows], the number of the row in its slice.

    A text has no end token, because those who use the exported model encode it without one.
    """

    names: tuple[str, ...] = ("text",)  # keys of the texts in a row
    opened_by = "AutoModelForSequenceClassification"  # class of another library that opens the exported folder

    def attach(self, model: Any) -> None:
        """Remove the head that scores tokens, which the loss does not read."""
        model.head, model.future, model.opened_by = None, None, self.opened_by
        model.naming = replace(model.naming, ignored=[*model.naming.ignored, model.naming.tied[0]])
        model.name_parameters()

    def fields(self, model: Any, rows: int) -> dict[str, TensorSpec]:
        texts = TensorSpec((rows, len(self.names), model.length), DType.INT64)
        found = {"tokens": texts, "pooling": texts.with_dtype(DType.FP32), "weight": TensorSpec((rows,), DType.FP32)}
        return found | dict.fromkeys(("targets", "place"), TensorSpec((rows,), DType.INT64))

    def derive(self, fields: Batch) -> dict[str, int]:
        fields["place"] = np.arange(len(fields["targets"])) % math.prod(self.slice)
        return super().derive(fields)

    def encode(self, row: Mapping[str, Any], encoder: RowEncoder) -> Batch:
        """Return the fields of a row but for `place`. Raises ValueError for a bad one."""
        size = len(self.names), encoder.context
        tokens, weights = np.zeros(size, np.int64), np.zeros(size, np.float32)
        for at, name in enumerate(self.names):
            ids = encoder.cut(encoder.text(required(row, name))[:-1], encoder.context)
            tokens[at, : len(ids)] = ids
            first = 0 if getattr(self.config, "pooling", "last") == "mean" else len(ids) - 1
            weights[at, first : len(ids)] = 1 / (len(ids) - first)
        return {"tokens": tokens, "pooling": weights, "targets": np.array(0), "weight": np.ones((), np.float32)}

    def vectors(self, model: Any, graph: Graph, rows: int, training: bool) -> Value:
        """Return the vectors of the texts of these rows, fp32 [rows * texts, width]."""
        given, count = self.given(model, graph, rows), rows * len(self.names)
        tokens = ops.reshape(given["tokens"], (count, model.length))
        hidden = ops.cast(model.hidden(graph, count, training, tokens=tokens), DType.FP32)
        weights = ops.reshape(given["pooling"], (count, model.length, 1))
        return ops.reduce_sum(ops.reshape(hidden, (count, model.length, model.width)) * weights, [1])


class Classification(TextObjective):
    """Rows {"text", "label"}: a head [classes, width] scores the hidden state of the last token, as Transformers does.

    The loss is the mean over texts of the cross-entropy in nats, times the weight of the class. Evaluations report the
    macro F1 of all held-out rows: the mean of 2 true / (predicted + labelled) over the classes that occur, where `true`
    counts the rows of a class that are predicted rightly.
    """

    def labels_of(self, config: Mapping[str, Any]) -> None:
        """Take the classes from the config.json of a model that has a head of classes."""
        told = config.get("id2label") if "Classification" in str(config.get("architectures")) else None
        names = [str(told[key]) for key in sorted(told, key=int)] if isinstance(told, dict) else []
        self.config = replace(self.config, classes=self.config.classes or names)

    def read(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Take the classes from the labels of all rows, where neither the config nor a folder names them."""
        labels = {row["label"] for row in rows if type(row.get("label")) in (int, str)}
        ordered = dict.fromkeys(map(str, sorted(labels, key=lambda label: (isinstance(label, str), label))))
        self.config = replace(self.config, classes=self.config.classes or list(ordered))

    def attach(self, model: Any) -> None:
        """Replace the head for tokens by one for classes.

        Raises ConfigError for fewer than two classes, equal ones, or a wrong number of class_weights.
        """
        names, weights = self.config.classes, self.config.class_weights
        if len({*names}) < max(len(names), 2) or len(weights) not in (0, len(names)):
            told = "give at least two, all different, and as many class_weights or none"
            raise ConfigError(f"objective.classes={names}: {told}.")
        model.classes, numbers = linear(model.width, len(names), False, role=Role.OUTPUT), dict(enumerate(names))
        said = {"id2label": numbers, "label2id": {name: number for number, name in numbers.items()}}
        model.stated = "ForSequenceClassification", said
        super().attach(model)

    def encode(self, row: Mapping[str, Any], encoder: RowEncoder) -> Batch:
        label, names, weights = required(row, "label"), self.config.classes, self.config.class_weights
        if type(label) in (int, str) and str(label) in names:
            label = names.index(str(label))
        elif type(label) is not int or not 0 <= label < len(names):
            raise ValueError(
                f"label {json.dumps(label)} is no class: {listed(names, 20) or 'give texts or whole numbers'}"
            )
        weight = np.array((weights[label : label + 1] or [1])[0], np.float32)
        return {**super().encode(row, encoder), "targets": np.array(label), "weight": weight}

    def baseline(self, dataset: ExampleDataset) -> Baseline:
        """Return the entropy of the held-out labels, in nats."""
        labels = dataset.batch("val", 0, 0, dataset.val_samples)["targets"]
        shares = np.unique(labels, return_counts=True)[1] / len(labels)
        return Baseline("entropy of the labels", -float(shares @ np.log(shares)))

    def loss(self, model: Any, graph: Graph, rows: int, training: bool) -> tuple[Value, dict[str, Value]]:
        """Return the loss and labels/accuracy; in evaluations also the sums of each class that `summary` reads."""
        vectors, given = self.vectors(model, graph, rows, training), self.given(model, graph, rows)
        with graph.scope("loss"):
            scores = ops.cast(model.classes(ops.cast(vectors, model.compute)), DType.FP32)  # [rows, classes]
            hot, weight = ops.one_hot(given["targets"], scores.shape[1], DType.FP32), graph.input(LOSS_WEIGHT, SCALAR)
            logs, counted = ops.reduce_sum(hot * log_softmax(scores), [1]), ops.reduce_sum(hot, [1])
            chosen = (1.0 - ops.greater(ops.amax(scores, -1), scores)) * ops.reshape(counted, (rows, 1))
            found = {"labels/accuracy": ops.reduce_sum(hot * chosen, [0, 1]) * weight}
            # Of each class: rows that are predicted rightly; predicted rows plus labelled ones.
            for what, each in () if training else (("true", hot * chosen), ("total", hot + chosen)):
                sums = ops.reshape(ops.reduce_sum(each, [0]) * weight, (1, scores.shape[1], 1))
                for number in range(scores.shape[1]):
                    found[f"{number}/{what}"] = ops.reshape(ops.index_select(sums, [number]), ())
            return -(ops.reduce_sum(logs * given["weight"], [0]) * weight), found

    def summary(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Replace the sums of classes by labels/f1."""
        kept, classes = dict(metrics), range(len(self.config.classes))
        pairs = [(kept.pop(f"{each}/true"), kept.pop(f"{each}/total")) for each in classes]
        scores = [2 * true / total for true, total in pairs if total]
        return {**kept, "labels/f1": sum(scores) / max(len(scores), 1)}


class Embedding(TextObjective):
    """Rows {"anchor", "positive"}: each anchor has to find its positive among those of all rows of its slice.

    The loss is InfoNCE (van den Oord et al., 2018) in nats, over cosines of vectors divided by a temperature. Where a
    slice has several micro-batches, a probe computes all vectors of the slice, without dropout. Each micro-batch then
    computes its own vectors anew, and the gradient of the slice's loss with respect to them alone. These gradients add
    up to that of the slice (Gao et al., 2021, Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup).
    """

    names = ("anchor", "positive")
    opened_by = "SentenceTransformer"

    @property
    def coupled(self) -> Any:
        """Return a function that adds an identity matrix to the outputs of the probe; see Objective."""
        eye = {"eye": np.eye(math.prod(self.slice), dtype=np.float32)}
        return None if self.slice[0] == 1 else lambda outputs: {**outputs, **eye}

    def attach(self, model: Any) -> None:
        model.pooling, model.stated = self.config.pooling, ("Model", {})
        super().attach(model)

    def baseline(self, dataset: ExampleDataset) -> Baseline:
        """Return the loss of a random choice: the logarithm of the number of positives."""
        return Baseline("a choice at random", math.log(min(math.prod(self.slice), dataset.val_samples)))

    def probe(self, model: Any, graph: Graph, rows: int, training: bool = False) -> dict[str, Value]:
        """Return unit vectors of anchors and positives, `a` and `p` [rows, width], and `valid` [rows], 1 or 0."""
        vectors = self.vectors(model, graph, rows, training)
        lengths = ops.reshape(ops.sqrt(ops.reduce_sum(vectors * vectors, [1])), (2 * rows, 1))
        units = ops.reshape(vectors / lengths, (rows, 2, model.width))
        sides = {side: ops.reshape(ops.index_select(units, [at]), (rows, model.width)) for at, side in enumerate("ap")}
        return {**sides, "valid": ops.valid(self.given(model, graph, rows)["targets"])}

    def loss(self, model: Any, graph: Graph, rows: int, training: bool) -> tuple[Value, dict[str, Value]]:
        """Return the loss, and the shares of rows whose positive is the nearest one, or one of the nearest five."""
        own, weight = self.probe(model, graph, rows, training), graph.input(LOSS_WEIGHT, SCALAR)
        size, place = rows * self.slice[0], self.given(model, graph, rows)["place"]
        if size < 2:
            raise ConfigError("objective=embedding: a slice of one row has no other to tell it from. Give more rows.")
        with graph.scope("loss"):
            eye = ops.one_hot(place, size, DType.FP32)  # [rows, S]
            mine = ops.reduce_sum(eye, [0])
            if self.slice[0] == 1:
                losses, ranks = self._compared(**own, eye=eye)
            else:
                places, wide = eye, TensorSpec((size, model.width))
                old = {side: graph.input(side, wide) for side in "ap"}
                shapes = {"valid": (size,), "eye": (size, size)}
                rest = {name: graph.input(name, TensorSpec(shape)) for name, shape in shapes.items()}
                kept = ops.reshape(1.0 - mine, (size, 1))
                new = {side: old[side] * kept + ops.matmul(places, own[side], transpose_a=True) for side in old}
                losses, ranks = self._compared(**new, **rest)
                before, _ = self._compared(**old, **rest)  # so that the value is the loss of these rows alone
                losses, own = losses - (1.0 - mine) * before, rest
            valid, found = own["valid"], dict[str, Value]()
            for k in (1, 5):
                near = 1.0 - ops.greater(ranks, ops.full(graph, ranks.spec, k - 0.5))
                found[f"retrieval/recall@{k}"] = ops.reduce_sum(near * (mine * valid), [0]) * weight
            return ops.reduce_sum(losses * valid, [0]) * weight, found

    def _compared(self, a: Value, p: Value, valid: Value, eye: Value) -> tuple[Value, Value]:
        """Return the losses [S], and how many positives are nearer to each anchor than its own [S]."""
        absent = ops.reshape((valid - 1.0) * 1e30, (1, valid.shape[0]))
        scores = ops.linear(a, p) * (1 / self.config.temperature) + absent  # [S, S]
        own = ops.reduce_sum(scores * eye, [1])
        losses = -ops.reduce_sum(log_softmax(scores) * eye, [1])
        return losses, ops.reduce_sum(ops.greater(scores, ops.reshape(own, (valid.shape[0], 1))), [1])
