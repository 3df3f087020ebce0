"""Functions, roundings and masks of the generated code on many values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.native.conftest import SMALL, NativeDevice, open_device
from tests.ops.harness import bind_node, node_of
from tests.ttnn.runs import adamw
from ttrain.core import processor
from ttrain.core.attention_mask import AttentionMask
from ttrain.core.spec import DType
from ttrain.device.torch.native.native import Sizing
from ttrain.graph import op
from ttrain.optim.base import EXAMPLE

Runs = Sequence[tuple[str, Sequence[torch.Tensor | None], Mapping[str, Any]]]


def run_all(device: NativeDevice, runs: Runs) -> list[list[torch.Tensor]]:
    """Outputs of each op, after one library was compiled for all."""
    nodes = [node_of(*run) for run in runs]
    device.native.prepare(nodes)
    results = []
    for node, (_, inputs, _) in zip(nodes, runs, strict=True):
        launch, outs = bind_node(device, node, [None if x is None else x.clone() for x in inputs])
        launch()
        results.append(outs)
    return results


def test_functions_are_accurate_to_a_few_ulp(device: NativeDevice) -> None:
    ranges: list[tuple[str, float, float, float, Mapping[str, Any]]] = [
        ("exp", -87.0, 88.7, 1.5, {}),
        ("exp", -1.0, 1.0, 1.5, {}),
        ("log", 1e-37, 1e3, 1.5, {}),
        ("log", 0.5, 2.0, 1.5, {}),
        ("tanh", -10.0, 10.0, 2.0, {}),
        ("tanh", -0.7, 0.7, 2.0, {}),
        ("sqrt", 0.0, 1e6, 0.51, {}),
        ("gelu", -1.0, 8.0, 6.0, {"approximate": "none"}),
        ("gelu", -1.0, 8.0, 6.0, {"approximate": "tanh"}),
    ]
    values = [torch.linspace(low, high, 100003) for _, low, high, _, _ in ranges]
    runs = [(name, [x], attributes) for (name, *_, attributes), x in zip(ranges, values, strict=True)]
    for (name, low, high, most, attributes), x, (y,) in zip(ranges, values, run_all(device, runs), strict=True):
        exact = op(name).reference(x.double(), **attributes)
        unit = torch.from_numpy(np.spacing(np.abs(exact.float().numpy()))).double()
        errors = (y.double() - exact).abs() / unit.clamp(min=1e-45)
        assert float(errors.max()) <= most, (name, low, high, float(errors.max()), float(x[errors.argmax()]))


SPECIAL = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, -1e-40, 3.4e38, -3.4e38, 89.0, -104.0, 1.0]


def test_special_values(device: NativeDevice) -> None:
    x, names = torch.tensor(SPECIAL), ("exp", "log", "tanh", "sqrt", "relu")
    for name, (y,) in zip(names, run_all(device, [(name, [x], {}) for name in names]), strict=True):
        torch.testing.assert_close(y, getattr(torch, name)(x), equal_nan=True, rtol=3e-7, atol=1e-44)
    far = torch.tensor([-87.0, -88.5, -88.8, -104.0, -1e4, -1e30, -3.4e38, 88.8, 1e30])
    (y,), (dx,) = run_all(device, [("silu", [far], {}), ("silu_grad", [torch.ones(9), far], {})])
    torch.testing.assert_close(y, torch.where(far < 0, 0, far), rtol=3e-7, atol=3e-36)
    torch.testing.assert_close(dx, (far > 0).float(), rtol=3e-7, atol=3e-36)


def test_nan_reaches_the_end_of_every_activation(device: NativeDevice) -> None:
    x = torch.full((33,), float("nan"))
    forms = ({"approximate": "tanh"}, {"approximate": "none"})
    runs: Runs = [
        *(("gelu", [x], form) for form in forms),
        *(("gelu_grad", [x, x], form) for form in forms),
        ("softmax", [x], {"scale": 1.0, "mask": AttentionMask("full")}),
        ("clip_factor", [x[0]], {"limit": 1.0}),
    ]
    for results in run_all(device, runs):
        assert results[0].isnan().all()


def test_bf16_rounds_as_torch_does(device: NativeDevice) -> None:
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31 - 1, (200_001,), generator=generator, dtype=torch.int64).to(torch.int32)
    bits[:1000] = (bits[:1000] & -65536) | 0x8000  # halfway between two bf16 numbers
    x = bits.view(torch.float32)
    normal = x.isnan() | (x.abs() >= torch.finfo(torch.float32).tiny)  # hardware takes subnormals for zero
    ((y,), (z,)) = run_all(
        device, [("cast", [x], {"dtype": DType.BF16}), ("cast", [x.bfloat16()], {"dtype": DType.FP32})]
    )
    expected = x.bfloat16()
    assert torch.equal(y[normal].isnan(), expected[normal].isnan())
    both = normal & ~expected.isnan()
    assert torch.equal(y[both].view(torch.int16), expected[both].view(torch.int16))
    assert torch.equal(z[both], expected[both].float())


def test_masks_are_those_of_the_definition(device: NativeDevice) -> None:
    x, seed = torch.ones(3, 1001), torch.tensor(2**62 + 12345)
    runs: Runs = [("dropout", [x, seed], {"p": p, "stream": 2**32 - 3}) for p in (0.0, 0.1, 0.5, 0.999)]
    for (_, _, attributes), (y,) in zip(runs, run_all(device, runs), strict=True):
        expected = op("dropout").reference(x.double(), seed, **attributes)
        assert torch.equal(y != 0, expected != 0)
        torch.testing.assert_close(y.double(), expected, rtol=1e-6, atol=0)


def test_ids_and_targets_beyond_the_vocabulary_become_nan(device: NativeDevice) -> None:
    ids, weight, one = torch.tensor([2, 7, -1, 2**40]), torch.ones(7, 5), torch.tensor(1.0)
    logits = torch.randn(4, 7)
    looked_up, gradient, loss = run_all(
        device,
        [
            ("embedding", [ids, weight], {}),
            ("embedding_grad", [torch.ones(4, 5), ids], {"vocabulary": 7}),
            ("cross_entropy", [logits, ids, one], {}),
        ],
    )
    assert looked_up[0].isnan().all(1).tolist() == [False, True, True, True]
    assert gradient[0].sum() == 5 and bool((gradient[0][2] == 1).all())
    assert bool(loss[0].isnan())


def large_runs() -> Runs:
    """One op of every family, large enough that two threads share it."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    runs: list[tuple[str, Sequence[torch.Tensor | None], Mapping[str, Any]]] = []
    for dtype in (torch.float32, torch.bfloat16):
        x, y, w = normal(96, 130, dtype=dtype), normal(96, 130, dtype=dtype), normal(130)
        mean, rstd, ids = normal(96), normal(96).abs(), torch.arange(96) * 7 % 13
        qkv, dy = normal(2, 40, 3 * 48, dtype=dtype), normal(2, 40, 48, dtype=dtype)
        three = {"heads": 3, "scale": 0.25, "mask": AttentionMask()}
        lse, one, flat = normal(2, 3, 40) + 5, torch.tensor(0.01), [normal(300, 70), normal(130)]
        places = torch.arange(40).expand(2, 40) % torch.tensor([[7], [35]])
        runs += [
            ("gelu", [x], {"approximate": "tanh"}),
            ("add", [x, w.to(dtype)], {}),
            ("layer_norm_grad", [x, y, mean, rstd, w, x], {"bias": True}),
            ("reduce_sum", [x], {"axes": (0,)}),
            ("softmax", [x], {"scale": 0.3, "mask": AttentionMask("full")}),
            ("attention", [qkv, *[None] * 4, places], three),
            ("attention_grad", [dy, qkv, None, None, dy, lse, None, None, places], three),
            ("embedding_grad", [x, ids], {"vocabulary": 13}),
            ("matmul", [x, y], {"transpose_a": True, "transpose_b": False}),
            ("matmul", [x.view(2, 48, 130), y.view(2, 48, 130)], {"transpose_a": False, "transpose_b": True}),
            ("linear", [x, y, None], {}),
            ("head_cross_entropy", [x, y, ids, one, None], {"smoothing": 0.0, "live": 96, "gradients": True}),
            ("head_cross_entropy", [x, y, ids, one, None],
             {"smoothing": 0.0, "live": 96, "gradients": True, "frozen": True}),
            ("global_norm", [x, y, *flat], {}),
            ("update", [*flat, x.new_tensor(0).expand(300, 70).contiguous() + 1, x[0], *flat,
                        *(t.abs() for t in flat), one, one * 100, None, None],
             {"count": 2, "rule": adamw().rule(EXAMPLE, True)}),
        ]  # fmt: skip
    return runs


def assert_near_reference(runs: Runs, results: Sequence[Sequence[torch.Tensor]]) -> None:
    for (name, inputs, attributes), outputs in zip(runs, results, strict=True):
        exact = [None if x is None else x.double() if x.is_floating_point() else x for x in inputs]
        expected = op(name).reference(*exact, **attributes)
        for got, wanted in zip(outputs, expected if isinstance(expected, list | tuple) else [expected], strict=True):
            error = float((got.double() - wanted).abs().max()) / float(wanted.abs().max())
            narrow = torch.bfloat16 in (got.dtype, inputs[0].dtype)  # logits are rounded before the softmax
            assert error < (3e-2 if narrow else 5e-6), name


# Statistics of attention_grad can't be random.
COMPARED = [number for number, (name, *_) in enumerate(large_runs()) if name != "attention_grad"]


def test_large_shapes_agree_with_the_reference_and_the_number_of_threads_changes_no_bit(folder: Path) -> None:
    results, runs = [], large_runs()
    for threads in (1, 3):
        device = open_device(Sizing(threads, thread_cost=1, block=128), folder)
        results.append(run_all(device, runs))
        device.close()
    for (name, *_), first, second in zip(runs, *results, strict=True):
        for one, two in zip(first, second, strict=True):
            assert torch.equal(one, two), name
    assert_near_reference([runs[number] for number in COMPARED], [results[0][number] for number in COMPARED])


@pytest.mark.parametrize("kind", ["x86-64-v3", "x86-64"])
def test_large_shapes_agree_with_the_reference_on_lesser_vectors(
    folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not processor.is_x86() or "avx2" not in processor.vector_extensions():
        pytest.skip("no x86 processor with AVX2")
    monkeypatch.setenv(processor.VARIABLE, kind)
    runs = [large_runs()[number] for number in COMPARED]
    assert_near_reference(runs, run_all(open_device(SMALL, folder), runs))


def test_more_experts_are_sorted_than_a_stack_has_room_for(device: NativeDevice) -> None:
    count = 3 * 2**20
    ids = torch.tensor([[count - 1, 0], [5, count - 1], [0, 7]])
    ((order, places, offsets),) = run_all(device, [("sort_by_expert", [ids], {"count": count})])
    assert order.tolist() == [1, 4, 2, 5, 0, 3] and places.tolist() == [[4, 0], [2, 5], [1, 3]]
    assert torch.equal(offsets, torch.searchsorted(ids.flatten().sort().values, torch.arange(count + 1)))


def test_hidden_keys_stay_hidden_whatever_the_scale(device: NativeDevice) -> None:
    qkv = torch.randn(1, 9, 3 * 8, generator=torch.Generator().manual_seed(1))
    inputs, mask = [qkv, *[None] * 5], AttentionMask(window=3)
    runs: Runs = [("attention", inputs, {"heads": 2, "scale": scale, "mask": mask}) for scale in (0.0, -0.5, 1e-38)]
    for (_, _, attributes), found in zip(runs, run_all(device, runs), strict=True):
        expected = op("attention").reference(qkv.double(), *inputs[1:], **attributes)
        for got, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-6)
