"""Losses. Each is a weighted sum, loss = weight * sum over valid elements, with `weight` a step input.

The loop sets weight to 1 / (valid elements of the whole step), so micro-batches add up to the mean over the step
whatever their sizes. A target below zero marks a position without a target: it gets no loss and no gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ttrain.core.spec import DType, TensorSpec
from ttrain.graph.graph import Node, Value
from ttrain.graph.op import Case, Op, declare, op
from ttrain.ops.common import is_one
from ttrain.ops.elementwise import cast, multiply, torch_gradient


def _scalar(dtype: DType) -> TensorSpec:
    """Spec of the loss over tensors of a dtype, and of its weight."""
    return TensorSpec((), dtype.wide)


def _token_check(owner: Op, rows: int, targets: TensorSpec, weight: TensorSpec, dtype: DType) -> None:
    owner.require(targets == TensorSpec((rows,), DType.INT64), f"targets {targets}", f"int64[{rows}]")
    owner.require(weight == _scalar(dtype), f"weight {weight}", str(_scalar(dtype)))


def _cross_entropy(logits: Any, targets: Any, weight: Any) -> tuple[Any, Any]:
    log_sum_exp = logits.logsumexp(-1)
    picked = logits.gather(-1, targets.clamp(min=0)[:, None])[:, 0]
    return weight * ((log_sum_exp - picked) * (targets >= 0)).sum(), log_sum_exp


@declare
class CrossEntropy(Op):
    """Softmax cross-entropy in nats: logits [N, V], targets int64 [N], weight fp32 [] -> loss fp32 [].

    `log_sum_exp` [N] fp32 is kept for backward.
    """

    name = "cross_entropy"
    family = "loss"
    inputs = ("logits", "targets", "weight")
    outputs = ("loss", "log_sum_exp")
    wide = ("weight",)
    constants = ("weight",)

    def infer(self, logits: TensorSpec, targets: TensorSpec, weight: TensorSpec) -> Sequence[TensorSpec]:
        self.require(logits.rank == 2, f"logits {logits}", "[rows, vocabulary]")
        _token_check(self, logits.shape[0], targets, weight, logits.dtype)
        return [_scalar(logits.dtype), TensorSpec(logits.shape[:1], logits.dtype.wide)]

    def flops(self, node: Node) -> int:
        return 4 * node.input("logits").spec.size

    def vjp(self, node: Node, *gradients: Value | None) -> Sequence[Value | None]:
        dloss = gradients[0]
        assert dloss is not None
        logits, targets, weight = node.input("logits"), node.input("targets"), node.input("weight")
        row_weight = multiply(weight, dloss)
        return [op("cross_entropy_grad").record(logits, targets, node.outputs[1], row_weight), None, None]

    def reference(self, logits: Any, targets: Any, weight: Any) -> Any:
        return _cross_entropy(logits, targets, weight)

    def cases(self) -> Sequence[Case]:
        return [
            Case(((n, v), (n,), ()), {}, {"targets": v}, ("weight",), ("targets",) if n > 1 else ())
            for n, v in ((6, 5), (33, 65), (1, 2))
        ]


@declare
class CrossEntropyGrad(Op):
    """dlogits = weight (softmax(logits) - onehot(targets)), zero in rows without a target."""

    name = "cross_entropy_grad"
    family = "loss"
    inputs = ("logits", "targets", "log_sum_exp", "weight")
    wide = ("log_sum_exp", "weight")
    outputs = ("dlogits",)
    elementwise = True
    differentiable = False

    def infer(self, logits: TensorSpec, targets: TensorSpec, log_sum_exp: TensorSpec, weight: TensorSpec) -> TensorSpec:
        _token_check(self, logits.shape[0], targets, weight, logits.dtype)
        return logits

    def flops(self, node: Node) -> int:
        return 4 * node.input("logits").spec.size

    def reference(self, logits: Any, targets: Any, log_sum_exp: Any, weight: Any) -> Any:
        return torch_gradient(lambda leaf: _cross_entropy(leaf, targets, weight)[0], 1 + 0 * weight, logits)

    def cases(self) -> Sequence[Case]:
        return [
            Case(((n, v), (n,), (n,), ()), {}, {"targets": v}, holes=("targets",) if n > 1 else ())
            for n, v in ((6, 5), (33, 65), (1, 2))
        ]

    def derived(self, given: Mapping[str, Any], attributes: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"log_sum_exp": given["logits"].logsumexp(-1)}


@declare
class LinearCrossEntropy(Op):
    """Cross-entropy straight from hidden states: hidden [N, C], head weight [V, C] -> loss fp32 [].

    Works on `chunk` rows at a time, so the logits [N, V] never exist whole. With `gradients` it also returns
    dhidden [N, C] and dweight [V, C] for a loss gradient of one, formed while a chunk's logits are at hand: backward
    then needs no second product.
    """

    name = "linear_cross_entropy"
    family = "loss"
    inputs = ("hidden", "head", "targets", "weight")
    outputs = ("loss", "dhidden?", "dhead?")
    wide = ("weight",)
    constants = ("weight",)

    def infer(
        self,
        hidden: TensorSpec,
        head: TensorSpec,
        targets: TensorSpec,
        weight: TensorSpec,
        chunk: int,
        gradients: bool,
    ) -> Sequence[TensorSpec]:
        self.require(
            hidden.rank == 2 and head.rank == 2 and hidden.shape[1] == head.shape[1],
            f"hidden {hidden} and head {head}",
            "[rows, width] and [vocabulary, width]",
        )
        self.require(hidden.dtype is head.dtype, f"hidden {hidden} and head {head}", "equal dtypes")
        self.require(chunk >= 1, f"chunk={chunk}", "at least one row")
        _token_check(self, hidden.shape[0], targets, weight, hidden.dtype)
        loss = _scalar(hidden.dtype)
        return [loss, hidden, head] if gradients else [loss]

    def flops(self, node: Node) -> int:
        (rows, width), vocabulary = node.input("hidden").shape, node.input("head").shape[0]
        products = 3 if node.attributes["gradients"] else 1
        return rows * vocabulary * (2 * width * products + 6)

    def vjp(self, node: Node, *gradients: Value | None) -> Sequence[Value | None]:
        dloss = gradients[0]
        assert dloss is not None
        self.require(node.attributes["gradients"], "gradients=False", "gradients=True where a gradient is needed")
        _, dhidden, dhead = node.outputs
        factor = dloss if is_one(dloss) else cast(dloss, dhidden.spec.dtype)
        return [multiply(dhidden, factor), multiply(dhead, factor), None, None]

    def reference(self, hidden: Any, head: Any, targets: Any, weight: Any, chunk: int, gradients: bool) -> Any:
        import torch

        def loss_of(h: Any, w: Any) -> Any:
            return _cross_entropy(h @ w.T, targets, weight)[0]

        loss = loss_of(hidden, head)
        if not gradients:
            return loss
        with torch.enable_grad():
            leaves = hidden.detach().requires_grad_(True), head.detach().requires_grad_(True)
            return (loss, *torch.autograd.grad(loss_of(*leaves), leaves))

    def decompose(self, node: Node, inputs: tuple[Value | None, ...]) -> Sequence[Value]:
        from ttrain.ops.matmul import linear, matmul

        hidden, head, targets, weight = inputs
        assert hidden is not None and head is not None and targets is not None and weight is not None
        logits = linear(hidden, head)
        loss, log_sum_exp = op("cross_entropy").record(logits, targets, weight)
        if not node.attributes["gradients"]:
            return [loss]
        dlogits = op("cross_entropy_grad").record(logits, targets, log_sum_exp, weight)
        return [loss, matmul(dlogits, head), matmul(dlogits, hidden, transpose_a=True)]

    def cases(self) -> Sequence[Case]:
        return [
            Case(
                ((n, c), (v, c), (n,), ()),
                {"chunk": chunk, "gradients": gradients},
                {"targets": v},
                positive=("weight",),
                holes=("targets",),
            )
            for n, c, v, chunk in ((6, 4, 5, 6), (33, 8, 65, 10), (5, 3, 2, 1), (4, 3, 7, 100))
            for gradients in (False, True)
        ]


@declare
class MeanSquaredError(Op):
    """loss = weight * sum((prediction - target)^2), fp32 []; the loop's weight is 1 / elements of the step."""

    name = "squared_error"
    family = "loss"
    inputs = ("prediction", "target", "weight")
    outputs = ("loss",)
    wide = ("weight",)
    constants = ("target", "weight")

    def infer(self, prediction: TensorSpec, target: TensorSpec, weight: TensorSpec) -> TensorSpec:
        self.require(prediction.shape == target.shape, f"{prediction} and {target}", "equal shapes")
        scalar = _scalar(prediction.dtype)
        self.require(weight == scalar, f"weight {weight}", str(scalar))
        return scalar

    def flops(self, node: Node) -> int:
        return 3 * node.input("prediction").spec.size

    def vjp(self, node: Node, *gradients: Value | None) -> Sequence[Value | None]:
        (dloss,) = gradients
        assert dloss is not None
        factor = multiply(node.input("weight"), dloss)
        return [
            op("squared_error_grad").record(node.input("prediction"), node.input("target"), factor),
            None,
            None,
        ]

    def reference(self, prediction: Any, target: Any, weight: Any) -> Any:
        return weight * (prediction - target).square().sum()

    def decompose(self, node: Node, inputs: tuple[Value | None, ...]) -> Sequence[Value]:
        from ttrain.ops.elementwise import subtract
        from ttrain.ops.reduce import reduce_sum

        prediction, target, weight = inputs
        assert prediction is not None and target is not None and weight is not None
        difference = cast(subtract(prediction, target), prediction.spec.dtype.wide)
        total = reduce_sum(multiply(difference, difference), range(difference.spec.rank))
        return [op("multiply").record(total, weight)]

    def cases(self) -> Sequence[Case]:
        return [Case((shape, shape, ()), positive=("weight",)) for shape in ((4, 8), (2, 3, 33), (1,))]


@declare
class MeanSquaredErrorGrad(Op):
    """dprediction = 2 * weight * (prediction - target)."""

    name = "squared_error_grad"
    family = "loss"
    inputs = ("prediction", "target", "weight")
    wide = ("weight",)
    outputs = ("dprediction",)
    elementwise = True
    differentiable = False

    def infer(self, prediction: TensorSpec, target: TensorSpec, weight: TensorSpec) -> TensorSpec:
        self.require(prediction.shape == target.shape, f"{prediction} and {target}", "equal shapes")
        return prediction

    def flops(self, node: Node) -> int:
        return 2 * node.input("prediction").spec.size

    def reference(self, prediction: Any, target: Any, weight: Any) -> Any:
        return 2 * weight * (prediction - target)

    def decompose(self, node: Node, inputs: tuple[Value | None, ...]) -> Sequence[Value]:
        from ttrain.ops.elementwise import scale, subtract

        prediction, target, weight = inputs
        assert prediction is not None and target is not None and weight is not None
        return [multiply(scale(subtract(prediction, target), 2.0), cast(weight, prediction.spec.dtype))]

    def cases(self) -> Sequence[Case]:
        return [Case((shape, shape, ())) for shape in ((4, 8), (2, 3, 33), (1,))]


def cross_entropy(logits: Value, targets: Value, weight: Value) -> Value:
    """weight * sum of the cross-entropies in nats: logits [N, V], targets [N] -> []."""
    return op("cross_entropy").record(logits, targets, weight)[0]


def linear_cross_entropy(
    hidden: Value, head: Value, targets: Value, weight: Value, *, chunk: int, gradients: bool
) -> Value:
    """Cross-entropy of the head's logits without ever holding them whole: hidden [N, C], head [V, C] -> []."""
    outputs = op("linear_cross_entropy").record(hidden, head, targets, weight, chunk=chunk, gradients=gradients)
    return outputs[0] if gradients else outputs


def squared_error(prediction: Value, target: Value, weight: Value) -> Value:
    """weight * sum of the squared differences -> []."""
    return op("squared_error").record(prediction, target, weight)
