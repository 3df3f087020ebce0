"""Runs the Triton rows of a GPU in Triton's interpreter, on the CPU, and prints what is wrong by name as JSON.

A process of its own, as Triton asks for its interpreter when it is imported.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from triton import knobs
from triton.runtime import interpreter

from tests.native.test_fused import programs
from tests.ops.harness import (
    all_cases,
    assert_equals_reference,
    assert_same_over,
    assert_within,
    bind_node,
    drawn,
    node_of,
    outcome,
    shared_with,
)
from tests.ops.test_forward import MIXED
from ttrain.config import build
from ttrain.config.compose import load
from ttrain.core.spec import DType
from ttrain.device.torch.device import TorchDevice
from ttrain.device.torch.triton import rows
from ttrain.device.torch.triton.elementwise import EXPRESSIONS
from ttrain.device.torch.triton.rows import RULES
from ttrain.engine.base import examples
from ttrain.graph import Case, Op, op
from ttrain.ops.program import step
from ttrain.testing.compare import Tolerance

DTYPES = (DType.FP32, DType.BF16)
LONG, PARTS = (2, 75, 1025), 100  # more rows than parts of sums, in columns that a tile does not divide
CHUNK = 8  # rows of a head whose logits are formed at a time
IDS = 9001  # more than a tile has columns
STEP = (
    "model=nano-gpt model.layers=1 model.context=8 model.width=24 model.heads=3 model.dropout=0.1 train.batch_size=2 "
    "engine=static device=cpu"
)
cut_off = interpreter._convert_float


def rounding(data: np.ndarray, given: Any, wanted: Any, mode: Any) -> np.ndarray:
    """A GPU rounds to the nearest bf16, to even in a tie; the interpreter cuts bits off."""
    if str(wanted) == "bf16" and str(given) == "fp32":
        bits = np.ascontiguousarray(data).view(np.uint32)
        finite = bits & 0x7F800000 != 0x7F800000
        bits = np.where(finite, bits + 0x7FFF + (bits >> 16 & 1), bits).astype(np.uint32)
        return (bits >> 16).astype(np.uint16).reshape(data.shape)
    return cut_off(data, given, wanted, mode)


def long_case(name: str) -> Case:
    channels, rows = LONG[-1:], LONG[:-1]
    shapes = {"mean": rows, "rstd": rows, "weight": channels, "bias": channels}
    attributes = {"bias": True} if name == "layer_norm_grad" else {}
    given = tuple(shapes.get(each.rstrip("?"), LONG) for each in op(name).inputs)
    return Case(given, attributes, positive=("rstd",))


def wide_cases() -> dict[str, Case]:
    """Losses of more ids than a tile has columns."""
    given, drawn = ((17, IDS), (17,), ()), ({"targets": IDS}, ("weight",), ("targets",))
    head = ((17, 4), (IDS + 3, 4), (17,), (17,), None)
    return {
        "cross_entropy": Case(given, {}, *drawn),
        "cross_entropy_grad": Case((*given[:2], (17,), ()), {}, *drawn),
        "head_cross_entropy": Case(head, {"smoothing": 0.1, "live": IDS, "gradients": False}, *drawn),
    }


def far_logits(device: TorchDevice) -> None:
    """Nothing overflows or is lost where logits lie far apart, and a target that there is no logit of gives NaN."""
    logits = torch.tensor([[3e4, -3e4, 0.0], [-torch.inf, 0.0, 5.0], [-3e4, -3e4, -3e4 - 50]])
    for targets in (torch.tensor([1, 2, 2]), torch.tensor([0, 3, -1])):
        given = [logits, targets, torch.tensor(0.5)]
        launch, (loss, total) = bind_node(device, node_of("cross_entropy", given, {}), given)
        launch()
        wide = logits.double().requires_grad_()
        np.testing.assert_allclose(total.double().numpy(), wide.logsumexp(1).detach().numpy(), rtol=1e-6)
        if targets.max() < 3:
            expected = 0.5 * torch.nn.functional.cross_entropy(wide, targets, reduction="sum")
            np.testing.assert_allclose(loss.item(), expected.item(), rtol=1e-6)
            given.insert(2, total)
            launch, (found,) = bind_node(device, node_of("cross_entropy_grad", given, {}), given)
            launch()
            (slope,) = torch.autograd.grad(expected, wide)
            np.testing.assert_allclose(found.double().numpy(), slope.numpy(), atol=1e-3)
        else:
            assert loss.isnan()


def alone(device: TorchDevice, op_: Op, case: Case, dtype: DType) -> None:
    """One op as a program of one step."""
    arrays, expected = drawn(op_, case, dtype)
    inputs = [torch.from_numpy(np.array(x)) for x in arrays.values() if x is not None]
    given = [
        x.to(torch.bfloat16 if dtype is DType.BF16 else torch.float32) if x.is_floating_point() else x for x in inputs
    ]
    program = (step(op_.name, *range(len(given)), **case.attributes),)
    fused(device, given, {"program": program, "results": (0,)}, expected)


def fused(device: TorchDevice, given: list[torch.Tensor], attributes: dict[str, Any], expected: Any = None) -> None:
    if expected is None:
        expected = op("fused").reference(*(x.double() if x.is_floating_point() else x for x in given), **attributes)
    launch, outputs = bind_node(device, node_of("fused", given, attributes), given)
    launch()
    for got, wanted in zip(outputs, expected, strict=True):
        unit = DType.BF16 if got.dtype is torch.bfloat16 else DType.FP32
        assert_within(got.double().numpy(), wanted.double().numpy(), unit, Tolerance(32, 32), "fused")


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(case=programs())
def any_program(device: TorchDevice, case: tuple[list[torch.Tensor], dict[str, Any]]) -> None:
    fused(device, *case)


def steps_alike(device: TorchDevice) -> None:
    """A step in which the pass has grouped chains has the loss and the norm of gradients of the CPU's own."""
    config, found = load(STEP.split()), []
    for each in (device, TorchDevice("cpu", threads=1)):
        session = build.build_session(build.build_model(config, 31), each, config)
        built = session.build_training(further=False)["train"]
        assert built.plan is not None
        names = {node.op.name for node in built.plan.graph.nodes}
        assert ("fused" in names) == each.groups
        found.append(built(examples(built.plan.graph)))
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(found[0][name], found[1][name], rtol=1e-5)


def checks(device: TorchDevice) -> dict[str, Callable[[], Any]]:
    made: dict[str, Callable[[], Any]] = {
        "a step": lambda: steps_alike(device),
        "any program": lambda: any_program(device),  # type: ignore[call-arg]
        "far logits": lambda: far_logits(device),
    }
    for parameter in all_cases(*DTYPES, where=lambda op: op.name in RULES):
        of = parameter.values
        wide = MIXED.get(of[0].name, ()) if of[2] is DType.BF16 else ()  # as a step in bf16 feeds them
        made[parameter.id] = lambda of=of, wide=wide: assert_equals_reference(device, *of, wide=wide)
        if of[2] is DType.FP32 and (over := shared_with(device, *of)):
            made[f"{parameter.id} over"] = lambda of=of, over=over: assert_same_over(device, *of, over)
    for name in ("layer_norm_grad", "rms_norm_grad"):
        made[f"long {name}"] = lambda name=name: assert_equals_reference(device, op(name), long_case(name), DType.FP32)
    for of in ((op(name), case, dtype) for name, case in wide_cases().items() for dtype in DTYPES):
        made[f"wide {of[0].name} {of[2]}"] = lambda of=of: assert_equals_reference(device, *of)
    for parameter in all_cases(*DTYPES, where=lambda op: op.name in EXPRESSIONS and op.name not in RULES):
        made[f"alone {parameter.id}"] = lambda of=parameter.values: alone(device, *of)
    return made


def main() -> None:
    assert knobs.runtime.interpret, "TRITON_INTERPRET=1 was not set"
    interpreter._convert_float, rows.PARTS = rounding, PARTS
    device = TorchDevice("cpu", threads=1)
    device.context = replace(device.context, kind="cuda", explicit_up_to=10**6, logits=CHUNK, triton=True)
    device.groups = True
    found = {name: outcome(lambda check=check: check(), {}) for name, check in checks(device).items()}
    print(json.dumps({name: error and f"{type(error).__name__}: {error}" for name, error in found.items()}))


if __name__ == "__main__":
    main()
