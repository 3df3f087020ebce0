"""The whole config as one typed tree, assembled from the small configs that live beside the components."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from ttrain.bench.settings import BenchConfig
from ttrain.config import registry
from ttrain.config.components import TaskConfig
from ttrain.core.names import did_you_mean
from ttrain.core.options import as_keys, option, rule
from ttrain.data.settings import DataConfig, PrepareConfig, TextConfig
from ttrain.device.info import DeviceInfo, info_of
from ttrain.device.settings import DeviceConfig, TorchConfig
from ttrain.engine.settings import EngineConfig
from ttrain.models.settings import GPTConfig
from ttrain.nn.settings import LoraConfig, PrecisionConfig
from ttrain.objectives.settings import ObjectiveConfig
from ttrain.optim.settings import AdamWConfig, OptimizerConfig, ScheduleConfig
from ttrain.parallel.settings import ParallelConfig
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
from ttrain.train.task_settings import (
    EvalConfig,
    ExportConfig,
    PlanConfig,
    ProfileConfig,
    ReportConfig,
    RunsConfig,
    SampleConfig,
    SchemaConfig,
    TrialConfig,
    VerifyConfig,
)


@dataclass
class SweepConfig:
    """Options of a sweep (`-m`)."""

    dir: str | None = option(
        None, "folder of the sweep; null is the newest unfinished one of the same jobs, else a new one", path=True
    )
    parallel: int = option(1, "CPU jobs that run at once and share its threads; a card takes one job", minimum=1)
    srun: str | None = option(None, "arguments of SLURM's srun, such as '--gpus=1 --time=2:00:00', which starts jobs")
    fail_fast: bool = option(False, "end the sweep at the first job that fails")
    objective: str = option("best_val_loss", "key of summary.json that compares jobs")
    direction: str = option("minimize", "direction in which the objective is better", choices=("minimize", "maximize"))
    search: str | None = option(
        None, "Optuna sampler for interval(..), choice(..) and range(..); null runs every combination",
        choices=("tpe", "random", "cmaes", "gp", "qmc"),
    )  # fmt: skip
    trials: int = option(20, "jobs of a search", minimum=1)
    prune: str | None = option(
        None, "Optuna pruner that ends worse jobs early; null ends none", choices=("asha", "hyperband", "median")
    )
    prune_after: int = option(1, "evaluations that every job gets", minimum=1)
    prune_factor: int = option(3, "asha and hyperband: one in this many jobs continues at each rung", minimum=2)

    @rule
    def _pruning(self, others: Any) -> Iterator[str]:
        task, train = others.task.name, others.train
        if self.prune is None:
            return
        if self.search is None:
            yield f"sweep.prune={self.prune}: ends jobs of a search. Give sweep.search=tpe as well."
        if task != "train":
            yield f"sweep.prune={self.prune}: task={task} has no evaluations to go by. Leave it out."
        elif train.eval_every is None or train.eval_every * (self.prune_after + 1) > train.last:
            yield (
                f"sweep.prune={self.prune}: needs more than sweep.prune_after={self.prune_after} evaluation(s) of a "
                f"job. Give train.eval_every=<steps>, at most {max(train.last // (self.prune_after + 1), 1)}."
            )

    @rule
    def _objective(self, others: Any) -> Iterator[str]:
        if others.task.name != "train" or self.objective == SweepConfig().objective:
            return
        from ttrain.train.runs.summary import NUMBERS

        if self.objective not in NUMBERS:
            hint = did_you_mean(self.objective, NUMBERS)
            yield f"sweep.objective={self.objective}: summary.json of a run has no such number. {hint}"


@dataclass
class LrFinderConfig:
    """Options of task=lr_finder, which raises the learning rate by a fixed factor every step."""

    low: float = option(1e-6, "learning rate of the first step", above=0)
    high: float = option(10.0, "learning rate of the last step", above=0)
    steps: int = option(200, "most steps; fewer if the loss diverges", minimum=10)
    out: str | None = option(None, "new folder for results and plot; null takes one below outputs/lr_finder", path=True)

    @rule
    def _rises(self, others: Any) -> Iterator[str]:
        if self.low >= self.high:
            yield f"lr_finder.low={self.low:g}: must be less than lr_finder.high={self.high:g}."
        if others.task.name == "lr_finder" and others.optimizer.lr == 0:
            yield "optimizer.lr=0: task=lr_finder tries rates in proportion to it. Leave it out."


@dataclass(frozen=True)
class Given:
    """The part of a command that a config came from: what was given, and in which files. Not a part of the config."""

    choices: dict[str, str] = field(default_factory=dict)  # group -> option, such as model -> nano-gpt
    overrides: tuple[str, ...] = ()  # the command line's key=value arguments, as given
    flags: tuple[str, ...] = ()  # which files it reads besides ttrain's, such as --config-name mine
    explicit: frozenset[str] = frozenset()  # keys and groups that the command line set; a group stands for all its keys
    merged: bool = False  # whether the config of a checkpoint lies below
    continues: bool = False  # whether that of a run is still to come, which resume=auto goes on with
    files: Any = field(default=None, repr=False, compare=False)  # ConfigFiles that the command can name

    def awaits_config(self, resume: str) -> bool:
        """Return whether the config is still to come from the run to resume; checks of it are made again then."""
        return (self.continues or resume not in ("", "none", "auto")) and not self.merged

    def awaits_model(self, resume: str) -> bool:
        """Return whether the model is still to come from there."""
        return self.awaits_config(resume) and not any(key.partition(".")[0] == "model" for key in self.explicit)

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
        """Return the start of a command that continues a run. The run itself records all other settings.

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
    objective: ObjectiveConfig = option(ObjectiveConfig, "what the model learns from the data")
    train: TrainConfig = option(TrainConfig, "length of training, size of a step, and what happens between steps")
    lora: LoraConfig = option(LoraConfig, "adapters that are trained instead of the model")
    optimizer: OptimizerConfig = option(AdamWConfig, "how gradients change parameters")
    schedule: ScheduleConfig = option(ScheduleConfig, "learning rate over steps")
    precision: PrecisionConfig = option(PrecisionConfig, "dtypes of compute and weights")
    engine: EngineConfig = option(EngineConfig, "how a derived step is run")
    device: DeviceConfig = option(TorchConfig, "where a step runs")
    parallel: ParallelConfig = option(ParallelConfig, "how several processes train one model")
    logger: LoggerConfig = option(LoggerConfig, "who else sees the metrics")
    run: RunConfig = option(RunConfig, "where the run lives and its seed")
    replicas: ReplicasConfig = option(ReplicasConfig, "how replicas on sub-devices differ")
    resume: str = option("none", "none, auto (run.dir's newest complete checkpoint), or a run or checkpoint", path=True)
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
    trial: TrialConfig = option(TrialConfig, "what task=trial compares")
    lr_finder: LrFinderConfig = option(LrFinderConfig, "what task=lr_finder tries")
    runs: RunsConfig = option(RunsConfig, "what task=runs lists")
    schema: SchemaConfig = option(SchemaConfig, "what task=schema prints")
    report: ReportConfig = option(ReportConfig, "what task=report writes")
    plugins: list[str] = option([], "modules that register more components; command line only")
    source: Given = field(default_factory=Given, repr=False, compare=False)

    @staticmethod
    def info_that(answers: Callable[[DeviceInfo], object]) -> DeviceInfo:
        """Return the first family of devices that has something, for rules that tell where it is to be had."""
        return registry.info_that(answers)

    def lacks_precision(self, key: str, name: str, instead: str) -> Iterator[str]:
        """Yield the problem of a precision that the device has not, with the devices that have it."""
        having = registry.info_that(lambda each: name in each.precisions)
        if name in having.precisions and not info_of(self.device).computes_in(self.device, name):
            yield f"{key}={name}: only on {having.title} devices. Give {instead}, or device={having.example}."

    def chosen(self, section: str) -> str:
        """Return the name of the engine or precision, with the reason where `auto` has just stood for it."""
        name: str = getattr(self, section).name
        if self.source.merged or self.source.choices.get(section) != "auto":
            return name
        info = info_of(self.device)
        _, reason = (info.best_engine if section == "engine" else info.best_precision)(self.device)
        return f"{name} (auto{reason and f': {reason}'})"


def sections() -> list[str]:
    """Root keys in the order they are printed: component groups, plain sections and single options."""
    return [declared.name for declared in fields(Config) if declared.name != "source"]


def to_dict(config: Config) -> dict[str, Any]:
    """The config as plain nested dicts, for a run record or YAML."""
    parts = {name: getattr(config, name) for name in sections()}
    return {name: as_keys(part) if is_dataclass(part) else part for name, part in parts.items()}
