"""Cross-entropy of an output head with bias and label smoothing, a chunk of rows at a time.

Ids that only pad the vocabulary are left out of every product: heads are sliced, not masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ttrain.core.spec import TensorSpec
from ttrain.device.base import Kernel, Launch
from ttrain.device.torch.kernels.common import Attributes, Context, Specs, Tensor, chain, constant, copying, into
from ttrain.device.torch.kernels.loss import TargetRows, block_rows, row_blocks

aten = torch.ops.aten


class _Rows(TargetRows):
    """Per-row quantities, with the target's logit less the mean logit: what smoothing adds to the loss."""

    def __init__(self, targets: Tensor, weights: Tensor, smoothing: float, live: int, work: Sequence[Tensor]) -> None:
        super().__init__(targets, weights.view(-1, 1), work[:5])
        self.spread, self.smoothing, self.live = work[5], smoothing, live

    def measuring(self, logits: Tensor, rows: slice) -> list[Launch]:
        """spread <- logit of the target - mean of the logits, which are those of the block in fp32 at least."""
        if not self.smoothing:
            return []
        spread, sums = self.spread[rows], self.shifted[rows]
        return [
            partial(torch.gather, logits, 1, self.targets[rows], out=spread),
            partial(torch.sum, logits, 1, True, out=sums),
            partial(torch.sub, spread, sums, alpha=1 / self.live, out=spread),
        ]

    def subtract_targets(self, probabilities: Tensor, rows: slice) -> list[Launch]:
        """probabilities <- probabilities - (1 - smoothing) onehot(target) - smoothing / live."""
        if not self.smoothing:
            return self.subtract_one_hot(probabilities, rows)
        each = constant(self.smoothing / self.live, probabilities.dtype, probabilities.device)
        return [
            partial(torch.sub, probabilities, each, out=probabilities),
            *self.subtract_one_hot(probabilities, rows, 1 - self.smoothing),
        ]

    def summing_both(self, loss: Tensor, plain: Tensor) -> list[Launch]:
        """plain <- sum of weight * -log-probability; loss <- plain + smoothing * sum of weight * spread."""
        launches = self.summing(plain)
        if not self.smoothing:
            return [*launches, copying(loss, plain)]
        return [
            *launches,
            partial(torch.mul, self.spread, self.weights, out=self.shifted),
            partial(torch.sum, self.shifted, (0, 1), out=loss),
            partial(torch.add, plain, loss, alpha=self.smoothing, out=loss),
        ]


def _head_cross_entropy(context: Context) -> Kernel:
    def bind(ins: Sequence[Any], outs: Sequence[Tensor], attributes: Attributes, work: Sequence[Tensor]) -> Launch:
        hidden, head, targets, weights, bias = ins
        live = attributes["live"]
        rows, (logits, *rest) = _Rows(targets, weights, attributes["smoothing"], live, work[:6]), work[6:]
        wide_logits = rest.pop(0) if hidden.dtype is torch.bfloat16 else None
        gradients = _Gradients(outs[2:], head, live, rest) if attributes["gradients"] else None
        launches = rows.preparing() + (gradients.clearing() if gradients is not None else [])
        for chunk in row_blocks(hidden.shape[0], attributes["chunk"]):
            part = logits[: chunk.stop - chunk.start]
            launches.append(_product(hidden[chunk], head[:live], None if bias is None else bias[:live], part))
            for block in row_blocks(part.shape[0], block_rows(context, *part.shape)):
                at = slice(chunk.start + block.start, chunk.start + block.stop)
                source, target = part[block], part[block]
                if wide_logits is not None:
                    target = wide_logits[: block.stop - block.start]
                    launches.append(copying(target, source))
                launches += rows.measuring(target, at)
                if gradients is None:
                    launches += rows.log_probabilities(target, target, at)
                    continue
                launches += [*rows.probabilities(target, target, at), *rows.subtract_targets(target, at)]
                if wide_logits is not None:
                    launches.append(copying(source, target))
            if gradients is not None:
                launches += gradients.products(part, hidden, rows, chunk)
        finish = gradients.finishing() if gradients is not None else []
        return chain(*launches, *rows.summing_both(outs[0], outs[1]), *finish)

    def workspace(ins: Specs, outs: Specs, attributes: Attributes) -> list[TensorSpec]:
        hidden, live = ins[0], attributes["live"]
        count, dtype = hidden.shape[0], hidden.dtype.wide
        chunk = min(attributes["chunk"], count)
        per_row = TargetRows.specs(count, dtype)
        specs = [*per_row, per_row[-1], hidden.with_shape(chunk, live)]
        if dtype is not hidden.dtype:
            specs.append(TensorSpec((block_rows(context, chunk, live), live), dtype))
        if attributes["gradients"]:
            specs += _Gradients.specs(hidden, outs[3:], chunk, chunk < count)
        return specs

    return into(bind, workspace)


def _product(hidden: Tensor, head: Tensor, bias: Tensor | None, logits: Tensor) -> Launch:
    """logits <- hidden head^T + bias."""
    if bias is None:
        return partial(torch.mm, hidden, head.t(), out=logits)
    return partial(torch.addmm, bias, hidden, head.t(), out=logits)


class _Gradients:
    """dhidden, dhead and dbias of the head's product. The rows' weights scale hidden states, never the wide logits."""

    @staticmethod
    def specs(hidden: TensorSpec, parameters: Specs, chunk: int, several: bool) -> list[TensorSpec]:
        narrow = hidden.dtype.wide is not hidden.dtype
        specs = [hidden.with_shape(chunk, hidden.shape[1])]
        if narrow:
            specs.append(TensorSpec((hidden.shape[0], 1), hidden.dtype))
        sums = [spec.with_dtype(hidden.dtype.wide) for spec in parameters for _ in range(2)]
        return [*specs, *sums] if narrow and several else specs

    def __init__(self, outputs: Sequence[Tensor], head: Tensor, live: int, work: Sequence[Tensor]) -> None:
        self.dhidden, self.head, self.live = outputs[0], head[:live], live
        self.parameters = outputs[1:]  # dhead, and dbias where there is one
        free = list(work)
        self.scaled = free.pop(0)
        self.narrow = free.pop(0) if self.dhidden.dtype is torch.bfloat16 else None
        self.sums = list(zip(free[::2], free[1::2], strict=True))

    def clearing(self) -> list[Launch]:
        """Rows that pad the vocabulary get zeros."""
        pads = [gradient[self.live :] for gradient in self.parameters]
        return [pad.zero_ for pad in pads if pad.numel()]

    def products(self, dlogits: Tensor, hidden: Tensor, rows: TargetRows, chunk: slice) -> list[Launch]:
        weights, launches = rows.weights[chunk], []
        if self.narrow is not None:
            launches.append(copying(self.narrow[chunk], weights))
            weights = self.narrow[chunk]
        scaled, dhidden = self.scaled[: dlogits.shape[0]], self.dhidden[chunk]
        launches += [
            partial(torch.mul, hidden[chunk], weights, out=scaled),
            partial(torch.mm, dlogits, self.head, out=dhidden),
            partial(torch.mul, dhidden, weights, out=dhidden),
        ]
        first = chunk.start == 0
        for index, (gradient, other) in enumerate(zip(self.parameters, (scaled, weights), strict=False)):
            live = gradient[: self.live].view(self.live, -1)
            if first or self.sums:
                launches.append(partial(torch.mm, dlogits.t(), other, out=live))
            else:
                launches.append(partial(torch.addmm, live, dlogits.t(), other, out=live))
            if self.sums:
                total, widened = (part[: self.live].view(live.shape) for part in self.sums[index])
                if first:
                    launches.append(copying(total, live))
                else:
                    launches += [copying(widened, live), partial(torch.add, total, widened, out=total)]
        return launches

    def finishing(self) -> list[Launch]:
        """Sums of several chunks, rounded once."""
        pairs = zip(self.parameters, self.sums, strict=False)
        return [copying(gradient[: self.live], total[: self.live]) for gradient, (total, _) in pairs]


def table(context: Context) -> dict[str, Kernel]:
    return {"head_cross_entropy": _head_cross_entropy(context)}
