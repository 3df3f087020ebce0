"""Attention that never forms its probabilities, by kernels of aten, and the choice among those of a GPU.

flash: in bf16 and fp16 on a GPU, with heads that share keys and windows; on a CPU causal only. varlen: the same for
    documents.
cudnn: for what flash takes, but windows.
efficient: memory-efficient attention, in fp32 too; without windows, on copies of heads that share keys.

A pass takes the attributes of a node and views by heads, [B, H, T, D], and returns new tensors. No kernel has dropout
by our random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch

from ttrain.core.attention_mask import CAUSAL, PAIRS, AttentionMask
from ttrain.device.base import Attributes, Launch, chain
from ttrain.device.torch.kernels import explicit
from ttrain.device.torch.kernels.common import NARROW, ROWS, TORCH_DTYPES, Call, Context, Tensor, spec_of
from ttrain.device.torch.kernels.costs import fastest
from ttrain.device.torch.kernels.layout import heads_view

aten = torch.ops.aten
BLOCKS = "blocks of rows"  # the explicit way
FLASH_FROM = (8, 0)  # compute capability of a GPU that has flash, and computes in bf16
SHORT = 128  # tokens; documents of fewer go by blocks of rows
_SEQUENCES = 2**16 - 1  # that a launch of flash takes
_LONGEST = 8192  # tokens of attention that is timed; beyond, the same is fastest
_AGREES = 0.02  # of their norm, by which results may differ from those of blocks of rows


def chosen(call: Call, q: Tensor, documents: bool) -> str:
    """Return the way on a GPU: as measured on it, or where it is only planned for the first of those to be measured."""
    context, names = call.context, _able(call.context, q, call.attributes["mask"], documents)
    if not names or context.attention not in ("planned", "measured"):
        return context.attention if names else BLOCKS
    if context.attention == "planned":
        call.way = ("the fastest on the GPU of " if names[1:] else "") + ", ".join(names)
        return names[0]
    how = {name: call.attributes[name] for name in ("heads", "kv_heads", "scale", "mask") if name in call.attributes}
    call.way = _measured(context, names, q.dtype, min(q.shape[2], _LONGEST), q.shape[3], **how)
    return call.way


def _able(context: Context, q: Tensor, mask: AttentionMask, documents: bool) -> tuple[str, ...]:
    """Names of the ways that take such queries on a GPU, first the one that is taken unless another is faster."""
    batch, _, time, width = q.shape
    known = time > (context.explicit_up_to or 0) and not (width % 8 or mask.biased or mask.name == PAIRS)
    flash, whole = q.dtype in NARROW and context.capability >= FLASH_FROM, mask.window is None and not documents
    ways = {
        "varlen": flash and documents and time >= 2 * SHORT and most_sequences(batch, time) <= _SEQUENCES,
        "flash": flash and not documents,
        "cudnn": flash and whole and width <= 128,
        "efficient": (flash or q.dtype in (torch.float32, torch.float16)) and whole,
    }
    return tuple(name for name, able in ways.items() if known and able and (width <= 256 or name == "efficient"))


@lru_cache(maxsize=256)
def _measured(context: Context, names: Sequence[str], dtype: torch.dtype, time: int, width: int, **how: Any) -> str:
    """Return the fastest way, forward and backward on one sequence, of those that agree with blocks of rows."""
    device, heads, shared = context.device, how["heads"], how.get("kv_heads", how["heads"])

    def bound(op: str, way: str, ins: Sequence[Tensor | None], outs: Sequence[Tensor]) -> Launch:
        kernel = ROWS[op](replace(context, attention=way))
        work = kernel.workspace([None if x is None else spec_of(x) for x in ins], [*map(spec_of, outs)], how)
        scratch = [torch.empty(x.shape, dtype=TORCH_DTYPES[x.dtype], device=device) for x in work]
        return kernel.bind(ins, outs, how, scratch)

    def ways() -> dict[str, Launch]:
        draw, found, expected = torch.Generator(device).manual_seed(0), dict[str, Launch](), list[Tensor]()
        sizes = [(1, time, count * width) for count in (heads, shared, shared, heads)]
        q, k, v, dy = (torch.randn(size, generator=draw, device=device).to(dtype) for size in sizes)
        last = [None, None, torch.arange(time, device=device)[None] % 300 if "varlen" in names else None]
        for name in (BLOCKS, *names):
            y, *grads = results = [torch.empty_like(x) for x in (q, q, k, v)]
            statistic = torch.empty(1, heads, time, device=device)
            forward = bound("attention", name, [q, k, v, *last], [y, statistic])
            backward = bound("attention_grad", name, [dy, q, k, v, y, statistic, *last], grads)
            launch = chain(forward, backward, partial(torch.cuda.synchronize, device))
            with suppress(RuntimeError):  # such as a GPU without the kernel
                launch()
                expected = expected or results
                if all((x - y).norm() <= _AGREES * y.norm() for x, y in zip(results, expected, strict=True)):
                    found[name] = launch
        return found

    key = f"attention {torch.cuda.get_device_name(device)} {dtype} {time}x{width} {names[0]} {how}"
    return fastest(key, (*names, BLOCKS), ways)


def most_sequences(batch: int, time: int) -> int:
    """Return how many sequences `sequences` finds at most."""
    return batch * (2 * (time // SHORT) + 1)


def sequences(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return which tokens are in documents of SHORT tokens or more, and sequences of which these are some.

    bool [B, T], and int32 [most_sequences + 1]: numbers of the tokens of all rows with which sequences begin, and after
    the last one the number of tokens, for sequences of none. What lies between two long documents is one sequence.
    positions int64 [B, T] count from 0 anew in every document of a row.
    """
    batch, time = positions.shape
    columns = torch.arange(time, device=positions.device)
    reach = (columns - positions + SHORT - 1).clamp_(max=time - 1)  # where a long document is at this position
    long = positions.gather(1, reach) == SHORT - 1
    begins = long & (positions == 0)
    begins[:, 1:] |= long[:, :-1] & ~long[:, 1:]
    begins[:, 0].fill_(True)
    numbers = torch.arange(1, most_sequences(batch, time) + 2, device=positions.device)
    return long, torch.searchsorted(begins.flatten().cumsum(0), numbers, out_int32=True)


def _for_flash(how: Attributes, begins: Tensor | None, given: Sequence[Tensor], *more: Tensor) -> tuple[Any, Any]:
    """Arguments of flash, which takes [B, T, H, D], or [B*T, H, D] of sequences, and a window before and after."""
    time, mask, causal = given[0].shape[2], how["mask"], how["mask"].name == CAUSAL
    rows = [x.transpose(1, 2) if begins is None else x.transpose(1, 2).flatten(0, 1) for x in given]
    settings = {"scale": how["scale"]}
    if mask.window is not None:
        settings |= {"window_size_left": mask.window - 1, "window_size_right": 0 if causal else mask.window - 1}
    return [*rows, *more, begins, begins, time, time, 0.0, causal], settings


def _flash(how: Attributes, *given: Tensor, begins: Tensor | None = None) -> Sequence[Tensor]:
    (batch, heads, time, _), (arguments, settings) = given[0].shape, _for_flash(how, begins, given)
    y, statistic, *_ = aten._flash_attention_forward.default(*arguments, False, **settings)
    statistic = statistic if begins is None else statistic.view(heads, batch, time).transpose(0, 1)
    return y.view(batch, time, heads, -1).transpose(1, 2), statistic


def _flash_grad(how: Attributes, *given: Tensor, begins: Tensor | None = None) -> Sequence[Tensor]:
    statistic = given[5] if begins is None else given[5].transpose(0, 1).flatten(1)
    arguments, settings = _for_flash(how, begins, given[:5], statistic)
    state = torch.empty(2, dtype=torch.uint64, device=statistic.device)  # of the generator: unused without dropout
    found = aten._flash_attention_backward.default(*arguments, state, state, **settings)
    return [x.view(part.transpose(1, 2).shape).transpose(1, 2) for x, part in zip(found, given[1:4], strict=True)]


def _on_cpu(name: str, how: Attributes, *given: Tensor) -> Any:
    return getattr(aten, name).default(*given, 0.0, True, scale=how["scale"])


def _spread(q: Tensor, *shared: Tensor) -> list[Tensor]:
    """Return q [B, H, T, D], and what has K heads with a head for each of q's; itself where it has as many."""
    return [q, *(x if x.shape == q.shape else x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in shared)]


def _with_sums(name: str, how: Attributes, *given: Tensor) -> Sequence[Tensor]:
    """Forward of cudnn, with sums [B, H, T, 1], or of efficient, with more sums than queries."""
    arguments = *(_spread(*given) if name == "efficient" else given), None, True, 0.0, how["mask"].name == CAUSAL
    function = getattr(aten, f"_scaled_dot_product_{name}_attention").default
    y, statistic, *_ = function(*arguments, scale=how["scale"])
    return y, statistic.flatten(2)[..., : y.shape[2]]


def _cudnn_grad(how: Attributes, *given: Tensor) -> Any:
    time, state = given[5].shape[2], torch.empty((), dtype=torch.int64, device=given[5].device)
    more = given[5].unsqueeze(3), state, state, None, None, None, time, time, 0.0, how["mask"].name == CAUSAL
    return aten._scaled_dot_product_cudnn_attention_backward.default(*given[:5], *more, scale=how["scale"])


def _efficient_grad(how: Attributes, dy: Tensor, *given: Tensor) -> Sequence[Tensor]:
    *parts, y, statistic = given
    padded = torch.nn.functional.pad(statistic, (0, -y.shape[2] % 32), value=torch.inf)  # to a multiple of 32 queries
    state = torch.empty((), dtype=torch.int64, device=y.device)
    more = None, y, padded, state, state, 0.0, [True, True, True, False], how["mask"].name == CAUSAL
    function = aten._scaled_dot_product_efficient_attention_backward.default
    found = function(dy, *_spread(*parts), *more, scale=how["scale"])
    return [x.unflatten(1, (part.shape[1], -1)).sum(2) for x, part in zip(found, parts, strict=False)]


_ON_CPU = "_scaled_dot_product_flash_attention_for_cpu"
_PASSES: dict[str, tuple[Callable[..., Sequence[Tensor]], Callable[..., Sequence[Tensor]]]] = {
    "flash_on_cpu": (partial(_on_cpu, _ON_CPU), partial(_on_cpu, f"{_ON_CPU}_backward")),
    "flash": (_flash, _flash_grad),
    "varlen": (_flash, _flash_grad),
    "cudnn": (partial(_with_sums, "cudnn"), _cudnn_grad),
    "efficient": (partial(_with_sums, "efficient"), _efficient_grad),
}
# What aten allocates beside its results, in sizes of the output: gradients of queries in fp32, and keys and values for
# each of the heads that share them; for sequences also what lies between them.
_MORE = {"flash_on_cpu": 0, "varlen": 8}


def emit(call: Call, way: str, number: int) -> None:
    """Emit pass number 0 or 1 of a way, forward or backward, whose queries are the input of that number.

    Of documents the short ones go by blocks of rows with a window, which is cheap, and the long ones by flash: so its
    sequences have a bound. Tokens of one document have no part in what is found for others, which is thrown away.
    """
    by_blocks, how, heads = (explicit.forward, explicit.backward)[number], call.attributes, call.attributes["heads"]
    if way == BLOCKS:
        return by_blocks(call)
    y, positions = heads_view(call.ins[4] if number else call.outs[0], 1, heads)[0], call.ins[-1]
    given, targets = explicit.by_heads(call.ins[number : number + 3], how), [y, *call.outs[1:]]
    if number:
        given = [heads_view(call.ins[0], 1, heads)[0], *given, y, call.ins[5]]
        targets = explicit.by_heads(call.outs, how)
    call.outside = sum(out.nbytes for out in call.outs) + _MORE.get(way, 4) * y.nbytes
    run = partial(_PASSES[way][number], how, *given)
    if way != "varlen":
        return call.emit_returned(run, targets)
    short, window = copy(call), how["mask"].window or SHORT
    short.attributes = {**how, "mask": replace(how["mask"], window=min(window, SHORT))}
    by_blocks(short)  # emits what becomes part of this call

    def launch() -> None:
        long, begins = sequences(positions)
        for target, found in zip(targets, run(begins=begins), strict=True):
            torch.where(long.view(y.shape[0], 1, -1, *(1,) * (target.ndim - 3)), found, target, out=target)

    call.emit(launch)
