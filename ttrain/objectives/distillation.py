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

_AT_ONCE = 1 << 24  # logits of each model that exist at a time


@composite("x [N, V]", outputs=("y",))
def log_softmax(x: Value) -> Value:
    """y = log(softmax(x)) over the last axis."""
    moved = x - ops.amax(x, -1)
    return moved - ops.log(ops.reshape(ops.reduce_sum(ops.exp(moved), [1]), (x.shape[0], 1)))


@log_softmax.gradient
def _(node: Node, dy: Value) -> Sequence[Value]:
    total = ops.reshape(ops.reduce_sum(dy, [1]), (dy.shape[0], 1))
    return [dy - ops.exp(node.outputs[0]) * total]


@composite("own [N], its [N]", outputs=("counts",), constants=("own", "its"))
def counted(own: Value, its: Value) -> Value:
    """1 for a row with a target, else 0. Without a target the log-probabilities of both models are 0.

    A target to which both give the probability 1 is taken for none; its divergence is 0.
    """
    return ops.greater(-(own + its), own * 0.0)


@counted.gradient
def _(node: Node, dcounts: Value) -> Sequence[Value | None]:
    return [None, None]


counted.differentiable = False
cases(counted, Case(((5,), (5,))))
cases(log_softmax, Case(((4, 8),)), Case(((33, 65),)))


def divergence(student: Value, teacher: Value, beta: float) -> Value:
    """Divergence of the distributions of student and teacher, given as log-probabilities [N, V], in nats: [N].

    It is beta KL(teacher || m) + (1 - beta) KL(student || m) with m = beta teacher + (1 - beta) student. beta=0 stands
    for KL(teacher || student) and beta=1 for KL(student || teacher), the limits of that over beta and over 1 - beta
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
    """Batches of next-token prediction; the loss is the mean over the positions that have a target.

    The logits of both models, [N, V], exist for some rows at a time; backward computes them again.
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
        count, found = targets.shape[0], list[Value]()
        size = -(-count // -(-count * model.vocabulary // _AT_ONCE))
        with graph.scope("loss"):
            weight, share = graph.input(LOSS_WEIGHT, SCALAR), self.config.cross_entropy
            own, its = model.log_probs(hidden, targets)[0], teacher.log_probs(taught, targets)[0]  # [N]
            counts = counted(own, its)  # fp32, as not every device can select rows of integers
            for chosen in (range(start, min(start + size, count)) for start in range(0, count, size)):
                with graph.segment(training and size < count):
                    scores = model.scores(_some(hidden, chosen)), teacher.scores(_some(taught, chosen))
                    found.append(ops.reduce_sum(_some(counts, chosen) * self._divergence(*scores), [0]))
            loss = reduce(ops.add, found) * weight
            ce, its_ce = (-(ops.reduce_sum(each, [0]) * weight) for each in (own, its))
        return (1 - share) * loss + share * ce if share else loss, {"student/ce": ce, "teacher/ce": its_ce}

    def _divergence(self, *scores: Value) -> Value:
        """Divergence of student and teacher by their logits [n, V]: [n]."""
        live = min(each.shape[1] for each in scores)  # a model may have more ids than the tokenizer
        soft = [log_softmax(_some(each, range(live), 1) * (1 / self.config.temperature)) for each in scores]
        return divergence(soft[0], soft[1], self.config.beta)


def _some(x: Value, chosen: range, axis: int = 0) -> Value:
    """Some rows or columns of [N, V], or elements of [N]."""
    before, after = math.prod(x.shape[:axis]), math.prod(x.shape[axis + 1 :])
    found = ops.index_select(ops.reshape(x, (before, x.shape[axis], after)), chosen)
    return ops.reshape(found, (*x.shape[:axis], len(chosen), *x.shape[axis + 1 :]))
