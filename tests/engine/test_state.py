"""Persistent tensors: names, layout in memory, and the way to and from the host."""

from __future__ import annotations

import numpy as np
import pytest

from tests.engine.recording_device import RecordingDevice
from ttrain.core.errors import GraphError
from ttrain.core.spec import FLAT_ALIGNMENT, DType, TensorSpec
from ttrain.device.null import NullDevice
from ttrain.device.torch.device import TorchDevice
from ttrain.engine.state import State, StateTensor
from ttrain.graph import Kind

BF16 = TensorSpec((4,), DType.BF16)
SHAPES = {"norm.weight": (5,), "up.weight": (7, 3), "up.bias": (7,)}


def tensors(dtype: DType = DType.FP32) -> list[StateTensor]:
    listed = [StateTensor(path, TensorSpec(shape), Kind.PARAMETER, "run") for path, shape in SHAPES.items()]
    listed += [StateTensor(f"{p}/compute", TensorSpec(s, dtype), Kind.COPY, "run") for p, s in SHAPES.items()]
    for slot in ("first_moment", "second_moment"):
        listed += [StateTensor(f"{p}/{slot}", TensorSpec(s), Kind.OPTIMIZER, "run") for p, s in SHAPES.items()]
    return listed


def test_names_come_in_order_and_by_kind() -> None:
    state = State(NullDevice(), tensors())
    assert state.names(Kind.PARAMETER) == list(SHAPES)
    assert state.names()[:3] == list(SHAPES) and len(state.names()) == 12
    assert state.names(Kind.COPY, Kind.PARAMETER) == [*SHAPES, *(f"{path}/compute" for path in SHAPES)]
    assert state.spec("up.weight") == TensorSpec((7, 3))
    assert state.tensor("up.weight/first_moment").kind is Kind.OPTIMIZER
    assert state.nbytes(Kind.OPTIMIZER) == 2 * 4 * (5 + 21 + 7)


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(GraphError, match="no persistent tensor 'up.wieght'. Did you mean 'up.weight'"):
        State(NullDevice(), tensors()).read("up.wieght")


def test_a_name_is_given_once() -> None:
    with pytest.raises(GraphError, match="two persistent tensors have the same name"):
        State(NullDevice(), [tensors()[0], tensors()[0]])


def test_slots_of_a_run_lie_side_by_side_at_equal_element_offsets() -> None:
    state = State(RecordingDevice(), tensors(DType.BF16))
    offsets = {}
    for slot, itemsize in (("", 4), ("/compute", 2), ("/first_moment", 4), ("/second_moment", 4)):
        placed = [state.placed(f"{path}{slot}") for path in SHAPES]
        assert len({arena.number for arena, _, _ in placed}) == 1
        offsets[slot] = [byte // itemsize for _, byte, _ in placed]
    assert len(set(map(tuple, offsets.values()))) == 1
    assert offsets[""] == [0, FLAT_ALIGNMENT, 2 * FLAT_ALIGNMENT]


def test_runs_kinds_and_dtypes_have_memory_of_their_own() -> None:
    device, spec = NullDevice(), TensorSpec((4,))
    others = [(Kind.PARAMETER, "two", spec), (Kind.OPTIMIZER, "one", spec), (Kind.PARAMETER, "one", BF16)]
    made = [StateTensor(str(number), of, kind, flat) for number, (kind, flat, of) in enumerate(others)]
    State(device, [StateTensor("a", spec, Kind.PARAMETER, "one"), *made])
    assert device.counters.allocations == 4


@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16])
def test_a_written_parameter_reads_back_and_its_copy_follows(dtype: DType) -> None:
    state = State(TorchDevice("cpu"), tensors(dtype))
    values = np.linspace(-1, 1, 21, dtype=np.float32).reshape(7, 3)
    state.write("up.weight", values)
    assert np.array_equal(state.read("up.weight"), values)
    copy = state.read("up.weight/compute")
    assert copy.dtype == np.float32
    assert np.array_equal(copy, values) if dtype is DType.FP32 else np.abs(copy - values).max() <= 2**-8
    assert not state.read("up.bias").any()  # the neighbours stay as they were
    copy[:] = 9
    assert np.array_equal(state.read("up.weight"), values)  # what was read is the reader's own


def test_another_shape_is_refused() -> None:
    with pytest.raises(GraphError, match=r"up.weight: got an array \[3, 7\], expected fp32\[7, 3\]"):
        State(NullDevice(), tensors()).write("up.weight", np.zeros((3, 7), np.float32))


def test_rows_are_written_where_they_belong_or_refused() -> None:
    state = State(TorchDevice("cpu"), tensors())
    state.write_rows("up.weight", 2, np.ones((3, 3), np.float32))
    written = state.read("up.weight")
    assert written[2:5].all() and written.sum() == 9 and not state.read("up.bias").any()
    for start, shape in ((5, (3, 3)), (-1, (2, 3)), (0, (2, 4))):
        with pytest.raises(GraphError, match=r"up.weight: got rows .* expected rows of fp32\[7, 3\]"):
            state.write_rows("up.weight", start, np.ones(shape, np.float32))


ROWS, PARTS = (500, 90), ((64, 30_000), (30_016, 45_000))


@pytest.mark.parametrize("most", [44_999, 1000, 3])
@pytest.mark.parametrize("kept", ["whole", "bf16", "padded", "low_bits", "parts", "nowhere"])
def test_a_sample_is_some_elements_spread_evenly(kept: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = {"bf16": DType.BF16, "low_bits": DType.INT16}.get(kept, DType.FP32)
    padding, here = 7 * (kept == "padded"), kept not in ("parts", "nowhere")
    parts = PARTS if kept == "parts" else ()
    made = [StateTensor("w", TensorSpec(ROWS, dtype), Kind.PARAMETER, "run", padding, None, parts, here)]
    if kept == "low_bits":
        made.append(StateTensor("w/compute", TensorSpec(ROWS, DType.BF16), Kind.COPY, "run"))
    device = TorchDevice("cpu")
    state = State(device, made)
    rows = ROWS[0] - padding
    state.write("w", np.random.default_rng(1).standard_normal((rows, *ROWS[1:]), np.float32))
    whole, taken, download = state.read("w").reshape(-1), list[int](), device.download
    monkeypatch.setattr(device, "download", lambda buffer: taken.append(buffer.numel()) or download(buffer))
    found = state.sample("w", most)
    stride = next(stride for stride in range(1, 45_000, 2) if stride * most >= whole.size)
    np.testing.assert_array_equal(found, whole[::stride])
    assert len(found) <= most and sum(taken) <= 2 * (most + 1)
    assert bool(found.any()) == (kept != "nowhere")
