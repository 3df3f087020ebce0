"""Losses. Log-probabilities are formed in fp32 at least, a cache-sized block of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator

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
    rows = _TargetRows(call)
    head = HeadProducts(call, rows.weights)
    block_rows = _block_rows(call.context, *head.logits.shape)
    wide = call.wide(head.logits[:block_rows])
    narrow = wide.dtype is not head.logits.dtype
    rows.begin(call.ins[2], call.ins[3].view(-1, 1))
    for chunk, part in head.chunks():
        for block in _row_blocks(len(part), block_rows):
            at = slice(chunk.start + block.start, chunk.start + block.stop)
            source = part[block]
            target = wide[: len(source)] if narrow else source
            call.copy(source, target)
            rows.measure(target, at)
            rows.log_probabilities(target, target, at)
            if head.made:
                call.emit(torch.exp, target, out=target)
                rows.subtract_targets(target, at)
                call.copy(target, source)
    rows.sum(call.outs[0], call.outs[1 if rows.smoothing else 0])


@row("head_log_probs", widens=True)
def _head_log_probs(call: Call) -> None:
    """Log-softmax of a chunk of rows at a time; rows without a target get 0."""
    rows, head = _TargetRows(call), HeadProducts(call, None)
    result, *entropies = call.outs
    wide = call.wide(head.logits)
    other = call.scratch(wide.shape, wide.dtype) if entropies else wide
    rows.begin(call.ins[2], constant_like(1.0, rows.weights))
    for chunk, part in head.chunks():
        target = wide[: len(part)]
        rows.log_probabilities(part, target, chunk)
        for entropy in entropies:
            call.emit(torch.exp, target, out=other[: len(part)])
            call.emit(torch.mul, other[: len(part)], target, out=target)
            call.emit(torch.sum, target, 1, out=entropy[chunk])
            call.emit(torch.neg, entropy[chunk], out=entropy[chunk])
    call.emit(torch.mul, rows.logs[:, 0], rows.weights[:, 0], out=result)


class HeadProducts:
    """The logits of a head, a chunk of rows at a time, and the gradients of hidden states, head and bias.

    Ids that only pad the vocabulary are left out of every product: heads are sliced, not masked. The rows' weights
    scale hidden states, never the wide logits; where there are none here, the gradients of the logits have them.
    """

    def __init__(self, call: Call, weights: Tensor | None) -> None:
        (self.hidden, head, *_, self.bias), self.live = call.ins, call.attributes["live"]
        self.emit, self.head, self.weights = call.emit, head[: self.live], weights
        # The gradients, if any.
        self.made = call.outs[1 + bool(call.attributes["smoothing"]) :] if "smoothing" in call.attributes else []
        self.parameters = self.made[1:]  # dhead, and dbias where there is one
        dtype, (count, width) = self.hidden.dtype, self.hidden.shape
        narrow = accumulation(dtype) is not dtype
        summed = 2 * accumulation(dtype).itemsize * width if self.parameters and narrow else 0
        rows = chunk_rows(count, self.live, call.context.logits, summed)
        self.logits = call.scratch((rows, self.live), dtype)
        self.scaled = call.scratch((rows, width), dtype) if self.made and weights is not None else self.hidden
        self.factors = call.scratch((count, 1), dtype)  # the weights, or ones
        self.sums = [(call.wide(each), call.wide(each)) for each in self.parameters if narrow and rows < count]

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield a chunk of rows and its logits; once the gradients are in their place, multiply by those."""
        if self.made:
            self._begin()
        for chunk in _row_blocks(len(self.hidden), len(self.logits)):
            part = self.logits[: chunk.stop - chunk.start]
            if self.bias is None:
                self.emit(torch.mm, self.hidden[chunk], self.head.t(), out=part)
            else:
                self.emit(torch.addmm, self.bias[: self.live], self.hidden[chunk], self.head.t(), out=part)
            yield chunk, part
            if self.made:
                self._multiply(part, chunk)
        for gradient, (total, _) in zip(self.parameters, self.sums, strict=False):  # rounded once
            self.emit(gradient[: self.live].copy_, total[: self.live])

    def _begin(self) -> None:
        for gradient in self.parameters:  # rows that pad the vocabulary get zeros
            if (pad := gradient[self.live :]).numel():
                self.emit(pad.zero_)
        if self.weights is not None:
            self.emit(self.factors.copy_, self.weights)
        elif self.bias is not None:
            self.emit(self.factors.fill_, 1.0)

    def _multiply(self, dlogits: Tensor, chunk: slice) -> None:
        given, factors, dhidden = self.hidden[chunk], self.factors[chunk], self.made[0][chunk]
        self.emit(torch.mm, dlogits, self.head, out=dhidden)
        if self.weights is not None:
            given = self.scaled[: len(dlogits)]
            self.emit(torch.mul, self.hidden[chunk], factors, out=given)
            self.emit(torch.mul, dhidden, factors, out=dhidden)
        first = chunk.start == 0
        for index, (gradient, other) in enumerate(zip(self.parameters, (given, factors), strict=False)):
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
