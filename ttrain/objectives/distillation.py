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

    def loss(self, model: Any, graph: Graph, rows: int, training: bool) -> tuple[Value, dict[str, Value]]:
        """Return the loss, and in nats the cross-entropies of student and teacher: student/ce, teacher/ce."""
        teacher = self.frozen.beside(model)
        places = range(model.length), TensorSpec((rows, model.length), DType.INT64)
        positions = graph.input(POSITIONS, places[1], places[0]) if POSITIONS in model.batch_specs(rows) else None
        hidden = model.hidden(graph, rows, training, positions)
        with graph.scope("teacher"):
            taught = teacher.hidden(graph, rows, False, positions)
        targets = ops.reshape(graph.input("targets", places[1]), hidden.shape[:1])
        found, count = list[Sequence[Value]](), targets.shape[0]
        size = -(-count // -(-count * model.vocabulary // _AT_ONCE))
        parts = [range(start, min(start + size, count)) for start in range(0, count, size)]
        for chosen in parts:
            with graph.scope("loss"), graph.segment(training and len(parts) > 1):
                scores = model.scores(_some(hidden, chosen)), teacher.scores(_some(taught, chosen))
                found.append(self._sums(*scores, _some(targets, chosen)))
        with graph.scope("loss"):
            weight = graph.input(LOSS_WEIGHT, SCALAR)
            loss, own, its = (reduce(ops.add, each) * weight for each in zip(*found, strict=True))
            share = self.config.cross_entropy
        return (1 - share) * loss + share * own if share else loss, {"student/ce": own, "teacher/ce": its}

    def _sums(self, student: Value, teacher: Value, targets: Value) -> list[Value]:
        """Sums over rows of scores [n, V]: of the divergence, and of the cross-entropies of both models."""
        live = min(student.shape[1], teacher.shape[1])  # a model may have more ids than the tokenizer
        scores = [_some(each, range(live), 1) for each in (student, teacher)]
        hot, heat, given = (
            ops.one_hot(targets, live, DType.FP32),
            self.config.temperature,
            list(map(log_softmax, scores)),
        )
        soft = given if heat == 1 else [log_softmax(each * (1 / heat)) for each in scores]
        counted = ops.reduce_sum(hot, [1])  # 0 without a target, else 1
        losses = counted * divergence(soft[0], soft[1], self.config.beta)
        return [ops.reduce_sum(losses, [0]), *(-ops.reduce_sum(hot * logs, [0, 1]) for logs in given)]


def _some(x: Value, chosen: range, axis: int = 0) -> Value:
    """Some rows or columns of [N, V], or elements of [N]."""
    before, after = math.prod(x.shape[:axis]), math.prod(x.shape[axis + 1 :])
    found = ops.index_select(ops.reshape(x, (before, x.shape[axis], after)), chosen)
    return ops.reshape(found, (*x.shape[:axis], len(chosen), *x.shape[axis + 1 :]))
