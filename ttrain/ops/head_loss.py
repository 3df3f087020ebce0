"""Cross-entropy of an output head with bias and label smoothing, straight from hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ttrain.core.spec import DType, TensorSpec
from ttrain.graph.graph import Node, Value
from ttrain.graph.op import Case, Op, declare, op
from ttrain.ops.common import is_one
from ttrain.ops.elementwise import cast, multiply


def _losses(logits: Any, targets: Any, weights: Any, smoothing: float) -> tuple[Any, Any]:
    """(smoothed, plain): weighted sums over the rows that have a target."""
    logs = logits.log_softmax(-1)
    picked = logs.gather(-1, targets.clamp(min=0)[:, None])[:, 0]
    weights = weights * (targets >= 0)
    plain = -(weights * picked).sum()
    return (1 - smoothing) * plain - smoothing * (weights * logs.mean(-1)).sum(), plain


@declare
class HeadCrossEntropy(Op):
    """Losses of logits = hidden W^T + b: hidden [N, C], W [V, C], b [V], weights fp32 [N] -> two sums over rows.

    `loss` = sum weights_i ((1 - smoothing) CE_i + smoothing * the mean over ids of -log probability) (Szegedy et al.,
    2016), `cross_entropy` = sum weights_i CE_i, in nats. Only the first `live` of the V ids have a probability; the
    others get no gradient. A target below zero marks a row that counts for nothing.

    Works on `chunk` rows at a time, so the logits [N, V] never exist whole. With `gradients` it also returns dhidden
    [N, C], dhead [V, C] and dbias [V] of `loss`, formed while a chunk's logits are at hand. `cross_entropy` is to look
    at: it has no gradient.
    """

    name = "head_cross_entropy"
    family = "loss"
    inputs = ("hidden", "head", "targets", "weights", "bias?")
    outputs = ("loss", "cross_entropy", "dhidden?", "dhead?", "dbias?")
    wide = ("weights",)
    constants = ("weights",)

    def infer(
        self,
        hidden: TensorSpec,
        head: TensorSpec,
        targets: TensorSpec,
        weights: TensorSpec,
        bias: TensorSpec | None,
        chunk: int,
        gradients: bool,
        smoothing: float,
        live: int,
    ) -> Sequence[TensorSpec]:
        matching = hidden.rank == 2 and head.rank == 2 and hidden.shape[1] == head.shape[1]
        self.require(matching, f"hidden {hidden} and head {head}", "[rows, width] and [vocabulary, width]")
        self.require(hidden.dtype is head.dtype, f"hidden {hidden} and head {head}", "equal dtypes")
        rows, (vocabulary, _), wide = hidden.shape[0], head.shape, hidden.dtype.wide
        self.require(bias is None or bias == TensorSpec((vocabulary,), head.dtype), f"bias {bias}", f"[{vocabulary}]")
        self.require(targets == TensorSpec((rows,), DType.INT64), f"targets {targets}", f"int64[{rows}]")
        self.require(weights == TensorSpec((rows,), wide), f"weights {weights}", f"{wide}[{rows}]")
        self.require(chunk >= 1, f"chunk={chunk}", "at least one row")
        self.require(0 < live <= vocabulary, f"live={live}", f"1 to {vocabulary} ids")
        self.require(0 <= smoothing < 1, f"smoothing={smoothing}", "a share from 0 to below 1")
        sums = [TensorSpec((), wide)] * 2
        return [*sums, hidden, head, *([] if bias is None else [bias])] if gradients else sums

    def flops(self, node: Node) -> int:
        (rows, width), live = node.input("hidden").shape, node.attributes["live"]
        products = 3 if node.attributes["gradients"] else 1
        return rows * live * (2 * width * products + 8)

    def vjp(self, node: Node, *gradients: Value | None) -> Sequence[Value | None]:
        dloss = gradients[0]
        self.require(node.attributes["gradients"], "gradients=False", "gradients=True where a gradient is needed")
        if dloss is None:
            return [None] * 5
        formed = node.outputs[2:]
        if not is_one(dloss):
            formed = tuple(multiply(value, cast(dloss, value.spec.dtype)) for value in formed)
        return [formed[0], formed[1], None, None, formed[2] if formed[2:] else None]

    def reference(
        self,
        hidden: Any,
        head: Any,
        targets: Any,
        weights: Any,
        bias: Any,
        chunk: int,
        gradients: bool,
        smoothing: float,
        live: int,
    ) -> Any:
        import torch

        def losses_of(h: Any, w: Any, b: Any = None) -> tuple[Any, Any]:
            logits = (h @ w.T if b is None else h @ w.T + b)[:, :live]
            return _losses(logits, targets, weights, smoothing)

        given = [x for x in (hidden, head, bias) if x is not None]
        loss, plain = losses_of(*given)
        if not gradients:
            return loss, plain.detach()
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_(True) for x in given]
            return (loss, plain.detach(), *torch.autograd.grad(losses_of(*leaves)[0], leaves))

    def cases(self) -> Sequence[Case]:
        return [
            Case(
                ((n, c), (v, c), (n,), (n,), (v,) if bias else None),
                {"chunk": chunk, "gradients": gradients, "smoothing": smoothing, "live": live},
                {"targets": live},
                positive=("weights",),
                holes=("targets",),
            )
            for n, c, v, live, chunk, smoothing, bias in (
                (6, 4, 5, 5, 6, 0.1, True),
                (33, 8, 96, 65, 10, 0.1, True),
                (5, 3, 4, 2, 1, 0.0, False),
                (4, 3, 7, 7, 100, 0.25, False),
                (40, 8, 64, 49, 32, 0.0, True),
            )
            for gradients in (False, True)
        ]


def head_cross_entropy(
    hidden: Value, head: Value, bias: Value | None, targets: Value, weights: Value,
    *, chunk: int, gradients: bool, smoothing: float = 0.0, live: int | None = None,
) -> tuple[Value, Value]:  # fmt: skip
    """(smoothed loss, plain cross-entropy), both weighted sums -> []; see the op."""
    live = head.shape[0] if live is None else live
    outputs = op("head_cross_entropy").record(
        hidden, head, targets, weights, bias, chunk=chunk, gradients=gradients, smoothing=float(smoothing), live=live
    )
    return outputs[0], outputs[1]
