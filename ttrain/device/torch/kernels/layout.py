"""Rows that move elements: each is one strided copy a tensor."""

from __future__ import annotations

from functools import lru_cache, partial

import torch

from ttrain.device.base import Launch, chain
from ttrain.device.torch.kernels.common import Attributes, Context, Tensor, Tensors, copying, row


def heads_view(x: Tensor, parts: int, heads: int) -> Tensor:
    """[B, T, parts*H*D] as [parts, B, H, T, D], without a copy."""
    batch, time, width = x.shape
    return x.view(batch, time, parts, heads, width // (parts * heads)).permute(2, 0, 3, 1, 4)


@row("reshape")
@row("copy_reshape")
def _reshape(context: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    return copying(outs[0], ins[0].view(outs[0].shape))


@row("expand")
def _expand(context: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    return copying(outs[0], ins[0].expand(outs[0].shape))


@row("transpose")
def _transpose(context: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    return copying(outs[0], ins[0].mT)


@row("split_heads")
def _split_heads(context: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    parts = heads_view(ins[0], attributes["parts"], attributes["heads"])
    return chain(*(copying(out, part) for out, part in zip(outs, parts, strict=True)))


@row("merge_heads")
def _merge_heads(context: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    parts = heads_view(outs[0], len(ins), ins[0].shape[1])
    return chain(*(copying(part, given) for part, given in zip(parts, ins, strict=True)))


@row("index_select")
def _index_select(context: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    return partial(torch.index_select, ins[0], 1, _index(attributes["indices"], ins[0].device), out=outs[0])


@row("index_put")
def _index_put(context: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    y = outs[0]
    return chain(y.zero_, partial(y.index_copy_, 1, _index(attributes["indices"], y.device), ins[0]))


@lru_cache(maxsize=16)
def _index(rows: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device=device)
