"""Rows that move elements: each is one strided copy a tensor."""

from __future__ import annotations

from functools import lru_cache

import torch

from ttrain.device.torch.kernels.common import Call, Tensor, row


def heads_view(x: Tensor, parts: int, heads: int) -> Tensor:
    """[B, T, parts*H*D] as [parts, B, H, T, D], without a copy."""
    batch, time, width = x.shape
    return x.view(batch, time, parts, heads, width // (parts * heads)).permute(2, 0, 3, 1, 4)


@row("reshape")
@row("copy_reshape")
def _reshape(call: Call) -> None:
    call.emit(call.outs[0].copy_, call.ins[0].view(call.outs[0].shape))


@row("expand")
def _expand(call: Call) -> None:
    call.emit(call.outs[0].copy_, call.ins[0].expand(call.outs[0].shape))


@row("transpose")
def _transpose(call: Call) -> None:
    call.emit(call.outs[0].copy_, call.ins[0].mT)


@row("split_heads")
def _split_heads(call: Call) -> None:
    parts = heads_view(call.ins[0], call.attributes["parts"], call.attributes["heads"])
    for out, part in zip(call.outs, parts, strict=True):
        call.emit(out.copy_, part)


@row("merge_heads")
def _merge_heads(call: Call) -> None:
    parts = heads_view(call.outs[0], len(call.ins), call.ins[0].shape[1])
    for part, given in zip(parts, call.ins, strict=True):
        call.emit(part.copy_, given)


@row("index_select")
def _index_select(call: Call) -> None:
    x = call.ins[0]
    call.emit(torch.index_select, x, 1, _index(call.attributes["indices"], x.device), out=call.outs[0])


@row("index_put")
def _index_put(call: Call) -> None:
    y = call.outs[0]
    call.emit(y.zero_)
    call.emit(y.index_copy_, 1, _index(call.attributes["indices"], y.device), call.ins[0])


@lru_cache(maxsize=16)
def _index(rows: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device=device)
