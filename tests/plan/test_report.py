"""The numbers of a plan's report against counts made by hand or by other means; a graph and a plan as text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.models.session import initial_values
from tests.ttnn.runs import adamw, gpt, mlp, sgd
from ttrain import ops
from ttrain.autodiff import backward
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.base import NUMPY_DTYPES, Device
from ttrain.device.null import NullDevice
from ttrain.device.settings import DeviceConfig
from ttrain.device.torch.device import open_device
from ttrain.device.torch.planned import planned
from ttrain.engine.dynamic import DynamicEngine
from ttrain.engine.state import State
from ttrain.engine.static import StaticEngine
from ttrain.engine.traced import TracedEngine
from ttrain.graph import Graph, Kind, Stage
from ttrain.plan import build_plan
from ttrain.train.checkpoint.save import CheckpointContent, save_checkpoint
from ttrain.train.forecast.plan_report import PlanReport, parameter_groups, plan_report
from ttrain.train.forecast.show import show, show_plan
from ttrain.train.forecast.step_cost import CLASSES, PlannedBuffer, step_cost
from ttrain.train.steps.session import Session, flops_per_step
from ttrain.train.steps.step_graph import StepGraph

SIZES = {"layers": 2, "heads": 2, "width": 32, "context": 16, "vocabulary": 29}


def session(
    device: Device, model: Any = None, optimizer: Any = None, gradient_accumulation: int = 1, engine: Any = StaticEngine
) -> Session:
    graph = StepGraph(model or gpt(**SIZES), optimizer or adamw(), 4, gradient_accumulation)
    state = State(device, graph.state_tensors())
    return Session(graph, state, engine(device, state))


def report(device: Device, **options: Any) -> PlanReport:
    opened = session(device, **options)
    return plan_report(opened.graph, opened.state, opened.build_training())


def test_operations_of_a_linear_model_by_hand() -> None:
    rows, width = 4, 8
    opened = session(NullDevice(), mlp(layers=1, width=width, inputs=None, outputs=None, bias=False), sgd())
    graph, cost = opened.graph, plan_report(opened.graph, opened.state, opened.build_training())
    product, weight = 2 * rows * width * width, width * width
    squared_error = 3 * rows * width + 1  # and its weight
    assert cost.flops["forward"] == product + squared_error
    # Backward: the gradient of the loss at 3 an element, and that of W; x is no parameter.
    assert cost.flops["backward"] == product + 3 * rows * width
    assert cost.flops["update"] == 2 * weight + 1 + 3 + 3 * weight  # norm; clip factor; its product, lr's, and a sum
    assert sum(cost.flops.values()) == flops_per_step(graph)


def test_what_backward_reads_of_forward_is_told_of_compiled_steps_too() -> None:
    """Their graphs have views of backward in the middle of forward."""
    engines = StaticEngine, TracedEngine
    static, traced = (report(planned(DeviceConfig("cpu")), engine=engine).costs["train"]["kept"] for engine in engines)
    assert 0.5 * static < traced <= static


def test_bytes_moved_by_hand() -> None:
    graph = Graph()
    x, weight = graph.input("x", TensorSpec((4, 3))), graph.state_value("w", TensorSpec((5, 3)), Kind.PARAMETER)
    y = ops.linear(x, weight)
    with graph.stage(Stage.BACKWARD):
        graph.output("y", ops.multiply(y, y))
    cost = step_cost(graph, build_plan(graph, NullDevice().kernels))
    assert cost["moved"] == {"forward": 4 * (12 + 15 + 20), "backward": 4 * (20 + 20), "update": 0}
    assert cost["flops"] == cost["executed_flops"] == {"forward": 2 * 20 * 3, "backward": 20, "update": 0}


def test_recomputation_is_told_apart_from_what_the_model_needs() -> None:
    kept, again = report(NullDevice()), report(NullDevice(), model=gpt(recompute="block", **SIZES))
    assert again.flops == kept.flops
    ratios = [sum(each.costs["train"]["executed_flops"].values()) / sum(each.flops.values()) for each in (kept, again)]
    assert ratios[0] < 1.2 < ratios[1]


def test_the_peak_is_split_into_classes_without_remainder_and_every_buffer_is_listed() -> None:
    steps = session(NullDevice()).build_training()
    for name, step in steps.items():
        assert step.plan is not None
        cost = step_cost(step.plan.graph, step.plan)
        assert set(cost["memory"]) == set(CLASSES)
        assert sum(cost["memory"].values()) == cost["peak"] <= cost["arena"] + cost["borrowed"]
        assert (cost["kept"] is None) is (name != "train")
    labels = {buffer.label: buffer for buffer in map(PlannedBuffer.of, steps["train"].plan.blocks)}
    inputs = ["tokens", "targets", "loss_weight", "seed", "lr", "step"]
    assert {label for label, buffer in labels.items() if buffer.group == "inputs"} == {f"input {x}" for x in inputs}
    kept = labels["blocks.0 attention.log_sum_exp fp32[4, 2, 16]"]
    assert kept.group == "activations" and kept.nbytes == 4 * 4 * 2 * 16 and kept.end > kept.start + 10


def test_parameters_are_counted_by_modules() -> None:
    model = gpt(**SIZES)
    groups = parameter_groups(model)
    block = [f"blocks.*.{part}" for part in ("attention_norm", "attention", "feed_forward_norm", "feed_forward")]
    assert list(groups) == ["embedding", "positions", *block, "norm"]
    assert sum(groups.values()) == model.parameter_count
    assert groups["blocks.*.attention"] == 2 * (32 * 96 + 96 + 32 * 32 + 32)


def test_a_checkpoint_takes_as_many_bytes_on_disk_as_planned(tmp_path: Any) -> None:
    opened = session(NullDevice())
    saved = save_checkpoint(tmp_path, opened.state, CheckpointContent(step=1, config={}))
    tensors = sum(entry["bytes"] for name, entry in saved.files.items() if name.endswith(".safetensors"))
    planned_bytes = plan_report(opened.graph, opened.state, {}).checkpoint
    names = len(opened.state.names(Kind.PARAMETER, Kind.OPTIMIZER))
    assert planned_bytes < tensors < planned_bytes + 200 * names  # names, shapes and offsets in the header


@pytest.mark.parametrize(("compute", "gradient_accumulation"), [(DType.FP32, 1), (DType.BF16, 2)])
def test_planned_without_the_device_is_what_the_device_takes(compute: DType, gradient_accumulation: int) -> None:
    """The CPU as planned against the CPU after one step of each kind: equal but for the gaps between tensors."""
    config = DeviceConfig(name="cpu", threads=1)
    model = gpt(compute, **SIZES)
    foreseen = report(planned(config), model=model, gradient_accumulation=gradient_accumulation)
    device = open_device(config)
    opened = session(device, model=model, gradient_accumulation=gradient_accumulation)
    steps = opened.build_training()
    measured = plan_report(opened.graph, opened.state, steps)
    assert measured == foreseen
    for name, value in initial_values(model, 0).items():
        opened.state.write(name, value)
    for step in steps.values():
        step({key: np.zeros(spec.shape, NUMPY_DTYPES[spec.dtype]) for key, spec in step.inputs.items()})
    assert foreseen.memory <= device.counters.allocated_bytes <= 1.1 * foreseen.memory


def test_a_traced_step_is_planned_with_the_kernels_that_would_be_compiled() -> None:
    config = DeviceConfig(name="cpu", threads=1)
    static, traced = report(planned(config)), report(planned(config), engine=TracedEngine)
    assert traced.flops == static.flops and traced.costs["train"]["memory"] != static.costs["train"]["memory"]
    device = open_device(config)
    assert report(device, engine=TracedEngine) == traced  # nothing is compiled before a step runs
    device.close()


def test_planning_touches_no_gpu() -> None:
    for name in ("auto", "cpu", "cuda"):
        device = planned(DeviceConfig(name=name))
        assert report(device).memory > 0
        assert device.name in ("cpu", "cuda") and not device.computes
    assert not torch.cuda.is_initialized()


def test_without_a_plan_operations_are_known_and_memory_is_not() -> None:
    dynamic, static = report(NullDevice(), engine=DynamicEngine), report(NullDevice())
    assert dynamic.flops == static.flops and dynamic.placed == static.placed
    assert not dynamic.planned and dynamic.held["arena"] == 0
    assert "not planned" in dynamic.text() and "Arena of each step" not in dynamic.text()


def test_the_op_list_tells_where_every_value_lies() -> None:
    graph = Graph()
    x, state = graph.input("x", TensorSpec((2, 3))), graph.state_value("s", TensorSpec((3, 2)), Kind.GRADIENT)
    with graph.scope("up"):
        y = ops.relu(ops.transpose(x))
    ops.assign(state, y)
    graph.output("z", ops.reshape(ops.tanh(y), (6,)))
    text = show_plan(build_plan(graph, NullDevice().kernels))
    for line in (
        "arena: 64 bytes",
        "    0      0 forward  up  =s:fp32[3, 2] = transpose(@0+24)",
        "    2      - forward      =s:fp32[3, 2] = assign(=s, =s)",
        "    4      - forward      @0+24:fp32[6] = reshape(@0+24, shape=(6,))",
        "           0           24        3..5  activations: tanh fp32[3, 2]",
    ):
        assert line in text.splitlines(), text


def recorded_step() -> Graph:
    graph = Graph()
    weight = graph.state_value("weight", TensorSpec((4, 3)), Kind.PARAMETER)
    with graph.scope("up"):
        y = ops.relu(ops.linear(graph.input("x", TensorSpec((2, 3))), weight))
    loss = ops.reduce_sum(y, (0, 1))
    graph.output("loss", loss)
    (gradient,) = backward(loss, [weight])
    with graph.stage(Stage.UPDATE), graph.within(copy=1):
        ops.assign(graph.state_value("weight/gradient", gradient.spec, Kind.GRADIENT), gradient)
    return graph


def test_a_step_as_text_and_single_stages_of_it() -> None:
    text = show(recorded_step())
    for line in (
        "parameter weight:fp32[4, 3]",
        "forward  up          %2:fp32[2, 4] = linear(x, weight, -)",
        "backward up          %9:fp32[4, 3] = matmul(%8, x, transpose_a=True, transpose_b=False)",
        "update               %12:fp32[4, 3] = assign(weight/gradient, %9)  (copy 1)",
        "output loss = %4",
    ):
        assert line in text.splitlines(), text
    lines = show(recorded_step(), [Stage.UPDATE]).splitlines()
    assert [line.split()[0] for line in lines] == ["input", "parameter", "gradient", "update", "output"]
