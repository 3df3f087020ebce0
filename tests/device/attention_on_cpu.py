"""What aten's attention for GPUs computes, in fp64 on a CPU: stand-ins by their names in aten."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch

Tensor = torch.Tensor


def hidden(time: int, causal: bool, left: int | None, right: int | None, cumulative: Tensor | None = None) -> Tensor:
    """bool [query, key] of the keys that flash hides, of one sequence or of those that begin at such tokens."""
    place = torch.arange(time)
    ahead, right = place - place[:, None], 0 if causal else right
    found = torch.zeros(time, time, dtype=torch.bool)
    if cumulative is not None:
        number = torch.searchsorted(cumulative, place.int(), right=True)
        found |= number != number[:, None]
    if left is not None:
        found |= -ahead > left
    return found if right is None else found | (ahead > right)


def _wide(x: Tensor, heads: int) -> Tensor:
    return x.double().repeat_interleave(heads // x.shape[1], 1)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """y [B, H, T, D] in q's dtype, and the log-sum-exp of the scores, in fp32 at least; heads may share keys."""
    scores = (scale * q.double() @ _wide(k, q.shape[1]).mT).masked_fill(mask, -torch.inf)
    y = (scores.softmax(-1) @ _wide(v, q.shape[1])).to(q.dtype)
    return y, scores.logsumexp(-1).to(torch.promote_types(q.dtype, torch.float32))


def differentiate(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, statistic: Tensor, mask: Tensor, scale: float
) -> tuple[Tensor, ...]:
    """Gradients by the output and the log-sum-exp that the forward left, as the kernels form them."""
    heads, kv_heads = q.shape[1], k.shape[1]
    scores = (scale * q.double() @ _wide(k, heads).mT).masked_fill(mask, -torch.inf)
    probabilities, dy = (scores - statistic.double()[..., None]).exp(), dy.double()
    dscores = probabilities * (dy @ _wide(v, heads).mT - (dy * y.double()).sum(-1, keepdim=True))
    dq, wide = scale * dscores @ _wide(k, heads), (scale * dscores.mT @ q.double(), probabilities.mT @ dy)
    return tuple(x.to(q.dtype) for x in (dq, *(x.unflatten(1, (kv_heads, -1)).sum(2) for x in wide)))


def _rows(tensors: Any, cumulative: Tensor | None, longest: int) -> list[Tensor]:
    """[B, H, T, D] of what flash takes; all sequences are one row."""
    if cumulative is None:
        return [x.transpose(1, 2) for x in tensors]
    ends = cumulative.tolist()
    assert cumulative.dtype is torch.int32 and ends[0] == 0 and ends[-1] == tensors[0].shape[0]
    assert all(0 <= after - before <= longest for before, after in pairwise(ends))
    return [x.transpose(0, 1)[None] for x in tensors]


def _flash(*given: Any, scale: float, window_size_left: Any = None, window_size_right: Any = None) -> Any:
    *parts, begins, keys, most, _, dropout, causal, debug = given
    rows = _rows(parts, begins, most)
    assert keys is begins and not dropout and not debug
    mask = hidden(rows[0].shape[2], causal, window_size_left, window_size_right, begins)
    y, statistic = attend(*rows, mask, scale)
    whole = y.transpose(1, 2) if begins is None else y[0].transpose(0, 1)
    return whole.contiguous(), statistic if begins is None else statistic[0], None, None, None


def _flash_backward(*given: Any, scale: float, window_size_left: Any = None, window_size_right: Any = None) -> Any:
    *parts, statistic, begins, keys, most, _, dropout, causal, seed, _ = given
    rows = _rows(parts, begins, most)
    assert keys is begins and not dropout and seed.dtype is torch.uint64 and statistic.is_contiguous()
    mask = hidden(rows[0].shape[2], causal, window_size_left, window_size_right, begins)
    found = differentiate(*rows, statistic if begins is None else statistic[None], mask, scale)
    return tuple((x.transpose(1, 2) if begins is None else x[0].transpose(0, 1)).contiguous() for x in found)


def _cudnn(q: Any, k: Any, v: Any, bias: Any, sums: bool, dropout: float, causal: bool, *, scale: float) -> Any:
    assert bias is None and sums and not dropout
    y, statistic = attend(q, k, v, hidden(q.shape[2], causal, None, None), scale)
    return y, statistic[..., None], None, None, q.shape[2], k.shape[2], None, None, None


def _cudnn_backward(dy: Any, q: Any, k: Any, v: Any, y: Any, statistic: Any, *rest: Any, scale: float) -> Any:
    seed, _, *absent, most, _, dropout, causal = rest
    assert statistic.shape == (*q.shape[:3], 1) and not any(absent) and most == q.shape[2] and not dropout
    assert seed.dtype is torch.int64
    return differentiate(dy, q, k, v, y, statistic[..., 0], hidden(most, causal, None, None), scale)


def _efficient(q: Any, k: Any, v: Any, *rest: Any, scale: float) -> Any:
    """Statistics are padded to a multiple of 32 queries, with infinite ones."""
    assert q.shape[1] == k.shape[1], "it knows no heads that share keys"
    y, statistic, *_ = _cudnn(q, k, v, *rest, scale=scale)
    return y, torch.nn.functional.pad(statistic[..., 0], (0, -q.shape[2] % 32), value=torch.inf), None, None


def _efficient_backward(dy: Any, q: Any, k: Any, v: Any, *rest: Any, scale: float) -> Any:
    bias, y, statistic, _, _, dropout, _, causal = rest
    assert q.shape[1] == k.shape[1] and bias is None and not dropout and statistic.shape[2] % 32 == 0
    assert statistic[..., q.shape[2] :].isinf().all()
    mask = hidden(q.shape[2], causal, None, None)
    return *differentiate(dy, q, k, v, y, statistic[..., : q.shape[2]], mask, scale), None


_BY_NAME = {
    "_flash_attention_forward": _flash,
    "_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_cudnn_attention": _cudnn,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
    "_scaled_dot_product_efficient_attention": _efficient,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
}
ON_CPU = SimpleNamespace(**{name: SimpleNamespace(default=function) for name, function in _BY_NAME.items()})
