"""Replicas on parts of a chip: rows from ops that can be told their cores, division of the grid, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ttnn", reason="the package ttnn is not installed")

from tests.ops.harness import every_op
from tests.ttnn import test_rows
from tests.ttnn.doubles.golden import GoldenMesh
from tests.ttnn.runs import adamw, cosine, cpu, gpt, llama, run
from ttrain.core.errors import ConfigError
from ttrain.device.ttnn.device import TenstorrentDevice
from ttrain.device.ttnn.runtime.subdevices import CoreSubsetRuntime, divided
from ttrain.device.ttnn.settings import TenstorrentConfig

CORES = "the right half"
OPS = (
    "matmul", "linear", "reduce_sum", "global_norm", "softmax", "softmax_grad", "layer_norm", "layer_norm_grad", "gelu",
    "gelu_grad", "relu_grad", "tanh_grad", "embedding", "embedding_grad", "split_heads", "merge_heads", "dropout_mask",
    "squared_error", "squared_error_grad", "cross_entropy", "cross_entropy_grad", "head_cross_entropy",
    "update", "clip_factor", "assign", "accumulate", "add", "multiply", "exp", "copy_reshape",
    "transpose", "log_sum_exp", "rms_norm", "rms_norm_grad", "rotary", "silu", "silu_grad", "gated_activation",
)  # fmt: skip


class PartMesh(GoldenMesh):
    """Reference functions behind a core subset. `told` counts launches by whether they name their cores."""

    def __init__(self) -> None:
        super().__init__()
        whole = self.tt
        self.told = {True: 0, False: 0}
        original = whole._op

        def op(name: str, given: Any) -> Any:
            call = original(name, given)

            def counted(*arguments: Any, **options: Any) -> Any:
                self.told[options.get("sub_core_grids") == CORES or "sub_device_id" in options] += 1
                return call(*arguments, **options)

            return counted

        whole._op = op
        self.part = 1
        self.tt = CoreSubsetRuntime(whole, CORES, None, 1, sub_device=1, exact=None)


def part(fused: bool = True) -> TenstorrentDevice:
    return TenstorrentDevice(PartMesh(), TenstorrentConfig(fused_kernels=fused))


@every_op([each for each in test_rows.CASES if each.values[0].name in OPS])
def test_row_on_a_core_subset_equals_reference(op: Any, case: Any, dtype: Any) -> None:
    device = part()
    test_rows.check_row(device, op, case, dtype)
    assert device.mesh.told[False] == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("make", [lambda: gpt(layers=1, dropout=0.1), lambda: llama(layers=1)], ids=["gpt", "llama"])
def test_a_whole_step_on_a_part_of_the_chip(make: Callable[[], Any]) -> None:
    device = part()
    there, here = run(make(), adamw(), device), run(make(), adamw(), cpu())
    np.testing.assert_allclose(there.losses, here.losses, rtol=1e-5)
    assert min(cosine(here.state[name], there.state[name]) for name in here.state) > 0.9999
    assert device.mesh.told[False] == 0  # type: ignore[attr-defined]
    assert device.mesh.told[True] > 100  # type: ignore[attr-defined]


def test_an_op_that_can_not_be_told_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="ttnn.sort can't be kept on a part of the chip"):
        part().mesh.tt.sort(None)


def test_the_grid_is_divided_without_overlap() -> None:
    for cores in [(8, 8), (7, 8), (10, 13), (9, 8), (9, 7)]:
        seen = np.zeros(cores, int)
        for x, y, last_x, last_y in divided(*cores, 2):
            seen[y : last_y + 1, x : last_x + 1] += 1
        assert (seen == 1).all()
