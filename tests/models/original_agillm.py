"""Scores of AGILLM-3 in plain torch, of a file of the original: no caches, no fold, the whole text at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from tests.models.plain_agillm import PlainAGILLM
from ttrain.models.agillm import AGILLM
from ttrain.models.agillm_weights import sizes_of
from ttrain.models.settings import AGILLMConfig


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
