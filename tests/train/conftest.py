"""A complete small model in numpy behind the interfaces of an engine, so that the loop is tested without one."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ttrain.core.spec import DType, TensorSpec
from ttrain.graph import Kind
from ttrain.train.checkpoint.checkpoint import Progress
from ttrain.train.checkpoint.retention import newest_complete
from ttrain.train.checkpoint.save import CheckpointContent
from ttrain.train.logging.loggers import Console, Loggers
from ttrain.train.logging.metrics import Events, Meter, MetricsFile, cut_metrics
from ttrain.train.loop.checkpoints import Checkpoints, RunContext
from ttrain.train.loop.evaluation import Evaluation, EvaluationResult
from ttrain.train.loop.guards import LearningGuard, NonFiniteGuard
from ttrain.train.loop.loop import Loop
from ttrain.train.runs.run_directory import RunDirectory
from ttrain.train.settings import GuardConfig, TrainConfig
from ttrain.train.steps.phases import BatchReader, PhaseSchedule, Position
from ttrain.train.steps.step import TrainStep

VOCABULARY = 11


class ArrayState:
    """Named fp32 arrays with kinds."""

    def __init__(self, arrays: Mapping[str, tuple[Kind, np.ndarray]]) -> None:
        self.kinds = {name: kind for name, (kind, _) in arrays.items()}
        self.arrays = {name: array for name, (_, array) in arrays.items()}

    def names(self, *kinds: Kind) -> list[str]:
        return [name for name, kind in self.kinds.items() if not kinds or kind in kinds]

    def spec(self, name: str) -> TensorSpec:
        return TensorSpec(self.arrays[name].shape, DType.FP32)

    def read(self, name: str) -> np.ndarray:
        return self.arrays[name].copy()

    def sample(self, name: str, most: int) -> np.ndarray:
        return self.read(name).reshape(-1)

    def write(self, name: str, array: np.ndarray) -> None:
        assert array.shape == self.arrays[name].shape
        self.arrays[name] = array.copy()


class BuiltStep:
    """A step that refuses missing and unknown inputs, as an engine's does."""

    def __init__(self, names: tuple[str, ...], run: Callable[[Mapping[str, Any]], dict[str, float]]) -> None:
        self.inputs = self.uploads = {name: TensorSpec(()) for name in names}
        self._run = run

    def __call__(self, inputs: Mapping[str, Any]) -> dict[str, float]:
        assert inputs.keys() == self.inputs.keys()
        return self._run(inputs)

    def start(self, inputs: Mapping[str, Any]) -> Callable[[], dict[str, float]]:
        return lambda: self(inputs)


@dataclass
class Bigram:
    """table[token] learns the one-hot target by least squares, with dropout by seed; SGD with momentum and clipping."""

    state: ArrayState = field(default_factory=lambda: ArrayState({}))
    momentum: float = 0.9
    clip: float = 1.0
    poison_step: int | None = None  # the loss of this step is NaN

    def __post_init__(self) -> None:
        table = np.random.default_rng(0).normal(0, 0.02, (VOCABULARY, VOCABULARY)).astype(np.float32)
        velocity = Kind.OPTIMIZER, np.zeros_like(table)
        self.state = ArrayState({"table.weight": (Kind.PARAMETER, table), "table.weight/velocity": velocity})
        self._gradient = np.zeros_like(table)

    def _loss(self, inputs: Mapping[str, Any], masked: bool) -> tuple[float, np.ndarray]:
        table = self.state.arrays["table.weight"]
        tokens, targets = inputs["tokens"].reshape(-1), inputs["targets"].reshape(-1)
        keep = np.ones((len(tokens), VOCABULARY), np.float32)
        if masked:
            keep = (np.random.default_rng(inputs["seed"]).random(keep.shape) > 0.1).astype(np.float32)
        wrong = np.where((targets >= 0)[:, None], table[tokens] * keep - np.eye(VOCABULARY)[targets], 0)
        gradient = np.zeros_like(table)
        np.add.at(gradient, tokens, (wrong * keep * inputs["loss_weight"]).astype(np.float32))
        return float(inputs["loss_weight"] * (wrong**2).sum() / 2), gradient

    def _update(self, inputs: Mapping[str, Any]) -> float:
        norm = float(np.sqrt((self._gradient.astype(np.float64) ** 2).sum()))
        factor = np.float32(min(1.0, self.clip / (norm + 1e-6)))
        velocity = np.float32(self.momentum) * self.state.arrays["table.weight/velocity"] + factor * self._gradient
        self.state.arrays["table.weight/velocity"] = velocity
        self.state.arrays["table.weight"] = self.state.arrays["table.weight"] - np.float32(inputs["lr"]) * velocity
        return norm

    def train(self, inputs: Mapping[str, Any]) -> dict[str, float]:
        loss, self._gradient = self._loss(inputs, masked=True)
        if inputs["step"] == self.poison_step:
            self.state.arrays["table.weight/velocity"][3, 4] = np.nan
            loss = float("nan")
        return {"loss": loss, "grad_norm": self._update(inputs)}

    def evaluate(self, inputs: Mapping[str, Any]) -> dict[str, float]:
        return {"loss": self._loss(inputs, masked=False)[0]}

    def steps(self) -> dict[str, BuiltStep]:
        return {"train": BuiltStep(("tokens", "targets", "loss_weight", "seed", "lr", "step"), self.train)}


class Cycles:
    """Sequences that mostly count upwards; a fifth of the targets are missing. Remembers what it was asked for."""

    context = 8
    fields = {"targets": TensorSpec((context,), DType.INT64)}

    def __init__(self) -> None:
        self.description = {"source": "cycles"}
        self.asked: list[tuple[str, int]] = []

    def batch(self, split: str, seed: int, first: int, rows: int) -> dict[str, np.ndarray]:
        self.asked.append((split, first))
        generator = np.random.default_rng([seed if split == "train" else 99, first // rows, 0])
        start = generator.integers(0, VOCABULARY, (rows, 1))
        text = (start + np.arange(self.context + 1)) % VOCABULARY
        text = np.where(generator.random(text.shape) < 0.1, generator.integers(0, VOCABULARY, text.shape), text)
        targets = np.where(generator.random((rows, self.context)) < 0.2, -1, text[:, 1:])
        return {"tokens": text[:, :-1], "targets": targets}

    @property
    def val_samples(self) -> int:
        return 12


@dataclass
class Training:
    """A loop with everything around it."""

    loop: Loop
    model: Bigram
    dataset: Cycles
    run_directory: RunDirectory
    loggers: Loggers

    def run(self) -> Training:
        self.loop.run()
        return self

    def close(self, exit_code: int = 0) -> None:
        self.loggers.close(exit_code)
        self.run_directory.close()


MakeTraining = Callable[..., Training]


@pytest.fixture
def make_training(tmp_path: Path) -> Iterator[MakeTraining]:
    """Builds a training: `make_training(steps=.., ...)`; `resume=True` continues the run in `folder`."""
    made: list[Training] = []

    def make(
        folder: str = "run",
        resume: bool = False,
        views: list[Any] | None = None,
        held_out: str = "",
        losses: Sequence[float] | None = None,
        clock: Callable[[], float] = time.monotonic,
        **settings: Any,
    ) -> Training:
        chosen = {"steps": 12, "batch_size": 4, "eval_every": 4, "save_every": 4, "log_every": 1, **settings}
        poison = chosen.pop("poison_step", None)
        config = TrainConfig(**chosen)
        model, dataset, progress = Bigram(poison_step=poison), Cycles(), Progress()
        path = tmp_path / folder
        run_directory = RunDirectory.open(path) if resume else RunDirectory.claim(str(path), "test")
        if resume:
            checkpoint, _ = newest_complete(run_directory.checkpoints)
            assert checkpoint is not None
            checkpoint.load(model.state)
            progress = Progress.from_dict(checkpoint.progress)
            cut_metrics(run_directory.metrics, progress.step, progress.evaluated_at == progress.step)
        loggers = Loggers(MetricsFile(run_directory.metrics), Console(bar=False), views or [])
        events = Events(run_directory.events, lambda message: loggers.console.say(message))
        events.on_event = loggers.tell
        context = RunContext(config, model.state, run_directory, loggers, events, progress, held_out=held_out)
        context.check_held_out()

        def content(progress: Progress, loss: float | None) -> CheckpointContent:
            model = {"model": {"name": "bigram"}}
            return CheckpointContent(progress.step, model, asdict(progress), '{"characters": "ab"}', loss)

        checkpoints = Checkpoints(context, content, clock)
        start = Position(progress.read_samples, progress.read_tokens)
        reader = BatchReader(dataset, 7, PhaseSchedule.of(config, 1), progress.step, start)
        guard = GuardConfig()
        evaluation = Evaluation(model.evaluate, dataset, 4, config.eval_sequences)
        step = TrainStep(model.steps(), config.batch_size, seed=7)
        nonfinite = NonFiniteGuard(guard, context, checkpoints, reader, step, ["table.weight"])
        guards = (nonfinite, LearningGuard(guard, context))

        def rates(number: int) -> dict[str, float]:
            return {"lr": 0.5 * (1 - number / 100) * progress.lr_factor}

        loop = Loop(context, reader, step, rates, evaluation, checkpoints, Meter(), guards)
        if losses is not None:  # of its evaluations, in place of what they would find
            results = map(EvaluationResult, losses)
            loop.evaluation = lambda stopped: next(results)  # type: ignore[assignment]
        made.append(Training(loop, model, dataset, run_directory, loggers))
        return made[-1]

    yield make
    for training in made:
        training.close()


class FakeRun:
    def __init__(self, id: str, project: str) -> None:  # noqa: A002 - wandb's name
        self.id, self.project, self.logged, self.defined, self.exit_codes = id, project, [], [], []
        self.alerts, self.artifacts = [], []

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.defined.append((name, step_metric))

    def log(self, metrics: dict[str, Any]) -> None:
        self.logged.append(metrics)

    def alert(self, title: str, text: str, level: str) -> None:
        assert level == "WARN"
        self.alerts.append((title, text))

    def log_artifact(self, path: str, name: str, type: str) -> None:  # noqa: A002 - wandb's name
        self.artifacts.append((path, name, type))

    def finish(self, exit_code: int | None = None) -> None:
        self.exit_codes.append(exit_code)


class FakeWandb(ModuleType):
    """Records calls; `key` is the account, `online_error` what happens to online runs."""

    def __init__(self, key: str | None = None, online_error: Exception | None = None) -> None:
        super().__init__("wandb")
        self.key, self.online_error = key, online_error
        self.inits: list[dict[str, Any]] = []
        self.runs: list[FakeRun] = []
        self.Settings = lambda **settings: settings
        self.Table = lambda **table: table
        self.api = SimpleNamespace(api_key=key)

    def login(self, prompt: bool = True, verify: bool = True) -> bool:
        assert not prompt, "a prompt would hang"
        return self.key is not None

    def init(self, **arguments: Any) -> FakeRun:
        if arguments["mode"] == "online" and self.online_error:
            raise self.online_error
        self.inits.append(arguments)
        self.runs.append(FakeRun(arguments["id"] or f"run{len(self.inits)}", arguments["project"]))
        return self.runs[-1]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return fake
