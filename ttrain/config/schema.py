"""The whole config as one typed tree, assembled from the small configs that live beside the components."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ttrain.bench.settings import BenchConfig, GPTBenchConfig
from ttrain.config.components import TaskConfig
from ttrain.core.options import as_keys, option
from ttrain.data.settings import DataConfig, TextConfig
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
    EvalConfig,
    ExportConfig,
    GuardConfig,
    LoggerConfig,
    RecoverConfig,
    ReplicasConfig,
    RunConfig,
    SampleConfig,
    SuperviseConfig,
    TrainConfig,
)


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


@dataclass
class PrepareConfig:
    """What task=prepare writes."""

    dir: str | None = option(
        None, "new folder for the token files, to be read with data=tokens data.path=<folder>", path=True
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
    bench: BenchConfig = option(GPTBenchConfig, "what task=bench measures")
    supervise: SuperviseConfig = option(SuperviseConfig, "restart training when it crashes or hangs")
    guard: GuardConfig = option(GuardConfig, "what happens when numbers go wrong")
    recover: RecoverConfig = option(RecoverConfig, "what a run may change to go on")
    sweep: SweepConfig = option(SweepConfig, "how the jobs of -m are run")
    ramp: RampConfig = option(RampConfig, "what task=lr tries")
    runs: RunsConfig = option(RunsConfig, "what task=runs lists")
    report: ReportConfig = option(ReportConfig, "what task=report writes")
    plugins: list[str] = option([], "modules that register further components; only the command line may name one")
    source: Source = field(default_factory=Source, repr=False, compare=False)

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
