"""Losses. Log-probabilities are formed in fp32 at least, a cache-sized block of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ttrain.device.torch.kernels.common import Call, Context, Tensor, accumulation, chunk_rows, constant_like, row

aten = torch.ops.aten


def _block_rows(context: Context, rows: int, vocabulary: int) -> int:
    """Rows of logits that a chain of passes works on at a time."""
    return max(1, min(rows, context.block // max(vocabulary, 1)))


class _TargetRows:
    """Per-row quantities of a token loss: safe targets [N, 1], weights [N, 1] (0 where there is no target).

    With smoothing also the `spread`, the target's logit less the mean logit, which is what smoothing adds to the loss.
    """

    def __init__(self, call: Call) -> None:
        self.emit, each, dtype = call.emit, (len(call.ins[0]), 1), accumulation(call.ins[0].dtype)
        self.smoothing = call.attributes.get("smoothing", 0.0)
        self.targets, self.valid = call.scratch(each, torch.int64), call.scratch(each, torch.bool)
        self.weights, self.logs, self.shifted = (call.scratch(each, dtype) for _ in range(3))
        self.spread = call.scratch(each, dtype) if self.smoothing else self.shifted

    def begin(self, targets: Tensor, weight: Tensor) -> None:
        given = targets.view(-1, 1)
        self.emit(torch.clamp_min, given, 0, out=self.targets)
        self.emit(torch.eq, given, self.targets, out=self.valid)
        self.emit(self.weights.copy_, self.valid)
        self.emit(torch.mul, self.weights, weight, out=self.weights)

    def sum(self, loss: Tensor, plain: Tensor) -> None:
        """plain <- sum of weight * -log-probability of the target; loss <- plain + smoothing * sum of weight * spread.

        Without smoothing there is a loss alone.
        """
        plain = plain if self.smoothing else loss
        self.emit(torch.mul, self.logs, self.weights, out=self.shifted)
        self.emit(torch.sum, self.shifted, (0, 1), out=plain)
        self.emit(torch.neg, plain, out=plain)
        if self.smoothing:
            self.emit(torch.mul, self.spread, self.weights, out=self.shifted)
            self.emit(torch.sum, self.shifted, (0, 1), out=loss)
            self.emit(torch.add, plain, loss, alpha=self.smoothing, out=loss)

    def measure(self, logits: Tensor, rows: slice) -> None:
        """spread <- logit of the target - mean of the logits, which are those of the block in fp32 at least."""
        if self.smoothing:
            spread, sums = self.spread[rows], self.shifted[rows]
            self.emit(torch.gather, logits, 1, self.targets[rows], out=spread)
            self.emit(torch.sum, logits, 1, True, out=sums)
            self.emit(torch.sub, spread, sums, alpha=1 / logits.shape[1], out=spread)

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

    def subtract_targets(self, probabilities: Tensor, rows: slice) -> None:
        """probabilities <- probabilities - (1 - smoothing) onehot(target) - smoothing / ids."""
        if self.smoothing:
            each = constant_like(self.smoothing / probabilities.shape[1], probabilities)
            self.emit(torch.sub, probabilities, each, out=probabilities)
        picked = self.shifted[rows]
        self.emit(torch.gather, probabilities, 1, self.targets[rows], out=picked)
        self.emit(torch.sub, picked, constant_like(1.0 - self.smoothing, picked), out=picked)
        self.emit(torch.scatter, probabilities, 1, self.targets[rows], picked, out=probabilities)


def _row_blocks(rows: int, step: int) -> Iterator[slice]:
    """All rows in ranges of `step`, the last one shorter."""
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


@row("cross_entropy")
def _cross_entropy(call: Call) -> None:
    (logits, targets, weight), (loss, log_sum_exp) = call.ins, call.outs
    rows, dtype = _TargetRows(call), accumulation(logits.dtype)
    step = _block_rows(call.context, *logits.shape)
    scratch, first = call.scratch((step, logits.shape[1]), dtype), call.scratch((step,), dtype)
    rows.begin(targets, weight)
    for block in _row_blocks(len(logits), step):
        part = logits[block]
        logs, column = scratch[: len(part)], first[: len(part)]
        rows.log_probabilities(part, logs, block)
        # The log sum exp of a row is any of its logits less that logit's log-probability.
        call.emit(column.copy_, part[:, 0])
        call.emit(torch.sub, column, logs[:, 0], out=log_sum_exp[block])
    rows.sum(loss, loss)


@row("cross_entropy_grad")
def _cross_entropy_grad(call: Call) -> None:
    (logits, targets, _, weight), dlogits = call.ins, call.outs[0]
    rows, step = _TargetRows(call), _block_rows(call.context, *logits.shape)
    wide = call.wide(logits[:step])
    narrow = wide.dtype is not logits.dtype
    rows.begin(targets, weight)
    for block in _row_blocks(len(logits), step):
        part, result = logits[block], dlogits[block]
        target = wide[: len(part)] if narrow else result
        if narrow:
            call.emit(target.copy_, part)
            part = target
        call.emit(aten._softmax.out, part, -1, False, out=target)
        rows.subtract_targets(target, block)
        call.emit(torch.mul, target, rows.weights[block], out=target)
        call.copy(target, result)


@row("head_cross_entropy", widens=True)
def _head_cross_entropy(call: Call) -> None:
    """Ids that only pad the vocabulary are left out of every product: heads are sliced, not masked."""
    (hidden, head, targets, weight, bias), live, rows = call.ins, call.attributes["live"], _TargetRows(call)
    made, wide = call.outs[2 if rows.smoothing else 1 :], accumulation(hidden.dtype)
    summed = 2 * wide.itemsize * hidden.shape[1] if made[1:] and wide is not hidden.dtype else 0
    logits = call.scratch((chunk_rows(len(hidden), live, call.context.logits, summed), live), hidden.dtype)
    block_rows = _block_rows(call.context, *logits.shape)
    wide_logits = None if wide is hidden.dtype else call.scratch((block_rows, live), wide)
    gradients = _HeadGradients(call, made, len(logits)) if made else None
    rows.begin(targets, weight.view(-1, 1))
    if gradients is not None:
        gradients.begin()
    for chunk in _row_blocks(hidden.shape[0], logits.shape[0]):
        part = logits[: chunk.stop - chunk.start]
        if bias is None:
            call.emit(torch.mm, hidden[chunk], head[:live].t(), out=part)
        else:
            call.emit(torch.addmm, bias[:live], hidden[chunk], head[:live].t(), out=part)
        for block in _row_blocks(len(part), block_rows):
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
    rows.sum(call.outs[0], call.outs[-1 if gradients is None else 1])
    if gradients is not None:
        gradients.finish()


class _HeadGradients:
    """dhidden, dhead and dbias of the head's product. The rows' weights scale hidden states, never the wide logits."""

    def __init__(self, call: Call, outputs: Sequence[Tensor], chunk: int) -> None:
        self.emit, self.live = call.emit, call.attributes["live"]
        self.hidden, self.head, self.dhidden = call.ins[0], call.ins[1][: self.live], outputs[0]
        self.parameters = outputs[1:]  # dhead, and dbias where there is one
        self.scaled = call.scratch((chunk, self.hidden.shape[1]), self.hidden.dtype)
        self.narrow: Tensor | None = None
        self.sums: list[tuple[Tensor, Tensor]] = []
        if accumulation(self.hidden.dtype) is not self.hidden.dtype:
            self.narrow = call.scratch((len(self.hidden), 1), self.hidden.dtype)
            if chunk < len(self.hidden):
                self.sums = [(call.wide(gradient), call.wide(gradient)) for gradient in self.parameters]

    def begin(self) -> None:
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


@row("squared_error")
def _squared_error(call: Call) -> None:
    *given, weight = call.ins
    loss, dtype = call.outs[0], accumulation(given[0].dtype)
    difference = call.scratch(given[0].shape, dtype)
    other = call.wide(given[1])
    if given[0].dtype is not dtype:
        call.emit(difference.copy_, given[0])
        given[0] = difference
    call.copy(given[1], other)
    call.emit(torch.sub, given[0], other, out=difference)
    call.emit(torch.mul, difference, difference, out=difference)
    call.emit(torch.sum, difference, tuple(range(difference.ndim)), out=loss)
    call.emit(torch.mul, loss, weight, out=loss)


@row("squared_error_grad")
def _squared_error_grad(call: Call) -> None:
    """The weight is fp32: its product with bf16 differences is formed in fp32."""
    *given, weight = call.ins
    result, same = call.outs[0], all(tensor.dtype is weight.dtype for tensor in given)
    wide = given if same else [call.scratch(result.shape, weight.dtype) for _ in given]
    for tensor, scratch in zip(given, wide, strict=True):
        call.copy(tensor, scratch)
    made = result if same else wide[0]
    call.emit(aten.mse_loss_backward.grad_input, weight.expand(result.shape), *wide, 0, grad_input=made)
    call.copy(made, result)
