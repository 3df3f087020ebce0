"""Buffers: derived ones are there when a run starts, saved ones go on where a checkpoint left them; none is trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.models.centred import KEEP, WIDTH, Centred, waves
from tests.models.session import ENGINES, Session, open_cpu
from ttrain import ops
from ttrain.autodiff import backward
from ttrain.core.errors import CheckpointError, GraphError
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.base import Device
from ttrain.engine.state import State, StateTensor
from ttrain.engine.static import StaticEngine
from ttrain.graph import Graph, Kind
from ttrain.graph.verify import verify
from ttrain.nn.module import Buffer, use, use_buffer
from ttrain.optim.adamw import AdamW
from ttrain.optim.settings import AdamWConfig
from ttrain.testing import check_model
from ttrain.train.checkpoint.checkpoint import read_checkpoint
from ttrain.train.checkpoint.save import CheckpointContent, save_checkpoint
from ttrain.train.forecast.plan_report import plan_report
from ttrain.train.runs.export_folder import weight_state
from ttrain.train.runs.warm_start import open_warm_start
from ttrain.train.steps.step_graph import StepGraph

ROWS = 4
CONTENT = CheckpointContent(step=3, config={"model": {"name": "centred"}}, progress={}, tokenizer=None)


def golden(**options: Any) -> Device:
    pytest.importorskip("ttnn", reason="the package ttnn is not installed")
    from tests.ttnn.runs import golden as open_golden

    return open_golden(**options)


def partly_offloaded() -> Device:
    return golden(host_resident=["mean"])


def batch(number: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(number)
    return {name: generator.standard_normal((ROWS, WIDTH)).astype(np.float32) for name in ("inputs", "targets")}


def expected_mean(steps: int) -> np.ndarray:
    mean = np.zeros(WIDTH)
    for number in range(1, steps + 1):
        mean = KEEP * mean + (1 - KEEP) * batch(number)["inputs"].astype(np.float64).mean(0)
    return mean


def trained(device: Device, engine: str = "static", steps: int = 3) -> tuple[Session, list[float]]:
    session = Session(Centred(), AdamW(AdamWConfig()), ROWS, engine=engine, device=device)
    return session, go_on(session, 1, steps)


def go_on(session: Session, first: int, last: int) -> list[float]:
    return [session.train(batch(step), step, {"lr": 0.01})["loss"] for step in range(first, last + 1)]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("make", [open_cpu, golden, partly_offloaded])
def test_steps_read_both_and_write_the_saved_one(make: Callable[[], Device], engine: str) -> None:
    session, losses = trained(make(), engine)
    if engine != "traced":
        session.evaluate(batch(9))  # which leaves it alone
    np.testing.assert_allclose(session.state.read("table"), waves((WIDTH,)), rtol=1e-6)
    np.testing.assert_allclose(session.state.read("mean"), expected_mean(3), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(losses, trained(open_cpu())[1], rtol=1e-5)
    assert session.state.on_host("mean") is (make is partly_offloaded)


def test_it_is_no_parameter() -> None:
    model = Centred()
    assert model.parameter_count == WIDTH * WIDTH + WIDTH and list(model.buffers()) == ["table", "mean"]
    assert list(model.parameters()) == ["linear.weight", "linear.bias"]
    kinds = {each.name: each.kind for each in StepGraph(model, AdamW(AdamWConfig()), ROWS).state_tensors()}
    assert (kinds["table"], kinds["mean"]) == (Kind.CONSTANT, Kind.BUFFER)
    with (graph := Graph()).segment():  # a recomputed block writes it once
        loss = model.loss(graph, ROWS, training=True)
    backward(loss, [use(graph, parameter, DType.FP32) for parameter in model.parameters().values()])
    assert [node.op.name for node in graph.nodes].count("assign") == 1


@pytest.mark.parametrize("make", [open_cpu, golden])
def test_a_checkpoint_holds_the_saved_one_bit_for_bit(make: Callable[[], Device], tmp_path: Path) -> None:
    through, losses = trained(make(), steps=5)
    first, _ = trained(make(), steps=3)
    saved = save_checkpoint(tmp_path, first.state, CONTENT)
    assert {name.partition("-")[0] for name in saved.files if name.endswith("safetensors")} == {
        "parameters", "optimizer", "buffers",
    }  # fmt: skip
    weights = read_checkpoint(saved.path).weights()
    assert np.array_equal(weights["mean"], first.state.read("mean"))
    assert "table" not in weights
    second = Session(Centred(), AdamW(AdamWConfig()), ROWS, device=make())
    read_checkpoint(saved.path).load(second.state)
    assert go_on(second, 4, 5) == losses[3:]
    for name in through.state.names(Kind.PARAMETER, Kind.OPTIMIZER, Kind.BUFFER):
        assert np.array_equal(second.state.read(name), through.state.read(name)), name


def state_of(model: Centred, training: bool = True) -> State:
    return State(open_cpu(), StepGraph(model, AdamW(AdamWConfig()), ROWS).state_tensors(training=training))


def test_a_checkpoint_without_it_is_refused_by_name(tmp_path: Path) -> None:
    state, wanted = state_of(Centred(saved=False)), state_of(Centred())
    saved = save_checkpoint(tmp_path, state, CONTENT)
    with pytest.raises(CheckpointError, match="lacks mean"):
        saved.load(wanted)
    with pytest.raises(CheckpointError, match="also holds mean"):
        save_checkpoint(tmp_path / "other", wanted, CONTENT).load(state)


def test_sampling_export_and_a_warm_start_have_it(tmp_path: Path) -> None:
    session, _ = trained(open_cpu())
    saved = save_checkpoint(tmp_path, session.state, CONTENT)
    exported = save_checkpoint(tmp_path / "exported", weight_state(saved.weights(), Centred()), CONTENT).weights()
    assert exported.keys() == {"linear.weight", "linear.bias", "mean"}
    assert np.array_equal(exported["mean"], session.state.read("mean"))
    save_file(dict(exported), tmp_path / "w.safetensors")
    start = open_warm_start(str(tmp_path / "w.safetensors"), Centred())
    assert tuple(start.fitting) == ("linear.weight", "linear.bias", "mean")
    assert start.lines()[0].endswith("3 of 3 parameters (80 of 80 values) are taken.")


def test_the_plan_counts_each_by_itself() -> None:
    session: Any = Session(Centred(), AdamW(AdamWConfig()), ROWS)
    report = plan_report(session.graph, session.state, session.steps)
    parameters = 4 * (WIDTH * WIDTH + WIDTH)
    assert report.placed == {
        "parameter": parameters, "gradient": parameters, "optimizer": 2 * parameters, "buffer": 4 * WIDTH,
        "constant": 4 * WIDTH,
    }  # fmt: skip
    assert report.checkpoint == 3 * parameters + 4 * WIDTH
    assert "saved buffers" in report.text() and "derived buffers" in report.text()


def test_no_gradient_goes_through_what_is_written() -> None:
    """sum((w - m)^2) after m <- (m + w) / 2 has the gradient 2 (w - m); were m a function of w, half of it."""
    spec = TensorSpec((WIDTH,))
    state = State(open_cpu(), [StateTensor("w", spec, Kind.PARAMETER), StateTensor("m", spec, Kind.BUFFER)])
    state.write("w", np.arange(WIDTH, dtype=np.float32))

    def trace(recorded: Graph) -> None:
        w, m = (recorded.state_value(n, spec, k) for n, k in (("w", Kind.PARAMETER), ("m", Kind.BUFFER)))
        error = w - ops.assign(m, (m + w) * 0.5)
        recorded.output("gradient", backward(ops.reduce_sum(error * error, [0]), [w])[0])

    found = StaticEngine(state.device, state).build("step", trace)({})["gradient"]
    np.testing.assert_array_equal(found, np.arange(WIDTH))  # 2 (w - w / 2), m being zero before


def write_derived() -> None:
    graph = Graph()
    Centred(saved=False).loss(graph, ROWS, training=True)
    verify(graph, "recording")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Buffer((2,), np.zeros, saved=True, dtype=DType.INT64), "saved buffer of int64"),
        (lambda: Buffer((2,), lambda shape: np.zeros(3), path="x").first_values(), r"buffer x: got values \[3\]"),
        (lambda: use_buffer(Graph(), Buffer((2,), np.zeros)), "a buffer of shape"),
        (write_derived, "derived buffer. Declare it with saved=True"),
    ],
)
def test_mistakes_are_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        make()


@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16, DType.INT64, DType.BOOL], ids=str)
def test_a_derived_one_of_any_dtype(dtype: DType) -> None:
    buffer = Buffer((3, 2), lambda shape: np.arange(6).reshape(shape) % 3, dtype=dtype, path="t")
    tensor = StateTensor(buffer.path, buffer.spec, buffer.kind, first=buffer.first_values)
    for device in (open_cpu(), *([golden()] if dtype is not DType.BOOL else [])):  # ttnn has none
        values = State(device, [tensor]).read("t")
        assert np.array_equal(values, (np.arange(6).reshape(3, 2) % 3).astype(values.dtype))


def test_the_whole_model_agrees_with_pytorch() -> None:
    check_model(Centred(), ROWS, open_cpu())
