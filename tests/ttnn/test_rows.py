"""Every row of the table against the op's reference in fp64, on ttnn's reference functions."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("ttnn", reason="the package ttnn is not installed")

from tests.ops.harness import every_op
from tests.ttnn.runs import golden
from ttrain.core.spec import DType
from ttrain.device.base import Device
from ttrain.engine.static import StaticEngine
from ttrain.graph import REGISTRY, Case, Op
from ttrain.testing import cases_of, verdict
from ttrain.testing.verifier import OpTrial, run_trials

EXCHANGES = {"all_reduce_start", "reduce_scatter_start", "collectives_done", "all_gather_state"}
NOT_RECORDED = {*EXCHANGES, "block_norms", "token_windows"}  # by a step of a mesh: of ranks, and of ids that lie there
FACTOR = 8.0  # of what is allowed elsewhere: products and sums of a card go other ways


def cases() -> list[Any]:
    return [
        pytest.param(op, case, id=f"{op.name}-{number}")
        for op in REGISTRY.values()
        for number, case in enumerate(cases_of(op))
        if not op.view and op.name not in NOT_RECORDED
    ]


@every_op(cases())
def test_row_equals_reference(op: Op, case: Case) -> None:
    check_row(golden(), op, case)


def check_row(device: Device, op: Op, case: Case) -> None:
    trial = OpTrial(op, 0, case, DType.FP32, None, tuple(range(len(op.outputs) + 99)))
    verdict(list(trial.compared(run_trials(device, StaticEngine, [trial]), "static", FACTOR)))
