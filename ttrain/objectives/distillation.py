"""objective=distillation: a model learns the distributions of a teacher, which reads the same tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

from ttrain import ops
from ttrain.core.spec import DType, TensorSpec
from ttrain.data.sequences.taught import IDS, LOG_PROBS, OF_TARGETS, taught_fields
from ttrain.graph import Case, Graph, Node, Value, cases, composite
from ttrain.models.base import LOSS_WEIGHT, SCALAR
from ttrain.models.cache import POSITIONS
from ttrain.objectives.base import Objective

REST = "rest"  # output of record_top: the last column of LOG_PROBS

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


# Log-probabilities [N] of the targets, and a function: the student's logits [n, V] of some rows -> divergence [n].
Teacher = tuple[Value, Callable[[Value, range], Value]]


class Distillation(Objective):
    """Batches of next-token prediction; the loss is the mean over the positions that have a target.

    The teacher's distributions are computed in the step. With `top_k` they are fields of the batch, which
    data/sequences/taught.py reads. Logits, [N, V], exist for some rows at a time; backward computes them again.
    """

    def fields(self, model: Any, rows: int) -> dict[str, TensorSpec]:
        top_k = self.config.top_k
        return model.batch_specs(rows) | ({} if top_k is None else taught_fields(rows, model.length, top_k))

    def loss(self, model: Any, graph: Graph, rows: int, training: bool) -> tuple[Value, dict[str, Value]]:
        """Return the loss, and in nats the cross-entropies of student and teacher: student/ce, teacher/ce."""
        positions = _positions(model, graph, rows)
        hidden = model.hidden(graph, rows, training, positions)  # [N, width]
        targets = ops.reshape(graph.input("targets", self.fields(model, rows)["targets"]), hidden.shape[:1])
        told = self._stored(model, graph, rows) if self.config.top_k else self._computed(model, graph, rows, targets)
        its, compared = told
        found, parts = list[Value](), _parts(targets.shape[0], model.vocabulary)
        with graph.scope("loss"):
            weight, share = graph.input(LOSS_WEIGHT, SCALAR), self.config.cross_entropy
            own = model.log_probs(hidden, targets)[0]  # [N]
            counts = ops.valid(targets)  # fp32, as not every device can select rows of integers
            for chosen in parts:
                with graph.segment(training and len(parts) > 1):
                    each = compared(model.scores(_some(hidden, chosen)), chosen)
                    found.append(ops.reduce_sum(_some(counts, chosen) * each, [0]))
            loss = reduce(ops.add, found) * weight
            ce, its_ce = (-(ops.reduce_sum(each, [0]) * weight) for each in (own, its))
        return (1 - share) * loss + share * ce if share else loss, {"student/ce": ce, "teacher/ce": its_ce}

    def _computed(self, model: Any, graph: Graph, rows: int, targets: Value) -> Teacher:
        teacher = self.frozen.at_length(model.length)
        with graph.scope("teacher"):
            taught = teacher.hidden(graph, rows, False, _positions(model, graph, rows))
            its = teacher.log_probs(taught, targets)[0]
        return its, lambda scores, chosen: self._divergence(scores, teacher.scores(_some(taught, chosen)))

    def _stored(self, model: Any, graph: Graph, rows: int) -> Teacher:
        specs = taught_fields(rows, model.length, self.config.top_k)
        flat = {name: (rows * model.length, *spec.shape[2:]) for name, spec in specs.items()}
        own = {name: ops.reshape(graph.input(name, spec), flat[name]) for name, spec in specs.items()}
        ids, kept = own[IDS], own[LOG_PROBS]
        return own[OF_TARGETS], lambda scores, chosen: self._of_top(scores, _some(ids, chosen), _some(kept, chosen))

    def _divergence(self, *scores: Value) -> Value:
        """Divergence of student and teacher by their logits [n, V]: [n]."""
        live = min(each.shape[1] for each in scores)  # a model may have more ids than the tokenizer
        soft = [log_softmax(_some(each, range(live), 1) * (1 / self.config.temperature)) for each in scores]
        return divergence(soft[0], soft[1], self.config.beta)

    def _of_top(self, scores: Value, ids: Value, kept: Value) -> Value:
        """Divergence over K tokens and all others as one: logits [n, V], ids [n, K], log-probabilities [n, K + 1]."""
        count, beta = ids.shape[1], self.config.beta
        own = top(scores, self.config.temperature, ids)
        its = _some(kept, range(count), 1), _some(kept, range(count, count + 1), 1)
        return divergence(own[0], its[0], beta) + divergence(own[1], its[1], beta)

    def record_top(self, graph: Graph, teacher: Any, rows: int, ids: int) -> None:
        """Record the teacher alone. Its outputs are parts of what `taught_fields` names: `<field>.<number>`.

        Ids of the teacher from `ids` on, which the tokenizer lacks, count for nothing.
        """
        hidden = teacher.hidden(graph, rows, False, _positions(teacher, graph, rows))
        targets = ops.reshape(graph.input("targets", teacher.batch_specs(rows)["targets"]), hidden.shape[:1])
        graph.output(f"{OF_TARGETS}.0", teacher.log_probs(hidden, targets)[0])
        live = range(ids)
        for number, chosen in enumerate(_parts(hidden.shape[0], teacher.vocabulary)):
            scores = _some(teacher.scores(_some(hidden, chosen)), live, 1)
            best = ops.top_k(scores, self.config.top_k)
            found, rest = top(scores, self.config.temperature, best)
            for name, value in ((IDS, best), (LOG_PROBS, found), (REST, rest)):
                graph.output(f"{name}.{number}", value)


def top(scores: Value, temperature: float, ids: Value) -> tuple[Value, Value]:
    """Return the log-probabilities [n, K] of some ids [n, K] by logits [n, V], and that of all other ids [n, 1].

    Probabilities of others are taken to be at least 1e-30 together.
    """
    logs = log_softmax(scores * (1 / temperature))
    ones = ops.full(scores.graph, logs.spec.with_shape(*ids.shape), 1.0)
    others = ops.reduce_sum(ops.exp(logs) * (1.0 - ops.scatter(ones, ids, logs.shape[1])), [1])
    return ops.gather(logs, ids), ops.reshape(ops.log(ops.at_least(others, 1e-30)), (ids.shape[0], 1))


def _positions(model: Any, graph: Graph, rows: int) -> Value | None:
    """Return the step input of positions, int64 [rows, length], which models of documents have."""
    spec = TensorSpec((rows, model.length), DType.INT64)
    return graph.input(POSITIONS, spec, range(model.length)) if POSITIONS in model.batch_specs(rows) else None


def _parts(count: int, vocabulary: int) -> list[range]:
    """Return ranges of `count` rows whose logits exist at the same time."""
    size = -(-count // -(-count * vocabulary // _AT_ONCE))
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def _some(x: Value, chosen: range, axis: int = 0) -> Value:
    """Some rows or columns of [N, V], or elements of [N]."""
    before, after = math.prod(x.shape[:axis]), math.prod(x.shape[axis + 1 :])
    found = ops.index_select(ops.reshape(x, (before, x.shape[axis], after)), chosen)
    return ops.reshape(found, (*x.shape[:axis], len(chosen), *x.shape[axis + 1 :]))
