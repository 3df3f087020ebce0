"""Losses. Log-probabilities are formed in fp32 at least, a cache-sized block of rows at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from ttrain.core.spec import DType, TensorSpec
from ttrain.device.base import Launch, chain
from ttrain.device.torch.chunks import chunk_rows
from ttrain.device.torch.kernels.common import (
    Attributes,
    Context,
    Given,
    Specs,
    Tensor,
    Tensors,
    constant,
    copying,
    row,
)

aten = torch.ops.aten


def block_rows(context: Context, rows: int, vocabulary: int) -> int:
    """Rows of logits that a chain of passes works on at a time."""
    return max(1, min(rows, context.block // max(vocabulary, 1)))


class TargetRows:
    """Per-row quantities of a token loss: safe targets [N, 1], weights [N] (0 where there is no target)."""

    @staticmethod
    def specs(count: int, dtype: DType) -> list[TensorSpec]:
        index, number = TensorSpec((count, 1), DType.INT64), TensorSpec((count, 1), dtype)
        return [index, TensorSpec((count, 1), DType.BOOL), number, number, number]

    def __init__(self, targets: Tensor, weight: Tensor, work: Sequence[Tensor]) -> None:
        self.given, self.weight = targets.view(-1, 1), weight
        self.targets, self.valid, self.weights, self.logs, self.shifted = work

    def preparing(self) -> list[Launch]:
        return [
            partial(torch.clamp_min, self.given, 0, out=self.targets),
            partial(torch.eq, self.given, self.targets, out=self.valid),
            copying(self.weights, self.valid),
            partial(torch.mul, self.weights, self.weight, out=self.weights),
        ]

    def summing(self, loss: Tensor) -> list[Launch]:
        """loss <- - sum of weight * log-probability of the target."""
        return [
            partial(torch.mul, self.logs, self.weights, out=self.shifted),
            partial(torch.sum, self.shifted, (0, 1), out=loss),
            partial(torch.neg, loss, out=loss),
        ]

    def log_probabilities(self, logits: Tensor, wide_logits: Tensor, rows: slice) -> list[Launch]:
        """wide_logits <- log-softmax of the block's logits; logs <- those of the targets."""
        source = logits
        launches: list[Launch] = []
        if logits.dtype is not wide_logits.dtype:
            launches.append(copying(wide_logits, logits))
            source = wide_logits
        return [
            *launches,
            partial(aten._log_softmax.out, source, -1, False, out=wide_logits),
            partial(torch.gather, wide_logits, 1, self.targets[rows], out=self.logs[rows]),
        ]

    def probabilities(self, logits: Tensor, rows: slice) -> list[Launch]:
        """logits, fp32 at least, <- their softmax; logs <- log-probabilities of the targets.

        A log-probability is logit - max logit + log max probability: the largest probability never underflows. Two
        maxima cost less than a log-softmax and its exponential.
        """
        logs, maxima = self.logs[rows], self.shifted[rows]
        maximum = partial(torch.amax, logits, 1, True, out=maxima)
        return [
            partial(torch.gather, logits, 1, self.targets[rows], out=logs),
            maximum,
            partial(torch.sub, logs, maxima, out=logs),
            partial(aten._softmax.out, logits, -1, False, out=logits),
            maximum,
            partial(torch.log, maxima, out=maxima),
            partial(torch.add, logs, maxima, out=logs),
        ]

    def subtract_one_hot(self, probabilities: Tensor, rows: slice, factor: float = 1.0) -> list[Launch]:
        """probabilities <- probabilities - factor * onehot(target)."""
        picked = self.shifted[rows]
        return [
            partial(torch.gather, probabilities, 1, self.targets[rows], out=picked),
            partial(torch.sub, picked, constant(factor, picked.dtype, picked.device), out=picked),
            partial(torch.scatter, probabilities, 1, self.targets[rows], picked, out=probabilities),
        ]


def row_blocks(rows: int, step: int) -> list[slice]:
    """All rows in ranges of `step`, the last one shorter."""
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def _cross_entropy_workspace(context: Context, ins: Specs, outs: Specs, attributes: Attributes) -> list[TensorSpec]:
    count, vocabulary = ins[0].shape
    dtype = ins[0].dtype.accumulation
    block = block_rows(context, count, vocabulary)
    return [*TargetRows.specs(count, dtype), TensorSpec((block, vocabulary), dtype), TensorSpec((block,), dtype)]


@row("cross_entropy", _cross_entropy_workspace)
def _cross_entropy(context: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    logits, targets, weight = ins
    loss, log_sum_exp = outs
    rows, scratch = TargetRows(targets, weight, work[:5]), work[5]
    first = work[6]
    launches = rows.preparing()
    for block in row_blocks(logits.shape[0], scratch.shape[0]):
        part = logits[block]
        logs = scratch[: part.shape[0]]
        column = first[: part.shape[0]]
        launches += rows.log_probabilities(part, logs, block)
        # The log sum exp of a row is any of its logits less that logit's log-probability.
        launches += [copying(column, part[:, 0]), partial(torch.sub, column, logs[:, 0], out=log_sum_exp[block])]
    return chain(*launches, *rows.summing(loss))


def _cross_entropy_grad_workspace(
    context: Context, ins: Specs, outs: Specs, attributes: Attributes
) -> list[TensorSpec]:
    logits = ins[0]
    count, vocabulary = logits.shape
    dtype = logits.dtype.accumulation
    specs = TargetRows.specs(count, dtype)
    if dtype is not logits.dtype:
        specs.append(TensorSpec((block_rows(context, count, vocabulary), vocabulary), dtype))
    return specs


@row("cross_entropy_grad", _cross_entropy_grad_workspace)
def _cross_entropy_grad(context: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    logits, targets, _, weight = ins
    dlogits = outs[0]
    rows = TargetRows(targets, weight, work[:5])
    launches = rows.preparing()
    step = work[5].shape[0] if len(work) > 5 else block_rows(context, *logits.shape)
    for block in row_blocks(logits.shape[0], step):
        part, result = logits[block], dlogits[block]
        target = work[5][: part.shape[0]] if len(work) > 5 else result
        if target is not result:
            launches.append(copying(target, part))
            part = target
        launches += [
            partial(aten._softmax.out, part, -1, False, out=target),
            *rows.subtract_one_hot(target, block),
            partial(torch.mul, target, rows.weights[block], out=target),
        ]
        if target is not result:
            launches.append(copying(result, target))
    return chain(*launches)


class _HeadRows(TargetRows):
    """Per-row quantities, with the target's logit less the mean logit: what smoothing adds to the loss."""

    def __init__(self, targets: Tensor, weight: Tensor, smoothing: float, live: int, work: list[Tensor]) -> None:
        super().__init__(targets, weight.view(-1, 1), [work.pop(0) for _ in range(5)])
        self.smoothing, self.live = smoothing, live
        self.spread = work.pop(0) if smoothing else self.shifted

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
        if not self.smoothing:
            return self.summing(loss)
        return [
            *self.summing(plain),
            partial(torch.mul, self.spread, self.weights, out=self.shifted),
            partial(torch.sum, self.shifted, (0, 1), out=loss),
            partial(torch.add, plain, loss, alpha=self.smoothing, out=loss),
        ]


def _head_cross_entropy_workspace(
    context: Context, ins: Specs, outs: Specs, attributes: Attributes
) -> list[TensorSpec]:
    hidden, live, smoothing = ins[0], attributes["live"], attributes["smoothing"]
    count, dtype = hidden.shape[0], hidden.dtype.accumulation
    per_row, made = TargetRows.specs(count, dtype), outs[2 if smoothing else 1 :]
    summed = 2 * dtype.itemsize * hidden.shape[1] if made[1:] and dtype is not hidden.dtype else 0
    chunk = chunk_rows(count, live, context.logits, summed)
    specs = [*per_row, *per_row[-1:] * bool(smoothing), hidden.with_shape(chunk, live)]
    if dtype is not hidden.dtype:
        specs.append(TensorSpec((block_rows(context, chunk, live), live), dtype))
    if made:
        specs += _HeadGradients.specs(hidden, made[1:], chunk, chunk < count)
    return specs


@row("head_cross_entropy", _head_cross_entropy_workspace)
def _head_cross_entropy(context: Context, ins: Given, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    """Ids that only pad the vocabulary are left out of every product: heads are sliced, not masked."""
    (hidden, head, targets, weight, bias), rest = ins, list(work)
    live, smoothing = attributes["live"], attributes["smoothing"]
    rows, logits = _HeadRows(targets, weight, smoothing, live, rest), rest.pop(0)
    wide_logits = rest.pop(0) if hidden.dtype is torch.bfloat16 else None
    made = outs[2 if smoothing else 1 :]
    gradients = _HeadGradients(made, head, live, rest) if made else None
    launches = rows.preparing() + (gradients.clearing() if gradients is not None else [])
    for chunk in row_blocks(hidden.shape[0], logits.shape[0]):
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
            launches += [*rows.probabilities(target, at), *rows.subtract_targets(target, at)]
            if wide_logits is not None:
                launches.append(copying(source, target))
        if gradients is not None:
            launches += gradients.products(part, hidden, rows, chunk)
    finish = gradients.finishing() if gradients is not None else []
    return chain(*launches, *rows.summing_both(outs[0], outs[-1 if gradients is None else 1]), *finish)


def _product(hidden: Tensor, head: Tensor, bias: Tensor | None, logits: Tensor) -> Launch:
    """logits <- hidden head^T + bias."""
    if bias is None:
        return partial(torch.mm, hidden, head.t(), out=logits)
    return partial(torch.addmm, bias, hidden, head.t(), out=logits)


class _HeadGradients:
    """dhidden, dhead and dbias of the head's product. The rows' weights scale hidden states, never the wide logits."""

    @staticmethod
    def specs(hidden: TensorSpec, parameters: Specs, chunk: int, several: bool) -> list[TensorSpec]:
        narrow = hidden.dtype.accumulation is not hidden.dtype
        specs = [hidden.with_shape(chunk, hidden.shape[1])]
        if narrow:
            specs.append(TensorSpec((hidden.shape[0], 1), hidden.dtype))
        sums = [spec.with_dtype(hidden.dtype.accumulation) for spec in parameters for _ in range(2)]
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


def _squared_error_workspace(context: Context, ins: Specs, outs: Specs, attributes: Attributes) -> list[TensorSpec]:
    spec = TensorSpec(ins[0].shape, ins[0].dtype.accumulation)
    return [spec, spec] if ins[1].dtype is not spec.dtype else [spec]


@row("squared_error", _squared_error_workspace)
def _squared_error(context: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    prediction, target, weight = ins
    (loss,) = outs
    difference = work[0]
    launches: list[Launch] = []
    for given, scratch in zip((prediction, target), (difference, work[-1]), strict=True):
        if given.dtype is not difference.dtype:
            launches.append(copying(scratch, given))
    a = difference if prediction.dtype is not difference.dtype else prediction
    b = work[-1] if target.dtype is not difference.dtype else target
    return chain(
        *launches,
        partial(torch.sub, a, b, out=difference),
        partial(torch.mul, difference, difference, out=difference),
        partial(torch.sum, difference, tuple(range(difference.ndim)), out=loss),
        partial(torch.mul, loss, weight, out=loss),
    )


def _squared_error_grad_workspace(
    context: Context, ins: Specs, outs: Specs, attributes: Attributes
) -> list[TensorSpec]:
    prediction, target, weight = ins
    same = prediction.dtype is target.dtype is weight.dtype
    return [] if same else [TensorSpec(prediction.shape, weight.dtype)] * 2


@row("squared_error_grad", _squared_error_grad_workspace)
def _squared_error_grad(context: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    prediction, target, weight = ins
    (result,) = outs
    launches: list[Launch] = []
    if work:  # the weight is fp32: its product with bf16 differences is formed in fp32
        launches = [copying(work[0], prediction), copying(work[1], target)]
        prediction, target = work
        result = work[0]
    gradient = partial(aten.mse_loss_backward.grad_input, grad_input=result)
    launches.append(partial(gradient, weight.expand(prediction.shape), prediction, target, 0))
    return chain(*launches, *([copying(outs[0], result)] if work else []))
