"""Promises of every engine, on the device without arithmetic."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.engine.recording_device import RecordingDevice
from tests.models.session import ENGINES
from ttrain import ops
from ttrain.autodiff import backward
from ttrain.core.errors import GraphError, ShapeError
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.base import Delivery
from ttrain.engine.base import Engine
from ttrain.engine.state import State, StateTensor
from ttrain.engine.static import StaticStep
from ttrain.graph import Graph, Kind, Stage

ROWS, WEIGHT = TensorSpec((4, 3)), TensorSpec((5, 3))
STATE = [StateTensor("w", WEIGHT, Kind.PARAMETER), StateTensor("w/gradient", WEIGHT, Kind.GRADIENT)]
INPUTS = {"x": np.zeros((4, 3), np.float32), "lr": 0.1}


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Engine:
    return open_engine(request.param)


def open_engine(name: str, state: list[StateTensor] = STATE) -> Engine:
    device = RecordingDevice()
    return ENGINES[name](device, State(device, state))


def train(graph: Graph) -> None:
    """loss = mean(gelu(x W^T)^2), its gradient, and W <- W - lr dW."""
    weight = graph.state_value("w", WEIGHT, Kind.PARAMETER)
    y = ops.gelu(ops.linear(graph.input("x", ROWS), weight))
    loss = ops.mean(ops.multiply(y, y))
    graph.output("loss", loss)
    (gradient,) = backward(loss, [weight])
    with graph.stage(Stage.UPDATE):
        stored = ops.assign(graph.state_value("w/gradient", WEIGHT, Kind.GRADIENT), gradient)
        ops.assign(weight, ops.subtract(weight, ops.multiply(stored, graph.input("lr", TensorSpec(())))))


def predict(graph: Graph) -> None:
    y = ops.linear(graph.input("x", ROWS), graph.state_value("w", WEIGHT, Kind.PARAMETER))
    graph.output("y", ops.relu(y))


def test_a_step_knows_its_inputs_and_hands_out_scalars_as_float_and_the_rest_as_arrays(engine: Engine) -> None:
    step = engine.build("train", train)
    assert step(INPUTS) == {"loss": 0.0} and step.inputs == {"x": ROWS, "lr": TensorSpec(())}
    y = engine.build("predict", predict)({"x": INPUTS["x"]})["y"]
    assert y.shape == (4, 5) and y.dtype == np.float32


@pytest.mark.parametrize("engine", ENGINES, indirect=True)
def test_after_the_first_call_only_dynamic_records_and_allocates(engine: Engine, monkeypatch: Any) -> None:
    step, recorded, append = engine.build("train", train), [], Graph.append
    step(INPUTS)
    monkeypatch.setattr(Graph, "append", lambda *of: recorded.append(of[1]) or append(*of))
    train(Graph())
    once, before = len(recorded), engine.device.counters.allocations
    for _ in range(5):
        step(INPUTS)
    anew = engine.name == "dynamic"
    assert len(recorded) == (6 * once if anew else once) > 0
    assert (engine.device.counters.allocations > before) == anew


REFUSED: dict[str, dict[str, Any]] = {
    "input 'x' has shape [8, 3], expected [4, 3]. A built step has fixed shapes": {"x": np.zeros((8, 3), np.float32)},
    "input 'x' has shape [3], expected [4, 3]": {"x": np.zeros((3,), np.float32)},
    "input 'lr' has shape [1], expected []": {"lr": np.zeros((1,), np.float32)},
    "unknown input 'xs'. Did you mean 'x'?": {"xs": 1.0},
    "input 'x' (fp32[4, 3]) is missing": {"x": None},
    "input 'x' has dtype complex128, expected float32": {"x": np.zeros((4, 3), complex)},
}


@pytest.mark.parametrize("said", REFUSED)
def test_another_input_than_declared_is_refused_by_name(engine: Engine, said: str) -> None:
    step = engine.build("train", train)
    step(INPUTS)
    inputs = {key: value for key, value in {**INPUTS, **REFUSED[said]}.items() if value is not None}
    with pytest.raises(ShapeError, match="step train.*" + re.escape(said)):
        step(inputs)
    step(INPUTS)  # and the step still works


@pytest.mark.parametrize(("value", "fits"), [(3, True), (np.int32(3), True), (3.5, False), (np.float32(3), False)])
def test_an_integer_input_takes_no_float(engine: Engine, value: Any, fits: bool) -> None:
    def trace(graph: Graph) -> None:
        seed = graph.input("seed", TensorSpec((), DType.INT64))
        graph.output("y", ops.dropout(graph.input("x", ROWS), seed, 0.5, 0))

    step = engine.build("dropout", trace)
    if fits:
        step({"x": INPUTS["x"], "seed": value})
    else:
        with pytest.raises(ShapeError, match="input 'seed' has dtype float.*, expected int64"):
            step({"x": INPUTS["x"], "seed": value})


OTHER: dict[str, list[StateTensor]] = {
    "there is no persistent tensor 'w'": [],
    "the graph uses parameter fp32[5, 3]": [StateTensor("w", TensorSpec((3, 5)), Kind.PARAMETER)],
    "w is placed as copy fp32[5, 3], the graph uses parameter fp32[5, 3]": [StateTensor("w", WEIGHT, Kind.COPY)],
}


@pytest.mark.parametrize("said", OTHER)
def test_a_step_on_other_state_is_refused_when_built(said: str) -> None:
    for name in ENGINES:
        with pytest.raises(GraphError, match=re.escape(said)):
            open_engine(name, state=OTHER[said]).build("predict", predict)


def test_a_step_that_records_nothing_is_refused(engine: Engine) -> None:
    with pytest.raises(GraphError, match="records nothing"):
        engine.build("empty", lambda graph: None)


def test_a_step_that_reads_what_it_overwrote_is_refused(engine: Engine) -> None:
    def trace(graph: Graph) -> None:
        weight = graph.state_value("w", WEIGHT, Kind.PARAMETER)
        ops.assign(weight, ops.scale(weight, 0.5))
        graph.output("y", ops.relu(weight))

    with pytest.raises(GraphError, match="after recording: .*relu.* reads w"):
        engine.build("stale", trace)


def test_a_fresh_result_is_copied_into_its_slot(engine: Engine) -> None:
    assert isinstance(engine.device, RecordingDevice)
    engine.device.deliveries["linear"] = Delivery.RETURNS
    engine.build("predict", predict)({"x": INPUTS["x"]})
    assert engine.device.launched == ["linear", "copy"]  # the activation is joined to the product


def wide(rows: int) -> Callable[[Graph], None]:
    def trace(graph: Graph) -> None:
        graph.output("y", ops.transpose(graph.input("x", TensorSpec((rows, 64)))))

    return trace


def test_steps_take_memory_at_the_first_call_and_share_it() -> None:
    engine = open_engine("static")
    steps = {rows: engine.build(f"wide{rows}", wide(rows)) for rows in (8, 64, 16)}
    allocated = engine.device.counters.allocated_bytes
    assert engine.device.counters.allocations == 2  # the state's
    for rows, step in steps.items():
        step({"x": np.zeros((rows, 64), np.float32)})
    assert isinstance(steps[64], StaticStep)
    assert engine.device.counters.allocations == 3
    assert engine.device.counters.allocated_bytes - allocated == steps[64].plan.arena_bytes
    for rows, more in ((32, 0), (128, 1)):  # a later one takes memory only where it needs more
        engine.build(f"wide{rows}", wide(rows))({"x": np.zeros((rows, 64), np.float32)})
        assert engine.device.counters.allocations == 3 + more
