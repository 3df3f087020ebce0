"""The whole config as one typed tree, assembled from the small configs that live beside the components."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ttrain.bench.settings import BenchConfig
from ttrain.config import registry
from ttrain.config.components import TaskConfig
from ttrain.core.names import did_you_mean
from ttrain.core.options import as_keys, option, rule
from ttrain.data.settings import DataConfig, DocumentsConfig, TextConfig
from ttrain.device.family import MOCK, Family, family_of
from ttrain.device.settings import DeviceConfig
from ttrain.engine.settings import EngineConfig
from ttrain.models.settings import GPTConfig
from ttrain.nn.precision import PrecisionConfig
from ttrain.nn.settings import LoraConfig
from ttrain.optim.settings import AdamWConfig, OptimizerConfig, ScheduleConfig
from ttrain.parallel.settings import ParallelConfig
from ttrain.testing.settings import VerifyConfig
from ttrain.train.runs.record import command_line, override
from ttrain.train.settings import (
    GuardConfig,
    LoggerConfig,
    RecoverConfig,
    ReplicasConfig,
    RunConfig,
    SuperviseConfig,
    TrainConfig,
)
from ttrain.train.task_settings import EvalConfig, ExportConfig, SampleConfig


@dataclass
class PlanConfig:
    """What task=plan prints after its summary."""

    show: str | None = option(
        None, "also print the traced graph, the graph with gradients, the op list with buffers, or what each op costs",
        choices=("graph", "backward", "plan", "ops"),
    )  # fmt: skip
    json: str | None = option(None, "file to write the same numbers into, in bytes and operations", path=True)
    picture: str | None = option(None, "image file for the planned memory over time, such as plan.png", path=True)
    time: bool = option(
        True, "expect a step's time; on the CPU and on a GPU each kernel is timed for that, and its best time kept"
    )
    seconds: float = option(
        10.0, "time kernels for so long; those that are left then are estimated from their FLOPs and bytes", minimum=0
    )
    calibrate: bool = option(
        False, "first open the device and measure the constants of its cost model on it; they are kept for later"
    )
    limits: bool = option(False, "search the largest micro-batch and context that fit, by planning a few of each")
    memory_gb: float | None = option(None, "memory to fit into, in GiB; null takes that of the device", above=0)


@dataclass
class ProfileConfig:
    """What task=profile measures: the nodes of a step, or what a device's own profiler reports."""

    steps: int = option(5, "training steps that are profiled; with profile.csv the steps that it covers", minimum=1)
    top: int = option(20, "nodes in the table, those first that take longest", minimum=1)
    csv: str | None = option(
        None, "report of such a profiler to read instead of running, such as cpp_device_perf_report.csv",
        path=True,
    )  # fmt: skip
    json: str | None = option(None, "file to write the same numbers into, of every node", path=True)
    trace: str | None = option(
        None, "file for one step as a timeline in Chrome's trace format, which ui.perfetto.dev opens; not for "
        "devices with a profiler of their own", path=True,
    )  # fmt: skip

    @rule
    def _something_takes_time(self, others: Any) -> Iterator[str]:
        if others.task.name != "profile":
            return
        device, profiled = others.device, others.family_that(lambda each: each.profiles)
        family = family_of(device)
        if self.csv is None and (device.name == "null" or family.mode(device) == MOCK):
            yield (
                f"task=profile: {family.named(device)} computes nothing that takes time. Give device=cpu, device=cuda, "
                f"a {profiled.title} card or simulator, or profile.csv=<its report>; task=plan plan.show=ops tells "
                "what ops cost on any device."
            )
        if self.trace is not None and (self.csv is not None or family.profiles):
            yield "profile.trace: a device's own profiler gives no timeline. Give device=cpu or device=cuda, or null."


@dataclass
class PrepareConfig:
    """What task=prepare writes."""

    dir: str | None = option(
        None, "new folder for the token files, to be read with data=tokens data.path=<folder>", path=True
    )

    @rule
    def _reads_text(self, others: Any) -> Iterator[str]:
        if others.task.name != "prepare":
            return
        if self.dir is None:
            yield "prepare.dir: no value. task=prepare needs prepare.dir=<new folder for the token files>."
        if not isinstance(others.data, TextConfig | DocumentsConfig):
            yield (
                f"data={others.data.name}: task=prepare reads text. Give data=stdlib, data=text with data.path, or "
                "data=documents with data.sources."
            )


@dataclass
class SweepConfig:
    """How the jobs of `-m` are run, and what they are judged by."""

    dir: str | None = option(
        None,
        "folder of the sweep; null continues the newest unfinished sweep of the same jobs, else claims a new one",
        path=True,
    )
    parallel: int = option(1, "jobs on the CPU that run at once and share its threads; a card takes one job", minimum=1)
    srun: str | None = option(
        None,
        "arguments of SLURM's srun, such as '--gpus=1 --time=2:00:00', by which each job starts on its own",
    )
    fail_fast: bool = option(False, "whether the first job that fails ends the sweep")
    objective: str = option("best_val_loss", "key of a job's summary.json that the table and a search go by")
    direction: str = option("minimize", "whether low or high is good", choices=("minimize", "maximize"))
    search: str | None = option(
        None, "let Optuna choose the values of interval(..), choice(..) and range(..); null runs every combination",
        choices=("tpe", "random", "cmaes", "gp", "qmc"),
    )  # fmt: skip
    trials: int = option(20, "jobs of a search", minimum=1)
    prune: str | None = option(
        None,
        "end a job of a search early where its evaluations are hopeless beside those of the others: asha (successive "
        "halving), hyperband or median, as Optuna has them; null lets every job finish",
        choices=("asha", "hyperband", "median"),
    )
    prune_after: int = option(1, "evaluations that every job gets", minimum=1)
    prune_factor: int = option(3, "asha and hyperband: one of so many jobs goes on at each rung", minimum=2)

    @rule
    def _pruning(self, others: Any) -> Iterator[str]:
        task, train = others.task.name, others.train
        if self.prune is None:
            return
        if self.search is None:
            yield f"sweep.prune={self.prune}: ends jobs of a search. Give sweep.search=tpe as well."
        if task != "train":
            yield f"sweep.prune={self.prune}: task={task} has no evaluations to go by. Leave it out."
        elif train.eval_every is None or train.eval_every * (self.prune_after + 1) > train.steps:
            yield (
                f"sweep.prune={self.prune}: needs more than sweep.prune_after={self.prune_after} evaluation(s) of a "
                f"job. Give train.eval_every=<steps>, at most {max(train.steps // (self.prune_after + 1), 1)}."
            )

    @rule
    def _objective(self, others: Any) -> Iterator[str]:
        from ttrain.train.runs.summary import NUMBERS

        if others.task.name == "train" and self.objective not in (SweepConfig().objective, *NUMBERS):
            hint = did_you_mean(self.objective, NUMBERS)
            yield f"sweep.objective={self.objective}: summary.json of a run has no such number. {hint}"


@dataclass
class RampConfig:
    """What task=lr tries: learning rates that rise by equal factors, one a step."""

    low: float = option(1e-6, "learning rate of the first step", above=0)
    high: float = option(10.0, "learning rate of the last step", above=0)
    steps: int = option(200, "steps, at most: where the loss diverges the rest is left out", minimum=10)
    rise: float = option(
        0.5, "share of what the loss has fallen by which it rises again, over some steps, where it diverges", above=0
    )
    out: str | None = option(None, "folder for results.json and plot.png; null claims one below outputs/lr", path=True)

    @rule
    def _rises(self, others: Any) -> Iterator[str]:
        if self.low >= self.high:
            yield f"ramp.low={self.low:g}: must be less than ramp.high={self.high:g}."
        if others.task.name == "lr" and others.optimizer.lr == 0:
            yield "optimizer.lr=0: task=lr tries rates in proportion to it. Leave it out."


@dataclass
class RunsConfig:
    """What task=runs lists."""

    root: str = option("outputs", "folder that is searched for runs and sweeps", path=True)
    state: str | None = option(
        None,
        "list runs in this state only",
        choices=("running", "finished", "failed", "resumable", "interrupted", "dry_run", "new"),
    )


@dataclass
class ReportConfig:
    """What task=report writes. `run=<folder>,<folder>` is short for report.run=[<folder>,<folder>]."""

    run: list[str] = option([], "runs that are compared side by side; one run is given as run.dir", path=True)
    out: str | None = option(
        None, "HTML file to write; null takes report.html in the run, for several runs in this folder", path=True
    )

    @rule
    def _has_a_run(self, others: Any) -> Iterator[str]:
        task, run = others.task.name, others.run.dir
        if task == "report" and not (self.run or run):
            yield "task=report: needs a run. Give run.dir=<run directory>, or run=<one>,<another> to compare."
        elif task == "report" and self.run and run:
            yield "task=report: run.dir and report.run both name runs. Give run=<one>,<another> for all of them."
        elif task != "report" and self.run and run is None:
            yield f"report.run={self.run}: task={task} takes one run. Give run.dir=<run directory>."


@dataclass(frozen=True)
class Source:
    """Where a config came from; not part of the config itself."""

    choices: dict[str, str] = field(default_factory=dict)  # group -> option, such as model -> nano-gpt
    overrides: tuple[str, ...] = ()  # the command line's key=value arguments, as given
    flags: tuple[str, ...] = ()  # which files it reads besides ttrain's, such as --config-name mine
    explicit: frozenset[str] = frozenset()  # keys and groups that the command line set; a group stands for all its keys
    merged: bool = False  # whether the config of a checkpoint lies below

    def awaits_model(self, resume: str) -> bool:
        """Whether the model is still to come from the checkpoint that is resumed; checks of it are made again then."""
        given = any(key.partition(".")[0] == "model" for key in self.explicit)
        return resume not in ("", "none", "auto") and not self.merged and not given

    def command(
        self, changes: Mapping[str, object] | None = None, without: Collection[str] = (), task: str | None = None
    ) -> str:
        """Return the command for a shell that does the same as this one, or another `task` with other values.

        `changes` maps keys to new values; `without` names keys and sections of which no override is repeated.
        """
        changes, without = dict(changes or {}), {*without, *([] if task is None else ["task"])}
        keys = [(given.partition("=")[0].lstrip("+~"), given) for given in self.overrides]
        kept = [given for key, given in keys if key not in changes and not {key, key.partition(".")[0]} & without]
        if task is not None and (self.flags or task != "train"):  # a file may choose another
            kept.insert(0, override("task", task))
        return command_line([*self.flags, *kept, *(override(key, value) for key, value in changes.items())])

    def going_on(self) -> str:
        """Return what a command begins with that goes on with a run, which records all else that it was told.

        Files of configs are left out: the run has what they said, and they may ask for a sweep or for replicas.
        """
        keys = ((given.partition("=")[0].lstrip("+~"), given) for given in self.overrides)
        return command_line(given for key, given in keys if key.partition(".")[0] in ("plugins", "supervise"))


@dataclass
class Config:
    """Everything a run is told. A component receives its own part and never this tree."""

    task: TaskConfig = option(TaskConfig, "what the command does")
    model: Any = option(GPTConfig, "what is trained")
    data: DataConfig = option(TextConfig, "what it is trained on")
    train: TrainConfig = option(TrainConfig, "how long, how much per step, and what happens between steps")
    lora: LoraConfig = option(LoraConfig, "adapters that are trained in the place of the model")
    optimizer: OptimizerConfig = option(AdamWConfig, "how gradients change parameters")
    schedule: ScheduleConfig = option(ScheduleConfig, "learning rate over steps")
    precision: PrecisionConfig = option(PrecisionConfig, "dtypes of compute and weights")
    engine: EngineConfig = option(EngineConfig, "how a derived step is run")
    device: DeviceConfig = option(DeviceConfig, "where a step runs")
    parallel: ParallelConfig = option(ParallelConfig, "how several processes train one model")
    logger: LoggerConfig = option(LoggerConfig, "who else sees the metrics")
    run: RunConfig = option(RunConfig, "where the run lives and its seed")
    replicas: ReplicasConfig = option(ReplicasConfig, "how replicas on sub-devices differ")
    resume: str = option(
        "none", "none, auto (newest complete checkpoint of run.dir) or a run or checkpoint folder", path=True
    )
    sample: SampleConfig = option(SampleConfig, "how text is drawn from a trained model")
    eval: EvalConfig = option(EvalConfig, "what task=eval measures")
    export: ExportConfig = option(ExportConfig, "what task=export writes")
    plan: PlanConfig = option(PlanConfig, "what task=plan prints")
    profile: ProfileConfig = option(ProfileConfig, "what task=profile measures")
    prepare: PrepareConfig = option(PrepareConfig, "what task=prepare writes")
    verify: VerifyConfig = option(VerifyConfig, "what task=verify compares with PyTorch")
    bench: BenchConfig = option(BenchConfig, "what task=bench measures")
    supervise: SuperviseConfig = option(SuperviseConfig, "restart training when it crashes or hangs")
    guard: GuardConfig = option(GuardConfig, "what happens when numbers go wrong")
    recover: RecoverConfig = option(RecoverConfig, "what a run may change to go on")
    sweep: SweepConfig = option(SweepConfig, "how the jobs of -m are run")
    ramp: RampConfig = option(RampConfig, "what task=lr tries")
    runs: RunsConfig = option(RunsConfig, "what task=runs lists")
    report: ReportConfig = option(ReportConfig, "what task=report writes")
    plugins: list[str] = option([], "modules that register further components; only the command line may name one")
    source: Source = field(default_factory=Source, repr=False, compare=False)

    @staticmethod
    def family_that(answers: Callable[[Family], object]) -> Family:
        """Return the first family of devices that has something, for rules that tell where it is to be had."""
        return registry.family_that(answers)

    def lacks_precision(self, key: str, name: str, instead: str) -> Iterator[str]:
        """Yield the problem of a precision that the device has not, with the devices that have it."""
        having = registry.family_that(lambda each: name in each.precisions)
        if name in having.precisions and name not in family_of(self.device).precisions:
            yield f"{key}={name}: only on {having.title} devices. Give {instead}, or device={having.example}."

    @property
    def model_parts(self) -> tuple[Any, PrecisionConfig, DeviceConfig, DataConfig, LoraConfig]:
        """What a model is built from."""
        return self.model, self.precision, self.device, self.data, self.lora

    @property
    def step_parts(self) -> tuple[TrainConfig, OptimizerConfig, GuardConfig, EngineConfig]:
        """What its steps are built from."""
        return self.train, self.optimizer, self.guard, self.engine

    @property
    def rate_parts(self) -> tuple[TrainConfig, OptimizerConfig, ScheduleConfig]:
        """What the learning rate of a step follows from."""
        return self.train, self.optimizer, self.schedule


def sections() -> list[str]:
    """Root keys in the order they are printed: component groups, plain sections and single options."""
    return [declared.name for declared in fields(Config) if declared.name != "source"]


def to_dict(config: Config) -> dict[str, Any]:
    """The config as plain nested dicts, for a run record or YAML."""
    parts = {name: getattr(config, name) for name in sections()}
    return {name: as_keys(part) if dataclasses.is_dataclass(part) else part for name, part in parts.items()}
