"""Losses. Log-probabilities are formed in fp32 at least, a cache-sized block of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ttrain.core.spec import DType, TensorSpec
from ttrain.device.torch.chunks import chunk_rows
from ttrain.device.torch.kernels.common import Call, Context, Tensor, constant_like, row

aten = torch.ops.aten


def _block_rows(context: Context, rows: int, vocabulary: int) -> int:
    """Rows of logits that a chain of passes works on at a time."""
    return max(1, min(rows, context.block // max(vocabulary, 1)))


class _TargetRows:
    """Per-row quantities of a token loss: safe targets [N, 1], weights [N] (0 where there is no target)."""

    @staticmethod
    def specs(count: int, dtype: DType) -> list[TensorSpec]:
        index, number = TensorSpec((count, 1), DType.INT64), TensorSpec((count, 1), dtype)
        return [index, TensorSpec((count, 1), DType.BOOL), number, number, number]

    def __init__(self, call: Call, targets: Tensor, weight: Tensor, work: Sequence[Tensor]) -> None:
        self.emit = call.emit
        self.targets, valid, self.weights, self.logs, self.shifted = work
        given = targets.view(-1, 1)
        self.emit(torch.clamp_min, given, 0, out=self.targets)
        self.emit(torch.eq, given, self.targets, out=valid)
        self.emit(self.weights.copy_, valid)
        self.emit(torch.mul, self.weights, weight, out=self.weights)

    def sum(self, loss: Tensor) -> None:
        """loss <- - sum of weight * log-probability of the target."""
        self.emit(torch.mul, self.logs, self.weights, out=self.shifted)
        self.emit(torch.sum, self.shifted, (0, 1), out=loss)
        self.emit(torch.neg, loss, out=loss)

    def log_probabilities(self, logits: Tensor, wide_logits: Tensor, rows: slice) -> None:
        """wide_logits <- log-softmax of the block's logits; logs <- those of the targets."""
        if logits.dtype is not wide_logits.dtype:
            self.emit(wide_logits.copy_, logits)
            logits = wide_logits
        self.emit(aten._log_softmax.out, logits, -1, False, out=wide_logits)
        self.emit(torch.gather, wide_logits, 1, self.targets[rows], out=self.logs[rows])

    def probabilities(self, logits: Tensor, rows: slice) -> None:
        """logits, fp32 at least, <- their softmax; logs <- log-probabilities of the targets.

        A log-probability is logit - max logit + log max probability: the largest probability never underflows. Two
        maxima cost less than a log-softmax and its exponential.
        """
        logs, maxima = self.logs[rows], self.shifted[rows]
        self.emit(torch.gather, logits, 1, self.targets[rows], out=logs)
        self.emit(torch.amax, logits, 1, True, out=maxima)
        self.emit(torch.sub, logs, maxima, out=logs)
        self.emit(aten._softmax.out, logits, -1, False, out=logits)
        self.emit(torch.amax, logits, 1, True, out=maxima)
        self.emit(torch.log, maxima, out=maxima)
        self.emit(torch.add, logs, maxima, out=logs)

    def subtract_one_hot(self, probabilities: Tensor, rows: slice, factor: float = 1.0) -> None:
        """probabilities <- probabilities - factor * onehot(target)."""
        picked = self.shifted[rows]
        self.emit(torch.gather, probabilities, 1, self.targets[rows], out=picked)
        self.emit(torch.sub, picked, constant_like(factor, picked), out=picked)
        self.emit(torch.scatter, probabilities, 1, self.targets[rows], picked, out=probabilities)


def _row_blocks(rows: int, step: int) -> Iterator[slice]:
    """All rows in ranges of `step`, the last one shorter."""
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _cross_entropy_workspace(call: Call) -> list[TensorSpec]:
    (count, vocabulary), dtype = call.ins[0].shape, call.ins[0].dtype.accumulation
    block = _block_rows(call.context, count, vocabulary)
    return [*_TargetRows.specs(count, dtype), TensorSpec((block, vocabulary), dtype), TensorSpec((block,), dtype)]


@row("cross_entropy", _cross_entropy_workspace)
def _cross_entropy(call: Call) -> None:
    (logits, targets, weight), (loss, log_sum_exp), (*per_row, scratch, first) = call.ins, call.outs, call.work
    rows = _TargetRows(call, targets, weight, per_row)
    for block in _row_blocks(logits.shape[0], scratch.shape[0]):
        part = logits[block]
        logs, column = scratch[: part.shape[0]], first[: part.shape[0]]
        rows.log_probabilities(part, logs, block)
        # The log sum exp of a row is any of its logits less that logit's log-probability.
        call.emit(column.copy_, part[:, 0])
        call.emit(torch.sub, column, logs[:, 0], out=log_sum_exp[block])
    rows.sum(loss)


def _cross_entropy_grad_workspace(call: Call) -> list[TensorSpec]:
    (count, vocabulary), dtype = call.ins[0].shape, call.ins[0].dtype.accumulation
    block = TensorSpec((_block_rows(call.context, count, vocabulary), vocabulary), dtype)
    return [*_TargetRows.specs(count, dtype), *([] if dtype is call.ins[0].dtype else [block])]


@row("cross_entropy_grad", _cross_entropy_grad_workspace)
def _cross_entropy_grad(call: Call) -> None:
    (logits, targets, _, weight), dlogits, wide = call.ins, call.outs[0], call.work[5:]
    rows = _TargetRows(call, targets, weight, call.work[:5])
    for block in _row_blocks(logits.shape[0], _block_rows(call.context, *logits.shape)):
        part, result = logits[block], dlogits[block]
        target = result
        if wide:
            target = wide[0][: part.shape[0]]
            call.emit(target.copy_, part)
            part = target
        call.emit(aten._softmax.out, part, -1, False, out=target)
        rows.subtract_one_hot(target, block)
        call.emit(torch.mul, target, rows.weights[block], out=target)
        if wide:
            call.emit(result.copy_, target)


class _HeadRows(_TargetRows):
    """Per-row quantities, with the target's logit less the mean logit: what smoothing adds to the loss."""

    def __init__(self, call: Call, work: list[Tensor]) -> None:
        super().__init__(call, call.ins[2], call.ins[3].view(-1, 1), [work.pop(0) for _ in range(5)])
        self.smoothing, self.live = call.attributes["smoothing"], call.attributes["live"]
        self.spread = work.pop(0) if self.smoothing else self.shifted

    def measure(self, logits: Tensor, rows: slice) -> None:
        """spread <- logit of the target - mean of the logits, which are those of the block in fp32 at least."""
        if self.smoothing:
            spread, sums = self.spread[rows], self.shifted[rows]
            self.emit(torch.gather, logits, 1, self.targets[rows], out=spread)
            self.emit(torch.sum, logits, 1, True, out=sums)
            self.emit(torch.sub, spread, sums, alpha=1 / self.live, out=spread)

    def subtract_targets(self, probabilities: Tensor, rows: slice) -> None:
        """probabilities <- probabilities - (1 - smoothing) onehot(target) - smoothing / live."""
        if self.smoothing:
            each = constant_like(self.smoothing / self.live, probabilities)
            self.emit(torch.sub, probabilities, each, out=probabilities)
        self.subtract_one_hot(probabilities, rows, 1 - self.smoothing)

    def sum_both(self, loss: Tensor, plain: Tensor) -> None:
        """plain <- sum of weight * -log-probability; loss <- plain + smoothing * sum of weight * spread."""
        self.sum(plain if self.smoothing else loss)
        if self.smoothing:
            self.emit(torch.mul, self.spread, self.weights, out=self.shifted)
            self.emit(torch.sum, self.shifted, (0, 1), out=loss)
            self.emit(torch.add, plain, loss, alpha=self.smoothing, out=loss)


def _head_cross_entropy_workspace(call: Call) -> list[TensorSpec]:
    hidden, live, smoothing = call.ins[0], call.attributes["live"], call.attributes["smoothing"]
    count, dtype = hidden.shape[0], hidden.dtype.accumulation
    per_row, made = _TargetRows.specs(count, dtype), call.outs[2 if smoothing else 1 :]
    summed = 2 * dtype.itemsize * hidden.shape[1] if made[1:] and dtype is not hidden.dtype else 0
    chunk = chunk_rows(count, live, call.context.logits, summed)
    specs = [*per_row, *per_row[-1:] * bool(smoothing), hidden.with_shape(chunk, live)]
    if dtype is not hidden.dtype:
        specs.append(TensorSpec((_block_rows(call.context, chunk, live), live), dtype))
    if made:
        specs += _HeadGradients.specs(hidden, made[1:], chunk, chunk < count)
    return specs


@row("head_cross_entropy", _head_cross_entropy_workspace)
def _head_cross_entropy(call: Call) -> None:
    """Ids that only pad the vocabulary are left out of every product: heads are sliced, not masked."""
    (hidden, head, _, _, bias), rest, live = call.ins, list(call.work), call.attributes["live"]
    rows, logits = _HeadRows(call, rest), rest.pop(0)
    wide_logits = rest.pop(0) if hidden.dtype is torch.bfloat16 else None
    made = call.outs[2 if rows.smoothing else 1 :]
    gradients = _HeadGradients(call, made, rest) if made else None
    for chunk in _row_blocks(hidden.shape[0], logits.shape[0]):
        part = logits[: chunk.stop - chunk.start]
        if bias is None:
            call.emit(torch.mm, hidden[chunk], head[:live].t(), out=part)
        else:
            call.emit(torch.addmm, bias[:live], hidden[chunk], head[:live].t(), out=part)
        for block in _row_blocks(part.shape[0], _block_rows(call.context, *part.shape)):
            at = slice(chunk.start + block.start, chunk.start + block.stop)
            source, target = part[block], part[block]
            if wide_logits is not None:
                target = wide_logits[: block.stop - block.start]
                call.emit(target.copy_, source)
            rows.measure(target, at)
            if gradients is None:
                rows.log_probabilities(target, target, at)
                continue
            rows.probabilities(target, at)
            rows.subtract_targets(target, at)
            if wide_logits is not None:
                call.emit(source.copy_, target)
        if gradients is not None:
            gradients.multiply(part, rows, chunk)
    rows.sum_both(call.outs[0], call.outs[-1 if gradients is None else 1])
    if gradients is not None:
        gradients.finish()


class _HeadGradients:
    """dhidden, dhead and dbias of the head's product. The rows' weights scale hidden states, never the wide logits."""

    @staticmethod
    def specs(hidden: TensorSpec, parameters: Sequence[TensorSpec], chunk: int, several: bool) -> list[TensorSpec]:
        narrow = hidden.dtype.accumulation is not hidden.dtype
        specs = [hidden.with_shape(chunk, hidden.shape[1])]
        if narrow:
            specs.append(TensorSpec((hidden.shape[0], 1), hidden.dtype))
        sums = [spec.with_dtype(hidden.dtype.accumulation) for spec in parameters for _ in range(2)]
        return [*specs, *sums] if narrow and several else specs

    def __init__(self, call: Call, outputs: Sequence[Tensor], work: list[Tensor]) -> None:
        self.emit, self.live = call.emit, call.attributes["live"]
        self.hidden, self.head, self.dhidden = call.ins[0], call.ins[1][: self.live], outputs[0]
        self.parameters = outputs[1:]  # dhead, and dbias where there is one
        self.scaled = work.pop(0)
        self.narrow = work.pop(0) if self.dhidden.dtype is torch.bfloat16 else None
        self.sums = list(zip(work[::2], work[1::2], strict=True))
        for gradient in self.parameters:  # rows that pad the vocabulary get zeros
            if (pad := gradient[self.live :]).numel():
                self.emit(pad.zero_)

    def multiply(self, dlogits: Tensor, rows: _TargetRows, chunk: slice) -> None:
        weights = rows.weights[chunk]
        if self.narrow is not None:
            self.emit(self.narrow[chunk].copy_, weights)
            weights = self.narrow[chunk]
        scaled, dhidden = self.scaled[: dlogits.shape[0]], self.dhidden[chunk]
        self.emit(torch.mul, self.hidden[chunk], weights, out=scaled)
        self.emit(torch.mm, dlogits, self.head, out=dhidden)
        self.emit(torch.mul, dhidden, weights, out=dhidden)
        first = chunk.start == 0
        for index, (gradient, other) in enumerate(zip(self.parameters, (scaled, weights), strict=False)):
            live = gradient[: self.live].view(self.live, -1)
            if first or self.sums:
                self.emit(torch.mm, dlogits.t(), other, out=live)
            else:
                self.emit(torch.addmm, live, dlogits.t(), other, out=live)
            if self.sums:
                total, widened = (part[: self.live].view(live.shape) for part in self.sums[index])
                self.emit((total if first else widened).copy_, live)
                if not first:
                    self.emit(torch.add, total, widened, out=total)

    def finish(self) -> None:
        """Sums of several chunks, rounded once."""
        for gradient, (total, _) in zip(self.parameters, self.sums, strict=False):
            self.emit(gradient[: self.live].copy_, total[: self.live])


def _squared_error_workspace(call: Call) -> list[TensorSpec]:
    spec = call.ins[0].with_dtype(call.ins[0].dtype.accumulation)
    return [spec, spec] if call.ins[1].dtype is not spec.dtype else [spec]


@row("squared_error", _squared_error_workspace)
def _squared_error(call: Call) -> None:
    *given, weight = call.ins
    loss, difference = call.outs[0], call.work[0]
    for number, scratch in enumerate((difference, call.work[-1])):
        if given[number].dtype is not difference.dtype:
            call.emit(scratch.copy_, given[number])
            given[number] = scratch
    call.emit(torch.sub, *given, out=difference)
    call.emit(torch.mul, difference, difference, out=difference)
    call.emit(torch.sum, difference, tuple(range(difference.ndim)), out=loss)
    call.emit(torch.mul, loss, weight, out=loss)


def _squared_error_grad_workspace(call: Call) -> list[TensorSpec]:
    prediction, target, weight = call.ins
    same = prediction.dtype is target.dtype is weight.dtype
    return [] if same else [prediction.with_dtype(weight.dtype)] * 2


@row("squared_error_grad", _squared_error_grad_workspace)
def _squared_error_grad(call: Call) -> None:
    *given, weight = call.ins
    result = call.outs[0]
    if call.work:  # the weight is fp32: its product with bf16 differences is formed in fp32
        for scratch, tensor in zip(call.work, given, strict=True):
            call.emit(scratch.copy_, tensor)
        given, result = list(call.work), call.work[0]
    call.emit(aten.mse_loss_backward.grad_input, weight.expand(given[0].shape), *given, 0, grad_input=result)
    if call.work:
        call.emit(call.outs[0].copy_, result)
