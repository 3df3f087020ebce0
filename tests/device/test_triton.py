"""Triton's kernels without a GPU: interpreted against references, and compiled for the GPUs that they are for."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import forked
from tests.device.fake_cuda import FakeCuda, fake_cuda
from tests.ttnn.runs import adamw
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.base import flat_launches
from ttrain.device.torch.kernels.common import DTYPES
from ttrain.device.torch.triton.installed import has_triton, lacking_triton
from ttrain.graph.passes.group import ELEMENTWISE
from ttrain.optim.base import EXAMPLE

if not has_triton():
    pytest.skip("Triton is not installed", allow_module_level=True)

from ttrain.device.torch.triton import launch
from ttrain.device.torch.triton.elementwise import EXPRESSIONS
from ttrain.device.torch.triton.rows import RULES, triton_rows

CAPABILITIES = (75, 80, 90, 100, 120)
COUNTS = ("COUNT", "PART", "PARTS", "PLACES", "SIZE", "START")  # that a kernel takes at each launch
WIDEST = 2**13
IDS = 50_257
RULE = adamw(cautious=True).rule(EXAMPLE, True)
SPILLED = 80  # bytes of a thread that may lie in the caches, of 512 in registers
SHARED_MEMORY = 2**16  # bytes that a block of threads may take on a GPU of capability 7.5, the least of all


def test_rows_in_the_interpreter_equal_their_references() -> None:
    """Every case of every row, programs of any steps, outputs over inputs, and a whole step."""
    done = forked.run("tests.device.interpreted_triton", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert {name: error for name, error in found.items() if error} == {}
    assert all(any(check.startswith(f"{op}-") for check in found) for op in RULES)


def test_every_op_that_is_grouped_has_an_expression() -> None:
    assert set(ELEMENTWISE) <= set(EXPRESSIONS)
    assert set(EXPRESSIONS) <= set(ELEMENTWISE) | set(RULES)


def test_old_gpus_keep_the_rows_of_aten() -> None:
    assert lacking_triton((7, 0)) == "Triton wants compute capability 7.5"


@pytest.mark.parametrize(
    ("capability", "dtype", "size", "way"),
    [
        ((7, 5), DType.FP32, 64, "triton"),
        ((7, 5), DType.FP16, 64, "dense"),
        ((8, 0), DType.BF16, 64, "triton"),
        ((9, 0), DType.BF16, 64, "grouped"),
        ((9, 0), DType.BF16, 63, "triton"),
        ((9, 0), DType.FP32, 64, "triton"),
        ((10, 3), DType.BF16, 64, "grouped"),
        ((12, 0), DType.BF16, 64, "triton"),
        ((9, 0), DType.FP64, 64, "dense"),
    ],
)
def test_a_plan_names_who_multiplies_panels_of_experts(
    capability: tuple[int, int], dtype: DType, size: int, way: str
) -> None:
    rows, weight = TensorSpec((100, size), dtype), TensorSpec((4, size, 32), dtype)
    with fake_cuda(capability) as device:
        told = triton_rows(device.context)["grouped_matmul"].way
        assert told is not None
        ins, outs = [rows, weight, TensorSpec((5,), DType.INT64)], [TensorSpec((100, 32), dtype)]
        assert told(ins, outs, {"transpose": False}) == way


@pytest.mark.parametrize(("switch", "precision"), [("high", "tf32"), ("highest", "ieee")])
def test_products_of_experts_follow_torchs_switch_of_tf32(switch: str, precision: str) -> None:
    with fake_cuda() as device:
        torch.set_float32_matmul_precision(switch)
        try:
            works = [dict(work.constants) for work, _ in Noted(device).products(DType.FP32)]
        finally:
            torch.set_float32_matmul_precision("highest")
    assert [work["PRECISION"] for work in works] == [precision] * 3


class Noted:
    """The tensors' dtypes of each launch that a row emits on a GPU of fake tensors."""

    def __init__(self, device: FakeCuda) -> None:
        self.rows, self.device = triton_rows(device.context), device

    def launches(
        self, op: str, ins: list[torch.Tensor | None], outs: list[torch.Tensor], **attributes: Any
    ) -> Iterator[tuple[launch.Work, list[torch.dtype]]]:
        specs = [None if x is None else TensorSpec(tuple(x.shape), DTYPES[x.dtype]) for x in ins]
        made = [TensorSpec(tuple(x.shape), DTYPES[x.dtype]) for x in outs]
        work = [self.device.allocate(spec) for spec in self.rows[op].workspace(specs, made, attributes)]
        bound = self.rows[op].bind(ins, outs, attributes, work)
        for each in flat_launches([bound]):
            if each.func is torch.ops.ttrain.triton.default:
                number, read, written = each.args
                yield launch.WORKS[number], [x.dtype for x in (*read, *written)]

    def made(self) -> list[tuple[launch.Work, list[torch.dtype]]]:
        """What rows launch: norms of the widest rows that they take, others of sizes that nothing divides."""
        x, y, residual, total, dx = (self.tensor(8, 1024, WIDEST, dtype=DType.BF16) for _ in range(5))
        mean, rstd = (self.tensor(8, 1024) for _ in range(2))
        weight, dweight, dbias = (self.tensor(WIDEST) for _ in range(3))
        short, turned = (self.tensor(3, 7, 720, dtype=DType.BF16) for _ in range(2))
        table, column, seed = self.tensor(7, 32), self.tensor(720), self.tensor(dtype=DType.INT64)
        ids, rows = self.tensor(3, 7, dtype=DType.INT64), self.tensor(50, 720)
        program = (
            ("embedding", (3, 4), ()), ("add", (0, 1), ()), ("add", (5, 6), ()),
            ("gelu", (7,), (("approximate", "tanh"),)), ("tanh", (8,), ()),
            ("gelu_grad", (9, 0), (("approximate", "none"),)), ("dropout", (10, 2), (("p", 0.1), ("stream", 3))),
        )  # fmt: skip
        inputs = [short, column, seed, ids, rows]
        hidden, head = self.tensor(40, 8, dtype=DType.BF16), self.tensor(IDS, 8, dtype=DType.BF16)
        logits, targets, one = self.tensor(40, IDS), self.tensor(40, dtype=DType.INT64), self.tensor()
        made = [self.tensor(), self.tensor(), hidden, head]
        narrow = [self.tensor(1000, dtype=dtype) for dtype in (DType.INT16, *[DType.BF16] * (len(RULE.slots) + 2))]
        rounding = {"count": 1, "copies": True, "stochastic": (1, 2), "stream": 8}
        smoothed = {"smoothing": 0.1, "live": IDS, "gradients": True}
        return [
            *self.launches("add_layer_norm", [x, residual, weight, weight], [total, y, mean, rstd], eps=1e-5),
            *self.launches("layer_norm_grad", [y, x, mean, rstd, weight, residual], [dx, dweight, dbias], bias=True),
            *self.launches("rotary", [short, table, table], [turned], heads=9, inverse=False),
            *self.launches("fused", inputs, [turned], program=program, results=(6,)),
            *self.launches("head_cross_entropy", [hidden, head, targets, one, None], made, **smoothed),
            *self.launches("cross_entropy_grad", [logits, targets, self.tensor(40), one], [logits]),
            *self.launches("update", [*narrow, one, one, one, seed], [], rule=RULE, **rounding),
            *self.products(DType.BF16),
            *self.products(DType.FP32),
        ]

    def products(self, dtype: DType) -> Iterator[tuple[launch.Work, list[torch.dtype]]]:
        """Products of experts, of sizes that nothing divides."""
        a, b = self.tensor(300, 77, dtype=dtype), self.tensor(300, 139, dtype=dtype)
        weight, offsets = self.tensor(33, 77, 139, dtype=dtype), self.tensor(34, dtype=DType.INT64)
        yield from self.launches("grouped_matmul", [a, weight, offsets], [b], transpose=False)
        yield from self.launches("grouped_matmul", [b, weight, offsets], [a], transpose=True)
        yield from self.launches("grouped_outer", [a, b, offsets], [weight])

    def tensor(self, *shape: int, dtype: DType = DType.FP32) -> torch.Tensor:
        return self.device.allocate(TensorSpec(shape, dtype))


def test_kernels_compile_for_every_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values stay in registers, but for a few, and in the shared memory that each of these GPUs has."""
    import triton
    from triton.backends.compiler import GPUTarget

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    names = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int64: "*i64", torch.int16: "*i16"}
    with fake_cuda() as device:
        works = Noted(device).made()
    assert len(works) == 15
    for work, dtypes in works:
        kernel = launch.function(work.kernel)
        kinds = {name: names[kind] for name, kind in zip(work.names, dtypes, strict=True)}
        counts = {name: "i32" for name, _ in work.constants if name in COUNTS}
        signature = {name: {**kinds, **counts}.get(name, "constexpr") for name in kernel.arg_names}
        constants = {name: value for name, value in work.constants if name not in counts}
        aligned = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(kernel.arg_names) if name in kinds}
        source = triton.compiler.ASTSource(kernel, signature, constants, aligned)
        narrow_product = work.kernel == "grouped_product" and torch.bfloat16 in dtypes  # runs from 8.0 on
        for capability in CAPABILITIES[narrow_product:]:
            made = triton.compile(
                source, GPUTarget("cuda", capability, 32), {"num_warps": work.warps, "enable_fp_fusion": True}
            )
            assert made.metadata.shared <= SHARED_MEMORY
            assert spilled(made.asm["cubin"], tmp_path / "cubin") <= SPILLED, f"{work.kernel} on {capability}"


def spilled(cubin: bytes, file: Path) -> int:
    """Bytes of a thread's values for which there are no registers."""
    from triton import knobs

    file.write_bytes(cubin)
    command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(file)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (stack,) = re.findall(r"STACK:(\d+)", told)
    return int(stack)
