"""Guards: a step that is not finite, spikes, updates that change nothing, and out of memory."""

from __future__ import annotations

import dataclasses
import math
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.faults.conftest import Train, losses
from tests.train.reading import arrays, tensors
from ttrain.cli import main
from ttrain.core.errors import TtrainError
from ttrain.core.spec import DType, TensorSpec
from ttrain.data.settings import RegressionConfig
from ttrain.data.synthetic.regression import RegressionDataset
from ttrain.device.torch import device as torch_device
from ttrain.device.torch.device import TorchDevice
from ttrain.engine.state import State, StateTensor
from ttrain.engine.static import StaticStep
from ttrain.graph import Kind
from ttrain.train.checkpoint.checkpoint import Progress
from ttrain.train.checkpoint.retention import list_checkpoints
from ttrain.train.forecast.limits import is_out_of_memory
from ttrain.train.logging.metrics import read_events, read_metrics
from ttrain.train.loop.guards import LearningGuard, SpikeGuard
from ttrain.train.settings import GuardConfig
from ttrain.train.steps import update_graph
from ttrain.train.steps.step import StepResult, TrainStep


def kinds(run: str) -> list[str]:
    return [event["kind"] for event in read_events(Path(run))]


WAYS = pytest.mark.parametrize("way", ["engine=static train.gradient_accumulation=2", "engine=dynamic"])


@WAYS
@pytest.mark.parametrize("guard", ["guard.nonfinite=skip", "guard.activations=true"])
def test_a_guarded_step_is_the_same_step(train: Train, way: str, guard: str) -> None:
    overrides = [*way.split(), "train.steps=5"]
    assert train("run.dir=plain", *overrides) == train("run.dir=guarded", *overrides, guard) == 0
    assert tensors("plain") == tensors("guarded") and losses("plain") == losses("guarded")


@WAYS
def test_a_skipped_step_touches_nothing(train: Train, spoiled: Any, way: str, capsys: Any) -> None:
    spoiled({5: {"inputs": math.nan}})
    overrides = [*way.split(), "guard.nonfinite=skip", "train.save_every=1", "train.steps=4", "schedule.steps=8"]
    assert train("run.dir=run", *overrides) == 0
    before = tensors("run")
    assert main(["run.dir=run", "resume=auto", "train.steps=5"]) == 0
    assert tensors("run") == before and losses("run")[-1] == (5, None)
    assert main(["run.dir=run", "resume=auto", "train.steps=8"]) == 0
    assert all(np.isfinite(np.frombuffer(data, np.float32)).all() for data in tensors("run").values())
    event = next(event for event in read_events(Path("run")) if event["kind"] == "skipped")
    assert event["step"] == 5 and event["tensor"].startswith("gradient layers.")
    told = "Step 5: train/loss is nan; its update is skipped. From the loss backwards, the first bad gradient"
    assert told in capsys.readouterr().err
    lines = read_metrics(Path("run/metrics.jsonl"))
    assert [line["nonfinite_steps"] for line in lines if "lr" in line] == [0] * 4 + [1] + [0] * 3


def test_too_many_skips_stop_the_run(train: Train, spoiled: Any) -> None:
    spoiled({step: {"inputs": math.inf} for step in range(3, 9)})
    told = train.told("run.dir=run", "guard.nonfinite=skip", "guard.max_skips=3", code=1)
    assert "3 updates in a row were skipped. Step 5:" in told
    assert kinds("run")[2:] == ["skipped"] * 3 + ["failed"]


def test_a_rollback_goes_on_from_the_checkpoint_with_a_lower_rate(train: Train, spoiled: Any) -> None:
    """The step is bad once; after the rollback the run equals one that resumed by hand with the lower rate."""
    spoiled({6: {"inputs": math.nan}}, times=1)
    overrides = ["guard.nonfinite=rollback", "guard.lr_factor=0.25", "schedule=constant"]
    assert train("run.dir=run", *overrides) == 0
    assert [step for step, _ in losses("run")] == list(range(1, 9))
    rates = [line["lr"] for line in read_metrics(Path("run/metrics.jsonl")) if "lr" in line]
    assert rates == [1e-3] * 4 + [2.5e-4] * 4
    assert kinds("run") == ["started", "first_step", "rollback", "finished"]

    assert train("run.dir=plain", *overrides, "train.steps=4") == 0
    assert main(["run.dir=plain", "resume=auto", "train.steps=8", "optimizer.lr=2.5e-4"]) == 0
    assert tensors("run") == tensors("plain")


def test_rollbacks_end(train: Train, spoiled: Any) -> None:
    spoiled({6: {"inputs": math.nan}})
    assert train("run.dir=run", "guard.nonfinite=rollback", "guard.max_rollbacks=2") == 1
    assert kinds("run").count("rollback") == 2 and kinds("run")[-1] == "failed"
    spoiled({1: {"inputs": math.nan}})
    assert "No checkpoint was saved before it" in train.told("run.dir=early", "guard.nonfinite=rollback", code=1)


@pytest.mark.parametrize(("action", "expected"), [("warn", ["spike"]), ("rollback", ["rollback"])])
def test_spikes(train: Train, spoiled: Any, action: str, expected: list[str]) -> None:
    spoiled({7: {"targets": 70}}, times=1)
    assert train("run.dir=run", f"guard.spike={action}", "guard.spike_window=3", "guard.spike_factor=5") == 0
    assert [kind for kind in kinds("run") if kind in ("spike", "rollback")] == expected
    assert [step for step, _ in losses("run")] == list(range(1, 9))


def context_of(state: Any) -> tuple[Any, list[str]]:
    """A context of a loop, and the warnings that it takes in."""
    told: list[str] = []
    events = SimpleNamespace(warn=lambda kind, note, step: told.append(note))
    return SimpleNamespace(state=state, events=events, progress=Progress()), told


def test_a_spike_enters_no_median() -> None:
    context, told = context_of(None)
    guard = SpikeGuard(GuardConfig(spike="warn", spike_window=3), context, None)  # type: ignore[arg-type]
    for step, loss in enumerate((9, 1, 1, 1.9, 2.1, 50, 1.5)):
        assert not guard(step, StepResult(loss, 1.0, 4), {})
    assert [note.partition(":")[0] for note in told] == ["Step 4", "Step 5"] and "median is 1.0000" in told[0]
    guard.forget()
    assert not guard(7, StepResult(100.0, 1.0, 4), {}) and len(told) == 2


@pytest.mark.parametrize(
    ("freed", "words"),
    [(False, "has a gradient but did not move"), (True, "did not move, and its gradient is not kept")],
)
def test_updates_that_change_nothing_are_noticed(
    freed: bool, words: str, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine whose update does not reach the parameters, as a stale kernel's would not."""
    monkeypatch.setattr(update_graph, "FREED", 64 if freed else 1 << 40)
    optimizer = ["optimizer=sgd", "optimizer.momentum=0", "optimizer.clip_norm=null"]  # keeps nothing
    original = StaticStep.start

    def frozen(self: Any, inputs: Any) -> Any:
        state = self.engine.state
        kept = {name: state.read(name) for name in state.names(Kind.PARAMETER)}
        outputs = original(self, inputs)
        for name, array in kept.items():
            state.write(name, array)
        return outputs

    with monkeypatch.context() as patch:
        patch.setattr(StaticStep, "start", frozen)
        errors = train.told("run.dir=run", *optimizer, code=1)
        assert "Step 3: the updates do not reach the model" in errors and words in errors
        assert train("run.dir=on", *optimizer, "guard.check_learning=null") == 0
    assert train("run.dir=zero", *optimizer, "optimizer.lr=0") == 0


class Tensors:
    """A state of plain arrays."""

    def __init__(self, dtype: DType = DType.FP32, value: float = 1.0, moment: float = 1.0, freed: bool = False) -> None:
        self.dtype, self.freed = dtype, freed
        self.arrays = {
            "w": np.full(100, value, np.float32),
            "still": np.full(100, value, np.float32),
            "w/gradient": np.full(100, not freed, np.float32),
            "still/gradient": np.zeros(100, np.float32),
            "w/second_moment": np.full(100, moment, np.float32),
        }

    def names(self, kind: Kind) -> list[str]:
        slot = {Kind.PARAMETER: "", Kind.GRADIENT: "gradient", Kind.OPTIMIZER: "second_moment"}[kind]
        return [name for name in self.arrays if name.partition("/")[2] == slot]

    def spec(self, name: str) -> TensorSpec:
        return TensorSpec((100,), self.dtype)

    def keeps(self, name: str) -> bool:
        return not self.freed

    def sample(self, name: str, most: int) -> np.ndarray:
        return self.arrays[name].copy()


def asked(state: Tensors, rate: float, moved: int) -> tuple[list[str], list[str]]:
    """Problems and doubts after the first step."""
    guard = LearningGuard(GuardConfig(), context_of(state)[0])
    guard(1, StepResult(1.0, 10.0, 4), {"lr": rate})
    state.arrays["w"][:moved] += 0.5
    return guard.found()


def test_doubts_about_many_tensors_are_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    doubts, problems = [f"w{number} has a gradient but did not move" for number in range(5)], ["w9 stands"]
    for found in (([], doubts), (problems, doubts)):
        context, told = context_of(Tensors())
        guard = LearningGuard(GuardConfig(check_learning=2), context)
        monkeypatch.setattr(guard, "found", lambda found=found: found)
        assert not guard(6, StepResult(1.0, 1.0, 4), {"lr": 0.1}) and not told
        if found[0]:
            with pytest.raises(TtrainError, match="w9 stands.*w0 has a gradient"):
                guard(7, StepResult(1.0, 1.0, 4), {"lr": 0.1})
        else:
            assert not guard(7, StepResult(1.0, 1.0, 4), {"lr": 0.1})
            (line,) = told
            assert line.startswith("Step 7: w0 has a gradient")
            assert "w2 has a gradient but did not move and 2 more" in line


def test_learning_check() -> None:
    assert asked(Tensors(), 1e-3, 100) == ([], [])
    assert asked(Tensors(), 1e-3, 0) == (["w has a gradient but did not move"], [])
    assert asked(Tensors(value=1e6), 1e-3, 0) == ([], ["w has a gradient but did not move"])  # may be rounding
    assert asked(Tensors(moment=0), 1e-3, 100) == (["w/second_moment is still all zero"], [])
    still, unmoved = (f"{name} did not move, and its gradient is not kept" for name in ("still", "w"))
    assert asked(Tensors(freed=True), 1e-3, 100) == ([], [still])
    assert asked(Tensors(freed=True, moment=0), 1e-3, 100) == ([], [still])  # moved by weight decay, perhaps
    assert asked(Tensors(freed=True), 1e-3, 0) == (["w has a gradient but did not move", still], [])
    assert asked(Tensors(freed=True, moment=0), 1e-3, 0) == ([unmoved, still], [])
    problems, doubts = asked(Tensors(freed=True, moment=0, value=1e6), 1e-3, 0)
    assert not problems and len(doubts) == 2
    assert asked(Tensors(DType.BF16), 1e-3, 50) == ([], [])
    (doubt,) = asked(Tensors(DType.BF16), 1e-3, 2)[1]
    assert doubt == "w is bf16 without a master copy, and 98 % of its elements did not move"
    # At 1 numbers of bf16 are 2 ** -7 apart, so 1e-3 is lost, and no engine is to blame; 0.5 would not be.
    problems, (doubt,) = asked(Tensors(DType.BF16), 1e-3, 0)
    assert not problems and "100 % of its elements did not move" in doubt
    assert asked(Tensors(DType.BF16), 0.5, 0)[0] == ["w has a gradient but did not move"]


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_skipped_step_is_none_of_those_that_the_check_waits_for(bad: float) -> None:
    """Its gradients are still there, and no update has to have come of them."""
    state = Tensors()
    context, told = context_of(state)
    guard, gradients = LearningGuard(GuardConfig(check_learning=2), context), state.arrays["w/gradient"].copy()
    assert not guard(1, StepResult(1.0, 1.0, 4), {"lr": 0.1})
    state.arrays["w/gradient"][:] = bad
    assert not guard(2, StepResult(1.0, bad, 4, applied=False, loss_scale=8.0), {"lr": 0.1})
    state.arrays["w/gradient"], state.arrays["w"] = gradients, state.arrays["w"] + 0.5
    assert not guard(3, StepResult(1.0, 1.0, 4), {"lr": 0.1}) and not told


def test_the_check_reads_a_bounded_part_of_large_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every 50th row of 4 Mi elements moves."""
    spec = TensorSpec((2**12, 2**10), DType.BF16)
    state = State(
        TorchDevice("cpu"),
        [StateTensor("w", spec, Kind.PARAMETER, "run"), StateTensor("w/gradient", spec, Kind.GRADIENT, "run")],
    )
    values, taken, download = np.ones(spec.shape, np.float32), list[int](), TorchDevice.download

    def counted(device: TorchDevice, buffer: torch.Tensor) -> np.ndarray:
        taken.append(buffer.numel())
        return download(device, buffer)

    state.write("w", values)
    state.write("w/gradient", values)
    monkeypatch.setattr(TorchDevice, "download", counted)
    context, told = context_of(state)
    guard = LearningGuard(GuardConfig(check_learning=1), context)
    values[::50] += 0.5
    state.write("w", values)
    assert not guard(1, StepResult(1.0, 1.0, 4), {"lr": 0.5})
    (line,) = told
    assert "98 % of its elements did not move" in line and "optimizer.stochastic_rounding=true" in line
    assert sum(taken) <= 3 * 2**16


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batches of more than two rows do not fit."""
    original = StaticStep.start

    def call(self: Any, inputs: Any) -> Any:
        if self.name != "evaluate" and len(inputs.get("inputs", ())) > 2:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory")
        return original(self, inputs)

    monkeypatch.setattr(StaticStep, "start", call)


def test_out_of_memory_names_classes_and_keys(train: Train, little_memory: None) -> None:
    errors = train.told("run.dir=run", code=1)
    for part in ("Out of memory on cpu", "can't allocate memory", "parameter", "gradient", "optimizer",
                 "values of a step", "train.gradient_accumulation=2 (a micro-batch of 2)", "=bf16"):  # fmt: skip
        assert part in errors
    assert "Traceback" not in errors and kinds("run")[-1] == "failed"


def test_out_of_memory_shrinks_the_micro_batch_and_nothing_else(train: Train, little_memory: None, capsys: Any) -> None:
    overrides = ["train.batch_size=8", "train.eval_sequences=22"]
    assert train("run.dir=run", *overrides, "recover.oom=shrink") == 0
    assert capsys.readouterr().err.count("WARNING: Out of memory") == 2
    assert [kind for kind in kinds("run") if kind == "shrunk"] == ["shrunk"] * 2
    assert train("run.dir=by_hand", *overrides, "train.gradient_accumulation=4") == 0
    assert tensors("run") == tensors("by_hand") and losses("run") == losses("by_hand")


def test_a_micro_batch_of_one_can_not_shrink(train: Train, little_memory: None, monkeypatch: Any) -> None:
    monkeypatch.setattr(StaticStep, "start", lambda *_: (_ for _ in ()).throw(MemoryError()))
    assert train("run.dir=run", "recover.oom=shrink", "train.batch_size=2") == 1
    assert kinds("run").count("shrunk") == 1 and kinds("run")[-1] == "failed"


def test_what_out_of_memory_looks_like() -> None:
    class OutOfMemoryError(RuntimeError): ...

    assert is_out_of_memory(MemoryError()) and is_out_of_memory(OutOfMemoryError("CUDA"))
    assert is_out_of_memory(RuntimeError("TT_FATAL: Out of Memory: Not enough space to allocate 12 B DRAM buffer"))
    wrapped = ValueError("x")
    wrapped.__cause__ = MemoryError()
    assert is_out_of_memory(wrapped)
    assert not is_out_of_memory(RuntimeError("shapes differ")) and not is_out_of_memory(ValueError("out of memory"))


@WAYS
def test_watched_activations_have_the_right_norm(train: Train, way: str) -> None:
    assert train("run.dir=watched", *way.split(), "train.steps=3", "model.layers=1", "guard.activations=true") == 0
    lines = [line for line in read_metrics(Path("watched/metrics.jsonl")) if "lr" in line]
    assert len(lines) == 3 and all(line["activation_norm"] > 0 for line in lines)

    batch = RegressionDataset(RegressionConfig(examples=64), 8, 8).batch("train", 1337, 2 * 4, 4)
    weights = arrays("watched", 2, "parameters-*")
    parts = np.split(batch["inputs"], 1 + ("accumulation" in way))
    norms = [np.linalg.norm(part @ weights["layers.0.weight"].T + weights["layers.0.bias"]) for part in parts]
    assert lines[-1]["activation_norm"] == pytest.approx(max(norms), rel=1e-4)


def test_a_bad_activation_is_found_where_loss_and_gradients_hide_it() -> None:
    result = StepResult(1.0, 2.0, 4, activation_norm=math.inf)
    assert not result.finite and result.bad == "activation_norm is inf"
    assert StepResult(1.0, 2.0, 4).finite


# the tensor that went wrong first is the one that an independent computation finds


LIMIT = 50.0  # above it the faulty kernels overflow


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`faulty("relu")` makes results of that kernel above LIMIT infinite."""
    original = torch_device.kernel_table

    def choose(name: str) -> None:
        def table(context: Any) -> Any:
            rows = dict(original(context))

            def bind(at: str, ins: Any, outs: Any, attributes: Any, work: Any) -> Any:
                launch = rows_before[at].bind(ins, outs, attributes, work)
                if at == "linear" and attributes.get("activation") != name:
                    return launch

                def call() -> None:
                    launch()
                    outs[0][outs[0].abs() > LIMIT] = torch.inf

                return call

            rows_before = dict(rows)
            for at in (name, "linear"):  # an engine that fuses has the activation in there
                rows[at] = dataclasses.replace(rows[at], bind=partial(bind, at))
            return rows

        monkeypatch.setattr(torch_device, "kernel_table", table)

    return choose


def hidden(values: dict[str, np.ndarray], inputs: np.ndarray) -> list[np.ndarray]:
    """Activations after every relu, and the output."""
    found, layers = [inputs], len(values) // 2
    for layer in range(layers):
        out = found[-1] @ values[f"layers.{layer}.weight"].T + values[f"layers.{layer}.bias"]
        found.append(np.maximum(out, 0) if layer < layers - 1 else out)
    return found[1:]


WORDS = ["schedule=constant", "guard.max_skips=1", "train.save_every=2", "model.layers=3"]


@pytest.mark.parametrize(("engine", "gradient_accumulation"), [("static", 2), ("dynamic", 1)])
def test_the_first_activation(
    train: Train, faulty: Any, spoiled: Any, capsys: Any, engine: str, gradient_accumulation: int
) -> None:
    batches = spoiled({5: {"inputs": 100.0}})
    overrides = [*WORDS, f"engine={engine}", f"train.gradient_accumulation={gradient_accumulation}"]
    assert train("run.dir=good", *overrides, "train.steps=4", "train.save_every=1") == 0
    faulty("relu")
    assert train("run.dir=run", *overrides, "guard.nonfinite=skip") == 1
    expected = ""
    for part in np.split(batches[5]["inputs"], gradient_accumulation):
        for layer, values in enumerate(hidden(arrays("good", 4, "parameters-*"), part)[:-1]):
            count = int((values > LIMIT).sum())
            expected = expected or (count and f" makes in layers.{layer} ({count} of {values.size} elements)") or ""
    assert "layers.0" in expected
    errors = capsys.readouterr().err
    assert "The first tensor with NaN or Inf is the activation that " in errors and expected in errors
    assert "(step 4)" in errors and [c.step for c in list_checkpoints(Path("run/checkpoints"))[0]] == [2, 4]


NO_CLIP = "optimizer.clip_norm=null"
NORM = r"is the result that global_norm makes in clip \(1 of 1 elements\)\."
GRADIENT = r"The first tensor with NaN or Inf is the gradient that relu_grad makes in layers\.1 \("
# What is multiplied in step 5, which kernel overflows, further overrides, and what is told.
TOLD: dict[str, tuple[dict[str, float], str, list[str], str]] = {
    "gradient": ({"targets": 1e4}, "relu_grad", [NO_CLIP], f"Step 5: grad_norm is (inf|nan).*{GRADIENT}"),
    "input": ({"targets": np.inf}, "", [], r"NaN or Inf is input targets \((\d+) of \1 elements\)\."),
    "input of an applied step": ({"targets": np.inf}, "", ["guard.nonfinite=stop"], r"input targets \((\d+) of \1 "),
    "norm of finite gradients": ({"inputs": 1e3, "targets": 1e18}, "", ["model.layers=1"], f" is inf.*{NORM}"),
}


@pytest.mark.parametrize("what", TOLD)
def test_what_went_wrong_first_is_told(train: Train, faulty: Any, spoiled: Any, capsys: Any, what: str) -> None:
    factors, kernel, overrides, told = TOLD[what]
    spoiled({5: factors})
    if kernel:
        faulty(kernel)
    assert train("run.dir=run", *WORDS, "guard.nonfinite=skip", *overrides) == 1
    assert re.search(told, capsys.readouterr().err, re.DOTALL)


def test_parameters_that_were_bad_before(train: Train, spoiled: Any) -> None:
    """An update that overflows shows in the next step, which is told apart from a bad forward pass."""
    spoiled({1: {"targets": 1e3}})
    overrides = ["optimizer=sgd", "optimizer.lr=3e38", NO_CLIP, "guard.nonfinite=skip"]
    told = train.told("run.dir=run", *WORDS, *overrides, code=1)
    assert "Step 2: train/loss is nan. The first tensor with NaN or Inf is parameter layers." in told


@pytest.mark.parametrize("freed", [False, True])
def test_an_applied_step_names_the_gradient_and_a_resumed_run_the_tensor(
    train: Train, faulty: Any, spoiled: Any, capsys: Any, freed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoiled({5: {"targets": 1e4}})
    monkeypatch.setattr(update_graph, "FREED", 64 if freed else 1 << 40)
    faulty("relu_grad")
    errors = train.told("run.dir=run", *WORDS, NO_CLIP, code=1)
    assert "From the loss backwards, the first bad gradient is gradient layers.1." in errors
    assert "guard.nonfinite=skip guard.max_skips=1 names the first bad tensor of the step" in errors
    assert main(["run.dir=run", "resume=auto", "guard.nonfinite=skip", "guard.max_skips=1"]) == 1
    assert re.search(f"Step 5:.*{GRADIENT}", capsys.readouterr().err, re.DOTALL)


def test_a_search_that_fails_hides_nothing(train: Train, spoiled: Any, capsys: Any, monkeypatch: Any) -> None:
    spoiled({5: {"targets": np.nan}})
    monkeypatch.setattr(TrainStep, "inspect", lambda *_: (_ for _ in ()).throw(RuntimeError("no more memory")))
    monkeypatch.setattr("ttrain.train.loop.guards._bad_elements", lambda _: None)
    assert train("run.dir=run", *WORDS, "guard.nonfinite=skip") == 1
    told = "Step 5: train/loss is nan. The search for the first bad tensor failed: no more memory."
    assert told in capsys.readouterr().err
