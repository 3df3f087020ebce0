"""Every row of the table against the op's reference in fp64, on ttnn's reference functions."""

from __future__ import annotations

import pytest

pytest.importorskip("ttnn", reason="the package ttnn is not installed")

from tests.ops.harness import all_cases, every_op
from tests.ttnn.runs import golden
from ttrain.core.spec import DType
from ttrain.device.base import Device
from ttrain.engine.static import StaticEngine
from ttrain.graph import Case, Op
from ttrain.testing import verdict
from ttrain.testing.verifier import OpTrial, run_trials

EXCHANGES = {
    "all_gather",
    "reduce_scatter",
    "exchange_done",
    "all_reduce_start",
    "reduce_scatter_start",
    "collectives_done",
    "all_gather_state",
}
REFUSED = {"int8_matmul", "nf4_matmul"}  # with the option that a model asks for them by: lora.base
# By a step of a mesh: of ranks, of ids that lie there, and what boards refuse.
NOT_RECORDED = {*EXCHANGES, *REFUSED, "block_norms", "token_windows"}
FACTOR = 8.0  # of what is allowed elsewhere: products and sums of a card go other ways
CASES = all_cases(DType.FP32, where=lambda op: not op.view and op.name not in NOT_RECORDED)


@every_op(CASES)
def test_row_equals_reference(op: Op, case: Case, dtype: DType) -> None:
    check_row(golden(), op, case, dtype)


def check_row(device: Device, op: Op, case: Case, dtype: DType) -> None:
    trial = OpTrial(op, 0, case, dtype, None, tuple(range(len(op.outputs) + 99)))
    verdict(list(trial.compared(run_trials(device, StaticEngine, [trial]), "static", FACTOR)))
