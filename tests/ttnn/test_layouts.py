"""Padding, sharing of memory, taking turns in tensors: what needs no ttnn."""

from __future__ import annotations

from math import prod

import pytest

from tests.models.session import plan_of
from tests.ttnn.runs import adamw, gpt, llama
from ttrain.core.errors import GraphError
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.base import Layout
from ttrain.device.ttnn.planned import planned
from ttrain.device.ttnn.settings import TenstorrentConfig
from ttrain.device.ttnn.tensors.device_tensor import joinable
from ttrain.device.ttnn.tensors.store import TileLayout, default_layout, shares_memory
from ttrain.plan.arena import Block, take_turns
from ttrain.train.steps.step_graph import StepGraph


def test_tiles_pad_the_last_two_axes_and_fp64_is_refused() -> None:
    sizes = {(1, 1): (32, 32), (1, 65): (32, 96), (2, 33, 32): (2, 64, 32), (64, 64): (64, 64)}
    for shape, padded in sizes.items():
        layout = TileLayout(shape)
        assert (layout.padded, layout.nbytes, layout.tiles) == (padded, 4 * prod(padded), prod(padded) // 1024)
    with pytest.raises(GraphError, match="fp64 does not exist"):
        default_layout(TensorSpec((3,), DType.FP64))


def test_which_reshapes_are_free_and_who_may_join_a_stack() -> None:
    free = [((4, 64, 32), (256, 32)), ((1, 33, 32), (33, 32)), ((5,), (1, 5))]
    assert all(shares_memory(TensorSpec(one), TensorSpec(two)) for one, two in free)
    moving = [((2, 33, 32), (66, 32)), ((64, 32), (32, 64))]  # rows would move between tiles, or are of another length
    assert not any(shares_memory(TensorSpec(one), TensorSpec(two)) for one, two in moving)
    assert all(map(joinable, [(64, 96), (96,)]))
    assert not any(map(joinable, [(65, 96), (64, 90), (90,), (2, 32, 32)]))


def test_blocks_take_turns_only_within_a_layout() -> None:
    blocks = [
        Block("a", 64, 0, 2, layout="f"),
        Block("b", 64, 1, 3, layout="f"),
        Block("c", 64, 3, 4, layout="f"),  # after a
        Block("d", 64, 5, 6, layout="g"),
    ]
    total = take_turns(blocks)
    offsets = {block.what: block.offset for block in blocks}
    assert offsets["c"] == offsets["a"] != offsets["b"]
    assert offsets["d"] not in (offsets["a"], offsets["b"])
    assert total == 3 * 64


@pytest.mark.parametrize(("context", "recompute"), [(32, "none"), (20, "none"), (64, "block")])
def test_values_that_take_turns_have_one_layout_and_equally_many_elements(context: int, recompute: str) -> None:
    """A statistic that its kernel holds in another layout must not meet a value whose default layout looks the same."""
    sizes = {"layers": 2, "heads": 2, "width": 64, "context": context, "vocabulary": 65, "dropout": 0.1}
    model = gpt(DType.BF16, recompute=recompute, **sizes)
    model.follow_compute()
    graph = StepGraph(model, adamw(), rows=2)
    plan = plan_of(planned(TenstorrentConfig()), graph.trace_train)
    layouts, elements = dict[int, Layout](), dict[int, int]()
    for block in plan.blocks:
        assert layouts.setdefault(block.offset, block.layout) == block.layout
    for owner, block in plan.owned.items():
        assert elements.setdefault(block.offset, owner.spec.size) == owner.spec.size
    # The mask that softmax keeps beside the plan: for each sequence where one launch scales, masks and sums.
    assert plan.outside_bytes == TileLayout((context, context), "bfloat16").nbytes * (2 if context % 32 == 0 else 1)
    # A reshape that would move rows between tiles became a copy; a free one did not.
    names = [node.op.name for node in plan.graph.nodes]
    assert ("copy_reshape" in names) is (context % 32 != 0)
    assert all(shares_memory(n.values[0].spec, n.outputs[0].spec) for n in plan.graph.nodes if n.op.name == "reshape")


def test_numbers_from_the_card_take_no_turns_and_products_of_experts_are_named_dense() -> None:
    device = planned(TenstorrentConfig())
    graph = StepGraph(llama(experts=4, experts_per_token=2, expert_width=24), adamw(), rows=2)
    plan = plan_of(device, graph.trace_train)
    offsets = [block.offset for block in plan.blocks]
    made = [block for owner, block in plan.owned.items() if owner.producer and not owner.spec.dtype.is_floating]
    assert len(made) == 2 * 4  # of a layer: ids, order, places, offsets
    assert all(offsets.count(block.offset) == 1 for block in made)
    products = [node for node in plan.graph.nodes if node.op.name.startswith("grouped")]
    ways = [way(*n.specs, n.attributes) for n in products if (way := device.kernels[n.op.name].way)]
    assert ways == ["dense"] * (2 * 3 * 3)  # of a layer: three matrices, each forward and with both gradients
