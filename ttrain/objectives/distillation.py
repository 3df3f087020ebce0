"""objective=distillation: a model learns the distributions of a teacher, which reads the same tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any

from ttrain import ops
from ttrain.core.spec import DType, TensorSpec
from ttrain.graph import Case, Graph, Node, Value, cases, composite
from ttrain.models.base import LOSS_WEIGHT, SCALAR
from ttrain.models.cache import POSITIONS
from ttrain.objectives.base import Objective
from ttrain.objectives.settings import DistillationConfig

_AT_ONCE = 1 << 24  # scores of each model that exist at a time


@composite("x [N, V]", outputs=("y",))
def log_softmax(x: Value) -> Value:
    """y = log(softmax(x)) over the last axis."""
    moved = x - ops.amax(x, -1)
    return moved - ops.log(ops.reshape(ops.reduce_sum(ops.exp(moved), [1]), (x.shape[0], 1)))


@log_softmax.gradient
def _(node: Node, dy: Value) -> Sequence[Value]:
    total = ops.reshape(ops.reduce_sum(dy, [1]), (dy.shape[0], 1))
    return [dy - ops.exp(node.outputs[0]) * total]


cases(log_softmax, Case(((4, 8),)), Case(((33, 65),)))


def divergence(student: Value, teacher: Value, beta: float) -> Value:
    """Divergence of two rows of log-probabilities [N, V], in nats: [N].

    It is beta KL(teacher || m) + (1 - beta) KL(student || m) with m = beta teacher + (1 - beta) student, but for beta=0
    KL(teacher || student) and for beta=1 KL(student || teacher), which are its limits when divided by beta or 1 - beta
    (Agarwal et al., 2024, On-Policy Distillation of Language Models, section 3.1).
    """
    if beta in (0, 1):
        return _kl(teacher, student) if beta == 0 else _kl(student, teacher)
    one, other = student + math.log1p(-beta), teacher + math.log(beta)
    most = ops.maximum(one, other)
    mixed = most + ops.log(ops.exp(one - most) + ops.exp(other - most))
    return beta * _kl(teacher, mixed) + (1 - beta) * _kl(student, mixed)


def _kl(p: Value, q: Value) -> Value:
    """KL(p || q) of log-probabilities [N, V]: [N]."""
    return ops.reduce_sum(ops.exp(p) * (p - q), [1])


class Distillation(Objective):
    """Batches of next-token prediction; the loss is a mean over the positions that have a target.

    Scores of both models, [N, V], exist for some rows at a time; backward computes them again.
    """

    config: DistillationConfig

    def loss(self, model: Any, graph: Graph, rows: int, training: bool) -> tuple[Value, dict[str, Value]]:
        """Return the loss, and in nats the cross-entropies of student and teacher: student/ce, teacher/ce."""
        assert self.frozen is not None
        teacher = self.frozen.beside(model)
        places = range(model.length), TensorSpec((rows, model.length), DType.INT64)
        positions = graph.input(POSITIONS, places[1], places[0]) if POSITIONS in model.batch_specs(rows) else None
        hidden = model.hidden(graph, rows, training, positions)
        with graph.scope("teacher"):
            taught = teacher.hidden(graph, rows, False, positions)
        targets = ops.reshape(graph.input("targets", places[1]), hidden.shape[:1])
        parts, found = _parts(targets.shape[0], model.vocabulary), list[Sequence[Value]]()
        for chosen in parts:
            with graph.scope("loss"), graph.segment(training and len(parts) > 1):
                scores = model.scores(_rows(hidden, chosen)), teacher.scores(_rows(taught, chosen))
                found.append(self._sums(*scores, _rows(targets, chosen)))
        with graph.scope("loss"):
            weight = graph.input(LOSS_WEIGHT, SCALAR)
            loss, own, its = (reduce(ops.add, each) * weight for each in zip(*found, strict=True))
            share = self.config.cross_entropy
            mixed = loss if share == 0 else (1 - share) * loss + share * own
        return mixed, {"student/ce": own, "teacher/ce": its}

    def _sums(self, student: Value, teacher: Value, targets: Value) -> list[Value]:
        """Sums over rows of scores [n, V]: of the divergence, and of the cross-entropies of both models."""
        live = min(student.shape[1], teacher.shape[1])  # a model may have more ids than the tokenizer
        hot = ops.one_hot(targets, live, student.spec.dtype)
        given = [log_softmax(_columns(scores, live)) for scores in (student, teacher)]
        soft, heat = given, self.config.temperature
        if heat != 1:
            soft = [log_softmax(_columns(scores, live) * (1 / heat)) for scores in (student, teacher)]
        counted = ops.reduce_sum(hot, [1])  # 0 without a target, else 1
        losses = counted * divergence(soft[0], soft[1], self.config.beta)
        return [ops.reduce_sum(losses, [0]), *(-ops.reduce_sum(hot * logs, [0, 1]) for logs in given)]


def _parts(rows: int, width: int) -> list[range]:
    """Divide rows of so many scores into parts of about equal size."""
    size = -(-rows // -(-rows * width // _AT_ONCE))
    return [range(start, min(start + size, rows)) for start in range(0, rows, size)]


def _rows(x: Value, chosen: range) -> Value:
    """Some rows of [N, C] or [N]."""
    if len(chosen) == x.shape[0]:
        return x
    whole = ops.reshape(x, (1, x.shape[0], x.spec.size // x.shape[0]))
    return ops.reshape(ops.index_select(whole, chosen), (len(chosen), *x.shape[1:]))


def _columns(x: Value, count: int) -> Value:
    """The first columns of [n, V]."""
    if count == x.shape[1]:
        return x
    return ops.reshape(ops.index_select(ops.reshape(x, (*x.shape, 1)), range(count)), (x.shape[0], count))
