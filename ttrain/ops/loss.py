"""Losses. Each is a sum over rows or elements, times the step input `weight`.

The loop sets weight to 1 / (valid elements of the whole step), so micro-batches add up to the mean over the step
whatever their sizes. A target below zero marks a position without a target: it gets no loss and no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ttrain.graph import Case, Node, Value, cases, composite, require
from ttrain.ops.elementwise import cast, exp, is_one, log, multiply
from ttrain.ops.embedding import one_hot
from ttrain.ops.layout import index_put, index_select, reshape
from ttrain.ops.matmul import linear, matmul
from ttrain.ops.reduce import amax, mean, reduce_sum


class _Rows(NamedTuple):
    """Parts of a loss of logits [N, V], fp32 at least: log-sum-exp and target logit [N], one-hot target [N, V]."""

    log_sum_exp: Value
    picked: Value
    hot: Value

    @staticmethod
    def of(logits: Value, targets: Value) -> _Rows:
        most, hot = amax(logits, -1), one_hot(targets, logits.shape[1], logits.spec.dtype)
        total = log(reduce_sum(exp(logits - most), [1]))
        return _Rows(reshape(most, targets.shape) + total, reduce_sum(hot * logits, [1]), hot)

    def weights(self, weight: Value) -> Value:
        """[N]: zero where there is no target."""
        return reduce_sum(self.hot, [1]) * weight


_LOGITS = "logits [N, V], targets int64 [N], weight accumulation []"


@composite(_LOGITS, name="cross_entropy", outputs=("loss", "log_sum_exp"), constants=("weight",))
def _cross_entropy(logits: Value, targets: Value, weight: Value) -> tuple[Value, Value]:
    """Softmax cross-entropy in nats: logits [N, V], targets int64 [N], weight fp32 [] -> loss fp32 [].

    `log_sum_exp` [N] fp32 is kept for backward.
    """
    rows = _Rows.of(cast(logits, logits.spec.dtype.accumulation), targets)
    losses = rows.weights(weight) * (rows.log_sum_exp - rows.picked)
    return reduce_sum(losses, [0]), rows.log_sum_exp


@_cross_entropy.gradient
def _(node: Node, dloss: Value, log_sum_exp: None) -> Sequence[Value | None]:
    weight = multiply(node.input("weight"), dloss)
    return [cross_entropy_grad(node.input("logits"), node.input("targets"), node.outputs[1], weight), None, None]


@composite(_LOGITS + ", log_sum_exp accumulation [N]", outputs=("dlogits",), elementwise=True, differentiable=False)
def cross_entropy_grad(logits: Value, targets: Value, log_sum_exp: Value, weight: Value) -> Value:
    """dlogits = weight (softmax(logits) - onehot(targets)), zero in rows without a target."""
    hot = one_hot(targets, logits.shape[1], logits.spec.dtype.accumulation)
    column = (logits.shape[0], 1)
    probabilities = exp(cast(logits, hot.spec.dtype) - reshape(log_sum_exp, column))
    return cast((probabilities - hot) * reshape(reduce_sum(hot, [1]) * weight, column), logits.spec.dtype)


_HEAD_OUTPUTS = ("loss", "cross_entropy?", "dhidden?", "dhead?", "dbias?")


@composite(
    "hidden [N, C], head [V, C], targets int64 [N], weight accumulation [] or [N], bias [V]",
    name="head_cross_entropy",
    outputs=_HEAD_OUTPUTS,
    outputs_of=lambda given: _HEAD_OUTPUTS if given["smoothing"] else (_HEAD_OUTPUTS[0], *_HEAD_OUTPUTS[2:]),
    constants=("weight",),
)
def _head_cross_entropy(
    hidden: Value,
    head: Value,
    targets: Value,
    weight: Value,
    bias: Value | None,
    smoothing: float,
    live: int,
    gradients: bool = False,
    frozen: bool | None = None,
) -> tuple[Value, ...]:
    """Losses of logits = hidden W^T + b: hidden [N, C], W [V, C], b [V], weight fp32 [] or [N] -> sums over rows.

    `loss` = sum weight_i ((1 - smoothing) CE_i + smoothing * the mean over ids of -log probability) (Szegedy et al.,
    2016); where there is smoothing also `cross_entropy` = sum weight_i CE_i, in nats, which has no gradient. Only the
    first `live` of the V ids have a probability; the others get no gradient. A target below zero marks a row that
    counts for nothing.

    Backward asks for `gradients`: dhidden [N, C], dhead [V, C] and any dbias [V] of `loss`, or dhidden alone where head
    and bias are `frozen`. A device forms them while some rows' logits are at hand, so the logits [N, V] need not exist
    whole, and backward needs no second product.
    """
    require(0 < live <= head.shape[0], "head_cross_entropy", f"live={live}", f"1 to {head.shape[0]} ids")
    require(0 <= smoothing < 1, "head_cross_entropy", f"{smoothing=}", "a share from 0 to below 1")
    alive = _first_rows(head, live)
    logits = linear(hidden, alive, None if bias is None else _first_rows(bias, live))
    wide = cast(logits, hidden.spec.dtype.accumulation)
    rows = _Rows.of(wide, targets)
    weights = rows.weights(weight)
    plain = reduce_sum(weights * (rows.log_sum_exp - rows.picked), [0])
    sums = [plain]
    if smoothing:
        spread = rows.picked - reshape(mean(wide, -1), targets.shape)
        sums = [plain + smoothing * reduce_sum(weights * spread, [0]), plain]
    if not gradients:
        return tuple(sums)
    column = (*targets.shape, 1)
    dlogits = exp(wide - reshape(rows.log_sum_exp, column)) - (1 - smoothing) * rows.hot
    dlogits = (dlogits - smoothing / live if smoothing else dlogits) * reshape(weights, column)
    narrow = cast(dlogits, logits.spec.dtype)
    found = [matmul(narrow, alive)]
    if not frozen:
        found.append(_padded(matmul(narrow, hidden, transpose_a=True), head.shape[0]))
    if not frozen and bias is not None:
        found.append(_padded(cast(reduce_sum(dlogits, [0]), bias.spec.dtype), head.shape[0]))
    return (*sums, *found)


def _first_rows(x: Value, count: int) -> Value:
    """The first of the rows [V, ...]."""
    whole = (1, x.shape[0], x.spec.size // x.shape[0])
    return x if count == x.shape[0] else reshape(index_select(reshape(x, whole), range(count)), (count, *x.shape[1:]))


def _padded(x: Value, count: int) -> Value:
    """Rows [..., ...] followed by zeros."""
    if count == x.shape[0]:
        return x
    rows = reshape(x, (1, x.shape[0], x.spec.size // x.shape[0]))
    return reshape(index_put(rows, range(x.shape[0]), count), (count, *x.shape[1:]))


@_head_cross_entropy.gradient
def _(node: Node, dloss: Value | None, *others: Value | None) -> Sequence[Value | None]:
    if dloss is None:
        return [None] * len(node.inputs)
    forward, graph = node.outputs[0].producer, node.outputs[0].graph
    assert forward is not None
    _, head, _, _, bias = node.inputs
    frozen = not (graph.differentiates(head) or graph.differentiates(bias))
    made = graph.amend(forward, gradients=True, frozen=frozen)[1 + bool(node.attributes["smoothing"]) :]
    if not is_one(dloss):
        made = tuple(multiply(value, cast(dloss, value.spec.dtype)) for value in made)
    dhidden, dhead, dbias = (*made, None, None)[:3]
    return [dhidden, dhead, None, None, dbias]


@composite(
    "hidden [N, C], head [V, C], targets int64 [N], bias [V]",
    name="head_log_probs",
    outputs=("log_probs", "entropy?"),
    outputs_of=lambda given: ("log_probs", "entropy") if given["entropy"] else ("log_probs",),
)
def _head_log_probs(
    hidden: Value, head: Value, targets: Value, bias: Value | None, live: int, entropy: bool = False
) -> tuple[Value, ...]:
    """Log-probabilities of the targets by logits = hidden W^T + b: hidden [N, C], W [V, C], b [V] -> fp32 [N].

    Without a target (below zero) it is 0, with no gradient. Only the first `live` of the V ids have a probability. With
    `entropy` also that of each row's distribution in nats, fp32 [N], which has no gradient.
    """
    require(0 < live <= head.shape[0], "head_log_probs", f"live={live}", f"1 to {head.shape[0]} ids")
    logits = linear(hidden, _first_rows(head, live), None if bias is None else _first_rows(bias, live))
    return log_probs(logits, targets, entropy)


@_head_log_probs.gradient
def _(node: Node, dlog_probs: Value | None, *others: Value | None) -> Sequence[Value | None]:
    """Minus a weighted sum of log-probabilities is a cross-entropy, whose gradients need no whole logits."""
    if dlog_probs is None:
        return [None] * len(node.inputs)
    (hidden, head, targets), bias = map(node.input, ("hidden", "head", "targets")), node.inputs[3]
    graph, live = hidden.graph, node.attributes["live"]
    frozen = not (graph.differentiates(head) or graph.differentiates(bias))
    made: Any = _head_cross_entropy(hidden, head, targets, -dlog_probs, bias, 0.0, live, gradients=True, frozen=frozen)
    dhidden, dhead, dbias = (*made[1:], None, None)[:3]
    return [dhidden, dhead, None, dbias]


_PREDICTION = "prediction [...], target any [...], weight accumulation []"


@composite(_PREDICTION, outputs=("loss",), constants=("target", "weight"))
def squared_error(prediction: Value, target: Value, weight: Value) -> Value:
    """loss = weight * sum((prediction - target)^2), fp32 []; the loop's weight is 1 / elements of the step."""
    difference = cast(prediction - target, prediction.spec.dtype.accumulation)
    return reduce_sum(difference * difference, range(difference.spec.rank)) * weight


@squared_error.gradient
def _(node: Node, dloss: Value) -> Sequence[Value | None]:
    weight = multiply(node.input("weight"), dloss)
    return [squared_error_grad(node.input("prediction"), node.input("target"), weight), None, None]


@composite(_PREDICTION, outputs=("dprediction",), elementwise=True, differentiable=False)
def squared_error_grad(prediction: Value, target: Value, weight: Value) -> Value:
    """dprediction = 2 * weight * (prediction - target)."""
    return 2.0 * (prediction - target) * cast(weight, prediction.spec.dtype)


cases(_cross_entropy, Case(positive=("weight",), holes=("targets",)))
for _n, _c, _v, _live, _entropy, _bias in ((6, 4, 5, 5, False, False), (33, 8, 65, 49, True, True)):
    _options = {"live": _live, "entropy": _entropy}
    _sizes = ((_n, _c), (_v, _c), (_n,), (_v,) if _bias else None)
    cases(_head_log_probs, Case(_sizes, _options, {"targets": _live}, holes=("targets",)))
cases(squared_error, Case(positive=("weight",)))
for _n, _c, _v, _live, _smoothing, _bias, _each in (
    (6, 4, 5, 5, 0.0, False, False),
    (33, 8, 65, 65, 0.0, False, False),
    (5, 3, 4, 2, 0.0, False, True),
    (6, 4, 5, 5, 0.1, True, True),
    (33, 8, 96, 65, 0.1, True, False),
    (4, 3, 7, 7, 0.25, False, True),
    (40, 8, 64, 49, 0.0, True, True),
):
    _given = ((_n, _c), (_v, _c), (_n,), (_n,) if _each else (), (_v,) if _bias else None)
    for _asked in ({"gradients": False}, {"gradients": True}, {"gradients": True, "frozen": True})[: 2 + _each]:
        _attributes = {"smoothing": _smoothing, "live": _live, **_asked}
        cases(_head_cross_entropy, Case(_given, _attributes, {"targets": _live}, ("weight",), ("targets",)))


def cross_entropy(logits: Value, targets: Value, weight: Value) -> Value:
    """weight * sum of the cross-entropies in nats: logits [N, V], targets [N] -> []."""
    return _cross_entropy(logits, targets, weight)[0]


def head_cross_entropy(
    hidden: Value,
    head: Value,
    bias: Value | None,
    targets: Value,
    weight: Value,
    smoothing: float = 0.0,
    live: int | None = None,
) -> tuple[Value, Value]:
    """(loss, plain cross-entropy) of a head's logits, both weighted sums -> []; the same value without smoothing."""
    live = head.shape[0] if live is None else live
    made: Any = _head_cross_entropy(hidden, head, targets, weight, bias, smoothing, live)
    return (made[0], made[1]) if smoothing else (made, made)


def log_probs(logits: Value, targets: Value, entropy: bool = False) -> tuple[Value, ...]:
    """Log-probabilities of targets [N] by logits [N, V], and any entropy: see head_log_probs."""
    wide = cast(logits, logits.spec.dtype.accumulation)
    rows = _Rows.of(wide, targets)
    found = reduce_sum(rows.hot, [1]) * (rows.picked - rows.log_sum_exp)
    if not entropy:
        return (found,)
    probabilities = exp(wide - reshape(rows.log_sum_exp, (*targets.shape, 1)))
    return found, rows.log_sum_exp - reduce_sum(probabilities * wide, [1])


def head_log_probs(
    hidden: Value, head: Value, bias: Value | None, targets: Value, entropy: bool = False, live: int | None = None
) -> tuple[Value, ...]:
    """(log-probabilities of the targets,) fp32 [N] in nats, with `entropy` also (.., entropies fp32 [N])."""
    made: Any = _head_log_probs(hidden, head, targets, bias, head.shape[0] if live is None else live, entropy)
    return made if entropy else (made,)
