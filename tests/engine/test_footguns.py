"""Each known trap of captured training. The oracle is the static engine, which golden tests hold to PyTorch.

SILENT marks a trap that elsewhere trains on wrong numbers without a word; RAISES one that must be refused by name.
Sources of the traps are issues of PyTorch, burn, tt-metal and tinygrad about captured or compiled training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.recording_device import RecordingDevice
from tests.models.session import Session, tensor_by_tensor_equal, token_batch
from tests.native.conftest import require_compiler
from tests.ttnn.runs import adamw, batch, gpt, mlp, sgd
from ttrain import ops
from ttrain.autodiff import backward
from ttrain.core.errors import CaptureError
from ttrain.core.spec import TensorSpec
from ttrain.device.null import NullDevice
from ttrain.device.settings import DeviceConfig
from ttrain.device.torch.device import open_device
from ttrain.engine.state import State, StateTensor
from ttrain.engine.static import StaticEngine
from ttrain.engine.traced import TracedEngine
from ttrain.graph import Graph, Kind

Device = Callable[[], Any]
ROWS, STEPS, DROPOUT = 4, 20, 0.3
GPT_SIZE = {"layers": 2, "heads": 2, "width": 32, "context": 16, "vocabulary": 29}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> Iterator[Callable[[], Any]]:
    """Opens a device of its own for every run: one that holds a capture refuses the memory of another run."""
    if request.param == "cpu":
        require_compiler()
    elif not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")
    opened: list[Any] = []

    def open_one() -> Any:
        opened.append(open_device(DeviceConfig(name=request.param, threads=1)))
        return opened[-1]

    yield open_one
    for each in opened:
        each.close()


def session(device: Device, engine: str = "traced", optimizer: Any = None, **how: Any) -> Session:
    """Return a session of a small GPT, or with `optimizer` of an MLP that it trains."""
    if optimizer is None:
        model: Any = gpt(**GPT_SIZE, dropout=how.pop("dropout", 0.0))
    else:
        model = mlp(inputs=6, outputs=3, width=16, layers=2, activation="tanh")
    return Session(model, optimizer or adamw(), ROWS, engine=engine, device=device(), **how)


def text_batch(index: int, rows: int = ROWS) -> dict[str, np.ndarray]:
    return token_batch(GPT_SIZE["vocabulary"], rows, GPT_SIZE["context"], index)


def train(ours: Session, *steps: int) -> list[dict[str, float]]:
    return [ours.train(text_batch(step), step, {"lr": 1e-2}, step) for step in steps]


# All SILENT. A rate that is a Python number freezes at the captured step's value, also one chosen from the loss, and so
# does the number of the step in a bias correction. Moments created lazily change the step between call one and call
# two. A velocity lies at old addresses or is set anew at every replay; gradients are added to those of the last window.
# A generator's state baked into the capture gives every step the same mask of dropout.
TRAPS: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": adamw(clip_norm=1.0)},
    "bias correction": {"optimizer": adamw(clip_norm=None, weight_decay=0.0, betas=[0.9, 0.999])},
    "velocity": {"optimizer": sgd(momentum=0.9, nesterov=True, clip_norm=1.0)},
    "accumulation": {"optimizer": sgd(momentum=0.9, clip_norm=1.0), "gradient_accumulation": 2},
    "text": {},
    "dropout": {"dropout": DROPOUT},
}


@pytest.mark.parametrize("trap", TRAPS)
def test_a_captured_step_equals_the_static_one(device: Device, trap: str) -> None:
    traced, static = (session(device, engine, **TRAPS[trap]) for engine in ("traced", "static"))
    moments, rows = traced.state.names(Kind.OPTIMIZER), ROWS * TRAPS[trap].get("gradient_accumulation", 1)
    assert moments and not any(traced.state.read(name).any() for name in moments)
    plateau, best, allocations = 1e-2, np.inf, set()
    for step in range(1, STEPS // 2):
        rate = plateau * 0.5 * (1 + np.cos(np.pi * step / STEPS))
        inputs = batch(traced.graph.model, rows, step), step, {"lr": rate}, step
        loss = traced.train(*inputs)["loss"]
        assert loss == pytest.approx(static.train(*inputs)["loss"], rel=1e-5)
        plateau, best = (plateau, loss) if loss < best else (plateau * 0.5, best)
        allocations.add(traced.engine.device.counters.allocations)
    for name in (*traced.parameters(), *moments) if "optimizer" in TRAPS[trap] else ():
        np.testing.assert_allclose(traced.state.read(name), static.state.read(name), rtol=1e-3, atol=2e-5)
    assert all(traced.state.read(name).any() for name in moments)
    assert traced.engine.counters.captures == len(traced.steps)
    assert len(allocations) == 1  # all before the end of the first step


def test_results_and_inputs_do_not_alias_the_step(device: Device) -> None:
    """SILENT: a result that is a view changes at the next replay; an input that is kept changes with its owner."""
    ours, static = (session(device, engine) for engine in ("traced", "static"))
    logits = ours.engine.build("logits", ours.graph.trace_logits)
    tokens = text_batch(0, rows=1)["tokens"]
    given = tokens.copy()
    first = logits({"tokens": given, "position": 3})["logits"]
    kept = first.copy()
    given[:] = 0
    logits({"tokens": given, "position": 5})
    assert np.array_equal(first, kept)
    expected = static.run(static.graph.trace_logits, {"tokens": tokens, "position": 3})["logits"]
    np.testing.assert_allclose(kept, expected, rtol=1e-4, atol=1e-5)


def test_evaluation_between_steps_changes_nothing(device: Device) -> None:
    """SILENT: steps that share an arena or a capture must not see one another's values."""
    plain, evaluated = (session(device, dropout=DROPOUT) for _ in range(2))
    evaluate = evaluated.engine.build("evaluate", evaluated.graph.trace_evaluate)
    for step in range(1, 6):
        losses = {evaluate({**text_batch(99), "loss_weight": 1 / 64})["loss"] for _ in range(2)}
        assert len(losses) == 1 and train(plain, step) == train(evaluated, step)
    assert tensor_by_tensor_equal(plain.parameters(), evaluated.parameters())


def test_checkpoint_between_replays_continues_bit_for_bit(device: Device) -> None:
    """SILENT: state restored into other buffers than the captured ones is never read."""
    whole, second = (session(device, dropout=DROPOUT) for _ in range(2))
    train(whole, 1, 2, 3)
    saved = {name: whole.state.read(name) for name in whole.state.names(Kind.PARAMETER, Kind.OPTIMIZER)}
    train(second, 50, 51)  # captured by now, with other values
    for name, array in saved.items():
        second.state.write(name, array)
    assert train(whole, 4, 5, 6, 7) == train(second, 4, 5, 6, 7)
    assert tensor_by_tensor_equal(whole.parameters(), second.parameters())


# Rules that need no arithmetic.


def doubling(graph: Graph) -> None:
    x = graph.input("x", TensorSpec((4, 4)))
    weight = graph.state_value("weight", TensorSpec((4, 4)), Kind.PARAMETER)
    loss = ops.mean(ops.relu(ops.matmul(x, weight)))
    graph.output("loss", loss)
    ops.assign(graph.state_value("weight/gradient", TensorSpec((4, 4)), Kind.GRADIENT), backward(loss, [weight])[0])


def null_engine(device: NullDevice) -> StaticEngine:
    spec = TensorSpec((4, 4))
    state = [StateTensor("weight", spec, Kind.PARAMETER), StateTensor("weight/gradient", spec, Kind.GRADIENT)]
    return TracedEngine(device, State(device, state))


INPUTS = {"x": np.zeros((4, 4), np.float32)}


def captured(runs: int = 2) -> tuple[RecordingDevice, StaticEngine]:
    device = RecordingDevice()
    engine = null_engine(device)
    step = engine.build("train", doubling)
    for _ in range(runs):
        step(INPUTS)
    return device, engine


def test_one_capture_however_often_it_runs_and_none_is_left_behind() -> None:
    """RAISES or hangs at exit elsewhere, where a device is closed before its captures."""
    device, engine = captured(runs=5)
    assert (device.captures, device.replays) == (1, 4)
    engine.close()
    device.close()
    with pytest.raises(CaptureError, match="closed"):
        device.log("relu", [], [])


def test_allocation_after_a_capture_is_refused_with_its_purpose() -> None:
    """RAISES: elsewhere a warning, then corrupted memory or a hang, depending on the layout."""
    device, engine = captured()
    with pytest.raises(CaptureError, match="scratch tensor: 64 bytes asked for after step train was captured"):
        device.allocate(TensorSpec((4, 4)), "scratch tensor")

    def large(graph: Graph) -> None:
        graph.output("y", ops.scale(graph.input("big", TensorSpec((512, 512))), 2.0))

    late = engine.build("late", large)  # a step that comes late and needs a larger arena names itself
    with pytest.raises(CaptureError, match="activations of train, late"):
        late({"big": np.zeros((512, 512), np.float32)})
    engine.close()
    device.allocate(TensorSpec((4, 4)), "scratch tensor")


@pytest.mark.parametrize(
    ("inside", "said"),
    [
        (lambda device, buffer: device.allocate(TensorSpec((4, 4))), "allocated while train is being captured"),
        (lambda device, buffer: device.upload(buffer, INPUTS["x"]), "host write while train is being captured"),
    ],
)
def test_what_would_happen_once_inside_a_capture_is_refused(inside: Callable[..., Any], said: str) -> None:
    """RAISES: a host write would happen once, at capture time."""
    device = RecordingDevice()
    buffer = device.allocate(TensorSpec((4, 4)))
    with pytest.raises(CaptureError, match=said):
        device.capture([lambda: inside(device, buffer)], "train")
    assert device.capturing is None


def test_what_can_not_be_captured_is_refused_by_name() -> None:
    """RAISES: what can't be a device input would silently keep its captured value."""
    reads = replace(NullDevice().kernels["relu"], host_scalars=("x",))
    device = NullDevice(rows={**NullDevice().kernels, "relu": reads})
    device.supports_capture = False
    with pytest.raises(CaptureError, match="engine=static"):
        null_engine(device)
