"""Rows that move elements: each is one strided copy a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial

import torch

from ttrain.device.base import Kernel, Launch
from ttrain.device.torch.kernels.common import Attributes, Context, Tensor, chain, copying, inplace, into


def heads_view(x: Tensor, parts: int, heads: int) -> Tensor:
    """[B, T, parts*H*D] as [parts, B, H, T, D], without a copy."""
    batch, time, width = x.shape
    return x.view(batch, time, parts, heads, width // (parts * heads)).permute(2, 0, 3, 1, 4)


def _reshape(ins: Sequence[Tensor], outs: Sequence[Tensor], attributes: Attributes, work: Sequence[Tensor]) -> Launch:
    return copying(outs[0], ins[0].view(outs[0].shape))


def _expand(ins: Sequence[Tensor], outs: Sequence[Tensor], attributes: Attributes, work: Sequence[Tensor]) -> Launch:
    return copying(outs[0], ins[0].expand(outs[0].shape))


def _transpose(ins: Sequence[Tensor], outs: Sequence[Tensor], attributes: Attributes, work: Sequence[Tensor]) -> Launch:
    return copying(outs[0], ins[0].mT)


def _split_heads(
    ins: Sequence[Tensor], outs: Sequence[Tensor], attributes: Attributes, work: Sequence[Tensor]
) -> Launch:
    parts = heads_view(ins[0], attributes["parts"], attributes["heads"])
    return chain(*(copying(out, part) for out, part in zip(outs, parts, strict=True)))


def _merge_heads(
    ins: Sequence[Tensor], outs: Sequence[Tensor], attributes: Attributes, work: Sequence[Tensor]
) -> Launch:
    parts = heads_view(outs[0], len(ins), ins[0].shape[1])
    return chain(*(copying(part, given) for part, given in zip(parts, ins, strict=True)))


def _index_select(
    ins: Sequence[Tensor], outs: Sequence[Tensor], attributes: Attributes, work: Sequence[Tensor]
) -> Launch:
    return partial(torch.index_select, ins[0], 1, _index(attributes["indices"], ins[0].device), out=outs[0])


def _index_put(ins: Sequence[Tensor], outs: Sequence[Tensor], attributes: Attributes, work: Sequence[Tensor]) -> Launch:
    y = outs[0]
    return chain(y.zero_, partial(y.index_copy_, 1, _index(attributes["indices"], y.device), ins[0]))


@lru_cache(maxsize=16)
def _index(rows: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device=device)


def _nothing(ins: Sequence[Tensor], outs: Sequence[Tensor], attributes: Attributes, work: Sequence[Tensor]) -> Launch:
    return chain()


def table(context: Context) -> dict[str, Kernel]:
    return {
        "reshape": into(_reshape),
        "copy_reshape": into(_reshape),
        "all_reduce": into(_reshape),  # over one chip
        "all_reduce_state": inplace(_nothing),
        "expand": into(_expand),
        "transpose": into(_transpose),
        "split_heads": into(_split_heads),
        "merge_heads": into(_merge_heads),
        "index_select": into(_index_select),
        "index_put": into(_index_put),
    }
