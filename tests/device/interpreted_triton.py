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
import triton.language as tl
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
    panel_cases,
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
from ttrain.testing.cases import record
from ttrain.testing.compare import Tolerance

DTYPES = (DType.FP32, DType.BF16)
LONG, PARTS = (2, 75, 1025), 100  # more rows than parts of sums, in columns that a tile does not divide
CHUNK = 8  # rows of a head whose logits are formed at a time
IDS_OF_STEP = 31
IDS = 9001  # more than a tile has columns
STEP = "model.layers=1 model.context=8 model.width=24 train.batch_size=2 device=cpu"
GPT = f"{STEP} model=nano-gpt model.heads=3 model.dropout=0.1"
MIXTURE = f"{STEP} model=llama model.heads=3 model.experts=4 model.experts_per_token=2 model.expert_width=20"
cut_off, multiply = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot


def rounding(data: np.ndarray, given: Any, wanted: Any, mode: Any) -> np.ndarray:
    """A GPU rounds to the nearest bf16, to even in a tie; the interpreter cuts bits off."""
    if str(wanted) == "bf16" and str(given) == "fp32":
        bits = np.ascontiguousarray(data).view(np.uint32)
        finite = bits & 0x7F800000 != 0x7F800000
        bits = np.where(finite, bits + 0x7FFF + (bits >> 16 & 1), bits).astype(np.uint32)
        return (bits >> 16).astype(np.uint16).reshape(data.shape)
    return cut_off(data, given, wanted, mode)


def multiplying(builder: Any, a: Any, b: Any, *others: Any) -> Any:
    """A GPU multiplies numbers of bf16; the interpreter would multiply their bits."""
    wide = [
        interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
        if x.dtype == tl.bfloat16
        else x
        for x in (a, b)
    ]
    return multiply(builder, *wide, *others)


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


def panels(device: TorchDevice, op_: Op, case: Case, dtype: DType) -> None:
    node, kernel = record(op_, case, dtype)[0].nodes[0], device.kernels[op_.name]
    assert kernel.way is not None and kernel.way(*node.specs, node.attributes) == "triton"
    assert_equals_reference(device, op_, case, dtype)


def rows_alone(device: TorchDevice) -> None:
    """A row has the same bits among others as alone."""
    rows, weight = torch.randn(150, 70), torch.randn(3, 70, 40)
    for dtype in (torch.float32, torch.bfloat16):
        given = [rows.to(dtype), weight.to(dtype), torch.tensor([0, 20, 20, 150])]
        launch, (among,) = bind_node(device, node_of("grouped_matmul", given, {"transpose": False}), given)
        launch()
        for row in (0, 19, 20, 149):
            own = [given[0][row : row + 1], given[1], torch.tensor([0, int(row < 20), int(row < 20), 1])]
            launch, (alone,) = bind_node(device, node_of("grouped_matmul", own, {"transpose": False}), own)
            launch()
            assert torch.equal(alone[0], among[row])


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


def steps_alike(device: TorchDevice, overrides: str) -> None:
    """A step has the CPU's own loss and norm of gradients: where the pass has grouped chains, and without a plan."""
    draw, found, inputs = np.random.default_rng(0), [], dict[str, np.ndarray]()
    for each, engine in ((TorchDevice("cpu", threads=1), "static"), (device, "static"), (device, "dynamic")):
        config = load([*overrides.split(), f"engine={engine}"])
        session = build.build_session(build.build_model(config, IDS_OF_STEP), each, config)
        built = session.build_training(further=False)["train"]
        if built.plan is not None:
            names = {node.op.name for node in built.plan.graph.nodes}
            assert ("fused" in names) == each.groups
            inputs = inputs or {
                name: draw.integers(0, IDS_OF_STEP, x.shape) if x.ndim == 2 else x
                for name, x in examples(built.plan.graph).items()
            }
        found.append(built(inputs))
    for step_of_device in found[1:]:
        for name in ("loss", "grad_norm"):
            np.testing.assert_allclose(step_of_device[name], found[0][name], rtol=1e-5)


def checks(device: TorchDevice) -> dict[str, Callable[[], Any]]:
    made: dict[str, Callable[[], Any]] = {
        "a step": lambda: steps_alike(device, GPT),
        "a step with experts": lambda: steps_alike(device, MIXTURE),
        "rows alone": lambda: rows_alone(device),
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
    for number, of in enumerate((*of, dtype) for of in panel_cases() for dtype in DTYPES):
        made[f"panels {number} {of[0].name} {of[2]}"] = lambda of=of: panels(device, *of)
    for parameter in all_cases(*DTYPES, where=lambda op: op.name in EXPRESSIONS and op.name not in RULES):
        made[f"alone {parameter.id}"] = lambda of=parameter.values: alone(device, *of)
    return made


def main() -> None:
    assert knobs.runtime.interpret, "TRITON_INTERPRET=1 was not set"
    interpreter._convert_float, rows.PARTS = rounding, PARTS
    interpreter.InterpreterBuilder.create_dot = multiplying
    device = TorchDevice("cpu", threads=1)
    device.context = replace(device.context, kind="cuda", explicit_up_to=10**6, logits=CHUNK, triton=True)
    device.groups = True
    found = {name: outcome(lambda check=check: check(), {}) for name, check in checks(device).items()}
    print(json.dumps({name: error and f"{type(error).__name__}: {error}" for name, error in found.items()}))


if __name__ == "__main__":
    main()
