"""How many programs a node becomes on a card, against the calls that the card's rows make."""

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
    "mlp with momentum": lambda: (mlp(), sgd(momentum=0.9)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_step_becomes_about_as_many_programs_as_its_rows_make_calls(name: str) -> None:
    device = golden()
    runtime: Any = device.mesh.tt  # type: ignore[attr-defined]
    step = run(*MODELS[name](), device, steps=1).steps["train"]
    before = sum(runtime.calls.values())
    step._bound.run()
    calls = sum(runtime.calls.values()) - before
    lowering = Lowering()
    programs = sum(len(lowering.programs(node)) for node in step.plan.launched)
    # Some gradients are written where they lie, and one call is two programs.
    assert programs == pytest.approx(calls, rel=0.05)


def test_products_do_the_work_of_a_product() -> None:
    """2 m k n, whatever bias and activation add to it."""
    step = run(gpt(DType.BF16, layers=1), adamw(), golden(), steps=1).steps["train"]
    for node in step.plan.launched:
        if node.op.name in ("matmul", "linear"):
            products = [program for program in Lowering().programs(node) if isinstance(program, Product)]
            left, result = node.inputs[0].spec.shape, node.outputs[0].spec.shape
            inner = left[-2 if node.attributes.get("transpose_a") else -1]
            assert sum(product.flops for product in products) == 2 * prod(result) * inner
