"""Attention against torch's own scaled_dot_product_attention in fp64: each feature, and some together."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from tests.ops.harness import Interpreter, launch_row
from tests.ops.test_functional import assert_equals_torch
from ttrain import ops
from ttrain.core.attention_mask import AttentionMask, alibi_slopes
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.torch.device import TorchDevice
from ttrain.device.torch.kernels.common import Call, Context
from ttrain.device.torch.kernels.explicit import Block, ScoreBias
from ttrain.graph import Graph, Value

BATCH, TIME, HEADS, WIDTH = 2, 11, 6, 4
SHAPE = (BATCH, TIME, HEADS * WIDTH)
SETTINGS: list[dict[str, Any]] = [
    {},
    {"mask": "full"},
    {"mask": "pairs"},
    {"window": 4},
    {"mask": "full", "window": 3},
    {"kv_heads": 2},
    {"kv_heads": 1, "window": 5},
    {"bias": (1, HEADS, TIME, TIME)},
    {"bias": (BATCH, 1, TIME, TIME), "kv_heads": 3, "mask": "pairs", "window": 2},
    {"scale": 0.9, "kv_heads": 2},
    {"documents": True},
    {"documents": True, "mask": "full", "kv_heads": 2, "bias": (1, HEADS, TIME, TIME)},
]
STARTS = torch.tensor([[0] * 4 + [4] * 6 + [10], [0] + [1] * 10])  # of the document that each token of a row is in


def in_torch(how: Mapping[str, Any], q: Any, k: Any, v: Any, bias: Any = None) -> torch.Tensor:
    def by_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
        return x.unflatten(-1, (heads, -1)).transpose(1, 2).repeat_interleave(HEADS // heads, 1)

    query, key = torch.arange(TIME)[:, None], torch.arange(TIME)
    last = {"causal": query, "pairs": query // 2 * 2 + 1, "full": query * 0 + TIME}[how.get("mask", "causal")]
    hidden = (key > last) | ((key - query).abs() >= how.get("window", TIME))
    if "documents" in how:
        hidden = hidden | (STARTS[:, None, :, None] != STARTS[:, None, None, :])
    bias = torch.zeros(1, 1, TIME, TIME, dtype=torch.float64) if bias is None else bias
    kv_heads = how.get("kv_heads", HEADS)
    y = torch.nn.functional.scaled_dot_product_attention(
        by_heads(q, HEADS), by_heads(k, kv_heads), by_heads(v, kv_heads), bias.masked_fill(hidden, float("-inf")),
        scale=how.get("scale"),
    )  # fmt: skip
    return y.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("how", SETTINGS, ids=str)
def test_forward_and_every_gradient_equal_torchs(how: dict[str, Any]) -> None:
    settings = {key: value for key, value in how.items() if key not in ("bias", "documents")}

    def ours(q: Value, k: Value, v: Value, bias: Value | None = None) -> Value:
        if "documents" in how:
            settings["positions"] = q.graph.input("positions", TensorSpec((BATCH, TIME), DType.INT64))
        return ops.attention(q, k, v, heads=HEADS, bias=bias, **settings)

    narrow = (BATCH, TIME, how.get("kv_heads", HEADS) * WIDTH)
    generator, shapes = np.random.default_rng(5), [SHAPE, narrow, narrow, *([how["bias"]] if "bias" in how else [])]
    feeds = {"positions": (torch.arange(TIME) - STARTS).numpy()}
    given = [generator.standard_normal(shape) for shape in shapes]
    assert_equals_torch(ours, partial(in_torch, how), given, feeds, Interpreter(TorchDevice("cpu", threads=1)))


def test_grouped_heads_copy_no_keys_and_rows_without_conditions_stay() -> None:
    """A device whose row has no bias runs products over the heads of the keys."""
    from ttrain.graph.passes import decompose

    graph = Graph()
    q = graph.input("q", TensorSpec(SHAPE))
    k = graph.input("k", TensorSpec((BATCH, TIME, 2 * WIDTH)))
    bias = graph.input("bias", TensorSpec((1, 1, TIME, TIME)))
    graph.output("shared", ops.attention(q, k, k, heads=HEADS, kv_heads=2, bias=bias))
    graph.output("plain", ops.attention(q, q, q, heads=HEADS))
    nodes = decompose(graph, TorchDevice("cpu", threads=1).kernels, "cpu").nodes
    names = [node.op.name for node in nodes]
    assert names.count("attention") == 1 and "expand" not in names
    products = [node.outputs[0].shape for node in nodes if node.op.name == "matmul"]
    assert products == [(BATCH, 2, 3 * TIME, TIME), (BATCH, 2, 3 * TIME, WIDTH)]


@pytest.mark.parametrize("few_shapes", [False, True])
@pytest.mark.parametrize("rows", [2, 8, 64])
@pytest.mark.parametrize("position_bias", ["none", "future", "distance"])
@pytest.mark.parametrize("window", [None, 1, 5, 30])
@pytest.mark.parametrize("name", ["causal", "pairs", "full"])
def test_a_mask_is_added_to_blocks_of_scores(
    name: str, window: int | None, position_bias: str, rows: int, few_shapes: bool
) -> None:
    mask, time, heads = AttentionMask(name, position_bias, window), 45, 3
    query, key = np.indices((time, time))
    last = {"causal": query, "pairs": query // 2 * 2 + 1, "full": 0 * query + time}[name]
    ahead = {"none": 0 * key, "future": np.maximum(key - query, 0), "distance": abs(key - query)}[position_bias]
    wanted = -alibi_slopes(heads)[:, None, None] * ahead
    wanted[:, (key > last) | (abs(key - query) >= (window or time))] = -np.inf
    blocks = Block.all(mask, time, min(rows, time), few_shapes)
    found = torch.full(wanted.shape, -np.inf, dtype=torch.float64)

    def biased(call: Call) -> None:
        (scores,), bias = call.ins, ScoreBias(call, heads, min(rows, time), time, call.ins[0])
        for block in blocks:
            part = scores[:, block.start : block.stop, block.keys.start : block.keys.stop]
            call.emit(part.zero_)
            bias.add(part, block)

    launch_row(biased, Context.of(torch.device("cpu")), [found], {"mask": mask})
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
    assert not few_shapes or len({len(block.keys) for block in blocks}) <= 18
