"""The number of programs of a node on a card, against the calls that the card's rows make."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

pytest.importorskip("ttnn", reason="the package ttnn is not installed")

from tests.ttnn.runs import adamw, golden, gpt, llama, mlp, run, sgd
from ttrain.core.spec import DType
from ttrain.device.ttnn.cost.lowering import Lowering
from ttrain.device.ttnn.cost.wormhole import Product

MODELS = {
    "gpt bf16 with dropout": lambda: (gpt(DType.BF16, dropout=0.1, layers=1), adamw()),
    "gpt that fills no tiles": lambda: (gpt(DType.BF16, context=20, layers=1), adamw()),
    "gpt with rounded moments": lambda: (gpt(layers=1), adamw(state_dtype="bf16")),
    "llama bf16": lambda: (llama(DType.BF16, rotary_share=0.5, layers=1), adamw()),
    "llama fp32": lambda: (llama(layers=1), adamw()),
    "mixture of experts": lambda: (llama(layers=1, experts=4, experts_per_token=2, expert_width=32), adamw()),
    "mlp with momentum": lambda: (mlp(), sgd(momentum=0.9)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_step_becomes_about_as_many_programs_as_its_rows_make_calls(name: str) -> None:
    """And products do the work of a product, 2 m k n, whatever bias and activation add to it."""
    device = golden()
    runtime: Any = device.mesh.tt  # type: ignore[attr-defined]
    step = run(*MODELS[name](), device, steps=1).steps["train"]
    before = sum(runtime.calls.values())
    step._bound.run()
    calls, count, lowering = sum(runtime.calls.values()) - before, 0, Lowering()
    for node in step.plan.launched:
        programs = lowering.programs(node)
        count += len(programs)
        if node.op.name in ("matmul", "linear"):
            left, result = node.inputs[0].spec.shape, node.outputs[0].spec.shape
            inner = left[-2 if node.attributes.get("transpose_a") else -1]
            made = [each for each in programs if isinstance(each, Product)]
            assert sum(each.batch * each.m * each.k * each.n for each in made) == prod(result) * inner
    # Some gradients are written where they lie, and one call is two programs.
    assert count == pytest.approx(calls, rel=0.05)
