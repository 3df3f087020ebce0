"""AGILLM-3 in plain PyTorch, written from the description: no fold, no cache, every window by itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, layer_norm, linear

from ttrain.models.agillm import AGILLM
from ttrain.models.agillm_weights import sizes_of
from ttrain.models.settings import AGILLMConfig


def slopes(heads: int) -> list[float]:
    """The usual ALiBi slopes, by their recipe for any number of heads."""

    def of_power(count: int) -> list[float]:
        start = 2 ** (-(2 ** -(math.log2(count) - 3)))
        return [start * start**index for index in range(count)]

    if math.log2(heads).is_integer():
        return of_power(heads)
    below = 2 ** math.floor(math.log2(heads))
    return of_power(below) + of_power(2 * below)[0::2][: heads - below]


@dataclass
class PlainAGILLM:
    """Parameters under ttrain's paths; `standard` counts distance both ways instead of toward the future."""

    values: Mapping[str, Tensor]
    layers: int
    heads: int
    standard: bool = False

    def hidden(self, tokens: Tensor, pairs: bool) -> Tensor:
        """Output of the last norm [B, T, C]."""
        p = self.values
        x = p["embedding.weight"][tokens]
        batch, time, width = x.shape
        bias = self._bias(time, pairs).to(x.dtype)
        for number in range(self.layers):
            at = f"blocks.{number}."
            y = self._norm(x, at + "attention_norm")
            q, k, v = (
                linear(y, p[f"{at}attention.{name}.weight"]).reshape(batch, time, self.heads, -1).transpose(1, 2)
                for name in ("query", "key", "value")
            )
            shared = p[at + "attention.rank_matrix"]
            scores = (q @ shared) @ (k @ shared).transpose(2, 3) / math.sqrt(width // self.heads) + bias
            mixed = (torch.softmax(scores, -1) @ v).transpose(1, 2).reshape(batch, time, width)
            x = x + linear(mixed, p[at + "attention.projection.weight"])
            y = self._norm(x, at + "feed_forward_norm")
            inner = torch.relu(linear(y, p[at + "feed_forward.up.weight"], p[at + "feed_forward.up.bias"]))
            x = x + linear(inner, p[at + "feed_forward.down.weight"], p[at + "feed_forward.down.bias"])
        return self._norm(x, "norm")

    def _norm(self, x: Tensor, path: str) -> Tensor:
        return layer_norm(x, x.shape[-1:], self.values[path + ".weight"], self.values[path + ".bias"], 1e-5)

    def _bias(self, time: int, pairs: bool) -> Tensor:
        place = torch.arange(time)
        ahead = place - place[:, None]
        distance = ahead.abs() if self.standard else ahead.clamp(min=0)
        unseen = place // 2 > place[:, None] // 2 if pairs else ahead > 0
        bias = -torch.tensor(slopes(self.heads), dtype=torch.float64)[:, None, None] * distance
        return bias.masked_fill(unseen, -math.inf)

    def ar_logits(self, tokens: Tensor) -> Tensor:
        p = self.values
        head = p.get("ar_head.weight", p["embedding.weight"])
        return linear(self.hidden(tokens, pairs=False), head, p.get("ar_head.bias"))

    def ar_losses(self, tokens: Tensor, targets: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
        """(smoothed, plain) mean over the targets that are there."""
        return _losses(self.ar_logits(tokens).flatten(0, 1), targets.flatten(), smoothing)

    def sat_losses(
        self, tokens: Tensor, targets: Tensor, smoothing: float, starts: list[int], legacy: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(smoothed, plain, gate): every window's two rows against its two tokens, one after the other."""
        hidden, p = self.hidden(tokens, pairs=True), self.values
        logits, wanted, gates = [], [], []
        for start in starts:
            window = linear(hidden[:, start : start + 2], p["sat_head.weight"], p["sat_head.bias"])
            gate = linear(hidden[:, start], p["sat_head.gate.weight"], p["sat_head.gate.bias"])
            first = 1 if legacy else start + 2  # of the two tokens; token t is targets[t - 1]
            both = targets[:, first - 1 : first + 1]
            logits.append(window.flatten(0, 1))
            wanted.append(both.flatten())
            gates += [gate[row] for row in range(len(tokens)) if (both[row] >= 0).all()]
        emit = torch.ones(len(gates), dtype=torch.int64)
        return *_losses(torch.cat(logits), torch.cat(wanted), smoothing), cross_entropy(torch.stack(gates), emit)


def _losses(logits: Tensor, targets: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    found = [cross_entropy(logits, targets, ignore_index=-1, label_smoothing=share) for share in (smoothing, 0.0)]
    return found[0], found[1]


def plain(content: dict[str, Any]) -> PlainAGILLM:
    """Return the model of a file, with our names of its weights."""
    model = AGILLM(AGILLMConfig(preset=None, **sizes_of(content)))
    return PlainAGILLM(model.from_original(content), model.layers, model.heads)


def next_scores(content: dict[str, Any], text: list[int]) -> Tensor:
    """The AR head's scores of the token after a text."""
    return plain(content).ar_logits(torch.tensor([text]))[0, -1]


def pair_scores(content: dict[str, Any], text: list[int]) -> tuple[Tensor, Tensor]:
    """The SAT head's scores of the two tokens after a text, and the gate's; a text of one token gets a row of zeros."""
    rows = plain(content).hidden(torch.tensor([text]), pairs=True)[0, -2:]
    if len(rows) < 2:
        rows = torch.cat([torch.zeros_like(rows), rows])
    sat = content["sat"]
    return linear(rows, sat["proj.weight"], sat["proj.bias"]), linear(rows[0], sat["gate.weight"], sat["gate.bias"])
