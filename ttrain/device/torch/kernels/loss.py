"""Losses. Log-probabilities are formed in fp32 at least, a cache-sized block of rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from ttrain.core.spec import DType, TensorSpec
from ttrain.device.base import Kernel, Launch
from ttrain.device.torch.kernels.common import (
    Attributes,
    Context,
    Specs,
    Tensor,
    chain,
    constant,
    copying,
    into,
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

    def probabilities(self, logits: Tensor, wide_logits: Tensor, rows: slice) -> list[Launch]:
        """wide_logits <- softmax of the block's logits; logs <- log-probabilities of the targets.

        A log-probability is logit - max logit + log max probability: the largest probability never underflows. Two
        maxima cost less than a log-softmax and its exponential.
        """
        logs, maxima = self.logs[rows], self.shifted[rows]
        launches = [] if logits.dtype is wide_logits.dtype else [copying(wide_logits, logits)]
        maximum = partial(torch.amax, wide_logits, 1, True, out=maxima)
        return [
            *launches,
            partial(torch.gather, wide_logits, 1, self.targets[rows], out=logs),
            maximum,
            partial(torch.sub, logs, maxima, out=logs),
            partial(aten._softmax.out, wide_logits, -1, False, out=wide_logits),
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


def _cross_entropy(context: Context) -> Kernel:
    def bind(ins: Sequence[Tensor], outs: Sequence[Tensor], attributes: Attributes, work: Sequence[Tensor]) -> Launch:
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

    def workspace(ins: Specs, outs: Specs, attributes: Attributes) -> list[TensorSpec]:
        count, vocabulary = ins[0].shape
        dtype = ins[0].dtype.wide
        block = block_rows(context, count, vocabulary)
        return [*TargetRows.specs(count, dtype), TensorSpec((block, vocabulary), dtype), TensorSpec((block,), dtype)]

    return into(bind, workspace)


def _cross_entropy_grad(context: Context) -> Kernel:
    def bind(ins: Sequence[Tensor], outs: Sequence[Tensor], attributes: Attributes, work: Sequence[Tensor]) -> Launch:
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

    def workspace(ins: Specs, outs: Specs, attributes: Attributes) -> list[TensorSpec]:
        logits = ins[0]
        count, vocabulary = logits.shape
        dtype = logits.dtype.wide
        specs = TargetRows.specs(count, dtype)
        if dtype is not logits.dtype:
            specs.append(TensorSpec((block_rows(context, count, vocabulary), vocabulary), dtype))
        return specs

    return into(bind, workspace)


def _linear_cross_entropy(context: Context) -> Kernel:
    def bind(ins: Sequence[Tensor], outs: Sequence[Tensor], attributes: Attributes, work: Sequence[Tensor]) -> Launch:
        hidden, head, targets, weight = ins
        rows, (logits, *rest) = TargetRows(targets, weight, work[:5]), work[5:]
        wide_logits = rest.pop(0) if hidden.dtype is torch.bfloat16 else None
        gradients = _HeadGradients(outs[1], outs[2], head, rest) if attributes["gradients"] else None
        launches = rows.preparing()
        chunks = row_blocks(hidden.shape[0], attributes["chunk"])
        for chunk in chunks:
            part = logits[: chunk.stop - chunk.start]
            launches.append(partial(torch.mm, hidden[chunk], head.t(), out=part))
            step = block_rows(context, *part.shape)
            for block in row_blocks(part.shape[0], step):
                at = slice(chunk.start + block.start, chunk.start + block.stop)
                target = part[block] if wide_logits is None else wide_logits[: block.stop - block.start]
                if gradients is None:
                    launches += rows.log_probabilities(part[block], target, at)
                    continue
                launches += [*rows.probabilities(part[block], target, at), *rows.subtract_one_hot(target, at)]
                if wide_logits is not None:
                    launches.append(copying(part[block], target))
            if gradients is not None:
                launches += gradients.products(part, hidden, rows, chunk)
        finish = gradients.finishing() if gradients is not None else []
        return chain(*launches, *rows.summing(outs[0]), *finish)

    def workspace(ins: Specs, outs: Specs, attributes: Attributes) -> list[TensorSpec]:
        hidden, head = ins[0], ins[1]
        count, vocabulary, dtype = hidden.shape[0], head.shape[0], hidden.dtype.wide
        chunk = min(attributes["chunk"], count)
        specs = [*TargetRows.specs(count, dtype), hidden.with_shape(chunk, vocabulary)]
        if dtype is not hidden.dtype:
            specs.append(TensorSpec((block_rows(context, chunk, vocabulary), vocabulary), dtype))
        if attributes["gradients"]:
            specs += _HeadGradients.specs(hidden, head, chunk, dtype, chunk < count)
        return specs

    return into(bind, workspace)


class _HeadGradients:
    """dhidden and dhead of the head's product. The rows' weights scale hidden states, never the wide logits."""

    @staticmethod
    def specs(hidden: TensorSpec, head: TensorSpec, chunk: int, dtype: DType, several: bool) -> list[TensorSpec]:
        narrow = dtype is not hidden.dtype
        specs = [hidden.with_shape(chunk, hidden.shape[1])]
        if narrow:
            specs.append(TensorSpec((hidden.shape[0], 1), hidden.dtype))
        return [*specs, head.with_dtype(dtype), head.with_dtype(dtype)] if narrow and several else specs

    def __init__(self, dhidden: Tensor, dhead: Tensor, head: Tensor, work: Sequence[Tensor]) -> None:
        self.dhidden, self.dhead, self.head = dhidden, dhead, head
        free = list(work)
        self.scaled = free.pop(0)
        self.narrow = free.pop(0) if dhidden.dtype is torch.bfloat16 else None
        self.sums = free

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
        if first or self.sums:
            launches.append(partial(torch.mm, dlogits.t(), scaled, out=self.dhead))
        else:
            launches.append(partial(torch.addmm, self.dhead, dlogits.t(), scaled, out=self.dhead))
        if self.sums:
            total, widened = self.sums
            if first:
                launches.append(copying(total, self.dhead))
            else:
                launches += [copying(widened, self.dhead), partial(torch.add, total, widened, out=total)]
        return launches

    def finishing(self) -> list[Launch]:
        return [copying(self.dhead, self.sums[0])] if self.sums else []


def _squared_error() -> Kernel:
    def bind(ins: Sequence[Tensor], outs: Sequence[Tensor], attributes: Attributes, work: Sequence[Tensor]) -> Launch:
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

    def workspace(ins: Specs, outs: Specs, attributes: Attributes) -> list[TensorSpec]:
        spec = TensorSpec(ins[0].shape, ins[0].dtype.wide)
        return [spec, spec] if ins[1].dtype is not spec.dtype else [spec]

    return into(bind, workspace)


def _squared_error_grad(
    ins: Sequence[Tensor], outs: Sequence[Tensor], attributes: Attributes, work: Sequence[Tensor]
) -> Launch:
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


def _squared_error_grad_workspace(ins: Specs, outs: Specs, attributes: Attributes) -> list[TensorSpec]:
    prediction, target, weight = ins
    same = prediction.dtype is target.dtype is weight.dtype
    return [] if same else [TensorSpec(prediction.shape, weight.dtype)] * 2


def table(context: Context) -> dict[str, Kernel]:
    rows: dict[str, Callable[[Context], Kernel]] = {
        "cross_entropy": _cross_entropy,
        "cross_entropy_grad": _cross_entropy_grad,
        "linear_cross_entropy": _linear_cross_entropy,
    }
    return {
        **{name: build(context) for name, build in rows.items()},
        "squared_error": _squared_error(),
        "squared_error_grad": into(_squared_error_grad, _squared_error_grad_workspace),
    }
