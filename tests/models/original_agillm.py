"""AGILLM-3 in plain torch, on a state dictionary of the original: no caches, no fold, the whole text at once."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear


def slopes(heads: int) -> Tensor:
    """2^(-8 i / heads), i = 1..heads, for a power of two."""
    assert heads & (heads - 1) == 0
    return torch.tensor([2.0 ** (-8 * i / heads) for i in range(1, heads + 1)])


def visible(length: int, pairs: bool) -> Tensor:
    """Whether a query (row) sees a key (column)."""
    place = torch.arange(length)
    return place[None] // 2 <= place[:, None] // 2 if pairs else place[None] <= place[:, None]


def hidden(content: dict[str, Any], text: list[int], pairs: bool) -> Tensor:
    """Output of the last norm, [length, d], under the pair mask or the causal one."""
    core, heads = content["core"], content["cfg"]["heads"]
    x = core["emb.weight"][torch.tensor(text)]
    length, width = x.shape
    ahead = (torch.arange(length)[None] - torch.arange(length)[:, None]).clamp(min=0)
    bias = -slopes(heads)[:, None, None] * ahead + torch.where(visible(length, pairs), 0.0, -torch.inf)
    for number in range(content["cfg"]["layers"]):
        part = {name.split(".", 2)[2]: w for name, w in core.items() if name.startswith(f"blocks.{number}.")}
        y = layer_norm(x, (width,), part["ln1.weight"], part["ln1.bias"])
        q, k, v = (linear(y, part[f"mha.{n}.weight"]).view(length, heads, -1).transpose(0, 1) for n in "qkv")
        scores = (q @ part["mha.U"]) @ (k @ part["mha.U"]).mT / math.sqrt(width // heads)
        mixed = ((scores + bias).softmax(-1) @ v).transpose(0, 1).reshape(length, width)
        x = x + linear(mixed, part["mha.proj.weight"])
        y = layer_norm(x, (width,), part["ln2.weight"], part["ln2.bias"])
        inner = linear(y, part["ff.0.weight"], part["ff.0.bias"]).relu()
        x = x + linear(inner, part["ff.2.weight"], part["ff.2.bias"])
    return layer_norm(x, (width,), core["ln.weight"], core["ln.bias"])


def next_scores(content: dict[str, Any], text: list[int]) -> Tensor:
    """The AR head's scores of the token after a text."""
    return linear(hidden(content, text, pairs=False)[-1], content["ar"]["proj.weight"], content["ar"].get("proj.bias"))


def pair_scores(content: dict[str, Any], text: list[int]) -> tuple[Tensor, Tensor]:
    """The SAT head's scores of the two tokens after a text, and the gate's; a text of one token gets a row of zeros."""
    rows = hidden(content, text, pairs=True)[-2:]
    if len(rows) < 2:
        rows = torch.cat([torch.zeros_like(rows), rows])
    sat = content["sat"]
    return linear(rows, sat["proj.weight"], sat["proj.bias"]), linear(rows[0], sat["gate.weight"], sat["gate.bias"])
