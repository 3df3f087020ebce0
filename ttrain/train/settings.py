"""Small config of the training loop, supervision, guards, the run directory, the loggers and sampling."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from ttrain.core.errors import ConfigError
from ttrain.core.names import bare_name, nearest_divisor
from ttrain.core.options import option, rule
from ttrain.device.info import info_of
from ttrain.optim.settings import ScheduleFreeConfig, needs_fp32

LOGGERS = ("console", "jsonl", "wandb", "tensorboard")
DURATIONS = {"steps", "minutes", "tokens"}  # keys of train of which one says how long a run is
OF_A_COMMAND = (  # sections and keys that say what a command does, not what a run is
    "task", "resume", "run.dir", "plugins", "eval", "export", "plan", "prepare", "bench", "supervise", "sweep", "runs",
    "report", "lr_finder", "trial",
)  # fmt: skip
EVALUATION, END = "evaluation", "end"  # when an entry of train.evals is measured
KINDS = ("text", "choices", "samples")


@dataclass
class RunEvalConfig:
    """Entry of train.evals: a file, and what is measured on it during a run."""

    path: str = option("", "file to read; required", path=True)
    kind: str = option("text", "form of the file, as in eval.text, eval.choices or sample.prompts", choices=KINDS)
    name: str | None = option(None, "name among the metrics; null takes that of the file")
    every: str | None = option(None, "when; null is evaluation for text, end for others", choices=(EVALUATION, END))
    limit: int | None = option(None, "most documents, questions or prompts to read; null reads all", minimum=1)

    def __post_init__(self) -> None:
        self.name = bare_name(self.path) if self.name is None else self.name
        self.every = self.every or (EVALUATION if self.kind == "text" else END)


@dataclass
class TrainConfig:
    """Length of training, the data of each step, and what happens between steps."""

    steps: int | None = option(1000, "optimizer steps of the whole run; null where minutes or tokens say it", minimum=1)
    minutes: float | None = option(None, "minutes of steps, evaluations and saves, not steps", above=0, maximum=10**6)
    tokens: int | None = option(None, "tokens (or examples) that are read, instead of steps", minimum=1)
    batch_size: int = option(16, "sequences (or examples) per optimizer step", minimum=1)
    gradient_accumulation: int = option(1, "micro-batches per step; must divide batch_size", minimum=1)
    batch_schedule: list[int] = option([], "growing batch sizes, each for phase_steps; empty is batch_size", minimum=1)
    ema: float | None = option(None, "decay of averaged weights, such as 0.999; null averages none", minimum=0, below=1)
    noise_scale: bool = option(False, "record the batch size whose gradient is as much signal as noise")
    length_schedule: list[int] = option([], "growing lengths, each for phase_steps; empty is model.context", minimum=1)
    phase_steps: int = option(50_000, "steps per entry of batch_schedule, length_schedule or source weights", minimum=1)
    long_hours: float | None = option(1.0, "forecast in hours from which to name faster settings; null is off", above=0)
    init_from: str | None = option(None, "run, checkpoint, Transformers folder or weights to start from", path=True)
    init_anyway: bool = option(False, "take the weights that fit although a model key or the tokenizer differs")
    eval_every: int | None = option(250, "steps between evaluations; null evaluates once, at the end", minimum=1)
    eval_sequences: int | None = option(320, "held-out sequences per evaluation; null takes all", minimum=1)
    evals: list[RunEvalConfig] = option([], "further evaluations, each on a file of its own")
    save_every: int | None = option(500, "steps between checkpoints; null saves by time and at the end", minimum=1)
    save_minutes: float | None = option(10.0, "minutes between checkpoints; null saves by steps alone", above=0)
    keep_last: int = option(2, "newest checkpoints that are kept", minimum=1)
    keep_best: bool = option(True, "keep the checkpoint with the lowest val/loss too")
    keep_every: int | None = option(None, "keep one checkpoint per this many steps forever; null keeps none", minimum=1)
    keep_hours: float | None = option(None, "keep one checkpoint per this many hours forever; null keeps none", above=0)
    async_save: bool = option(True, "write checkpoints while training continues")
    log_every: int = option(10, "steps between two lines of metrics.jsonl", minimum=1)
    early_stop: int | None = option(None, "evaluations without lower val/loss before a stop; null is never", minimum=1)
    min_improvement: float = option(0.0, "smallest fall of val/loss that counts as lower", minimum=0)
    peak_tflops: float | None = option(None, "peak of the device in TFLOP/s, for mfu; null measures a matmul", above=0)

    @property
    def last(self) -> int:
        """Return the number of the last step. Raises ConfigError where a run would first have to measure it."""
        if self.steps is None:
            raise ConfigError(f"train.minutes={self.minutes}: a run measures its steps first. Give train.steps here.")
        return self.steps

    @rule
    def _micro_batches(self, others: Any) -> Iterator[str]:
        size, parts = self.batch_size, self.gradient_accumulation
        if size % parts:
            nearest = nearest_divisor(size, parts)
            yield f"train.gradient_accumulation={parts}: must divide train.batch_size={size}. {nearest}"
        if self.noise_scale and parts < 2:
            yield "train.noise_scale=true: compares micro-batches with the batch. Give train.gradient_accumulation>1."

    @rule
    def _batches_grow(self, others: Any) -> Iterator[str]:
        sizes, size, parts = self.batch_schedule, self.batch_size, self.gradient_accumulation
        if not sizes or size % parts:
            return
        if problem := _growth_problem("train.batch_schedule", sizes, "train.batch_size", size):
            yield problem
        elif (common := math.gcd(*sizes)) % (size // parts):
            yield (
                f"train.batch_schedule={sizes}: a batch grows by micro-batches of {size // parts} rows, and every size "
                f"must be a multiple of it. Give train.gradient_accumulation={size // common}."
            )

    @rule
    def _sequences_grow(self, others: Any) -> Iterator[str]:
        lengths, model = self.length_schedule, others.model
        if not lengths or others.source.awaits_model(others.resume):
            return
        if not hasattr(model, "context"):
            yield f"train.length_schedule={lengths}: model={model.name} does not train on sequences. Leave it empty."
        elif problem := _growth_problem("train.length_schedule", lengths, "model.context", model.context):
            yield problem

    @rule
    def _device_takes_it(self, others: Any) -> Iterator[str]:
        info, device = info_of(others.device), others.device
        count = info.replicas(device)
        if self.length_schedule and count > 1:
            yield f"train.length_schedule: is not for device.subdevices={count}. Give device.subdevices=1."
        yield from info.problems(device, self.batch_size // self.gradient_accumulation)

    @rule
    def _average(self, others: Any) -> Iterator[str]:
        if self.ema is not None and not isinstance(others.optimizer, ScheduleFreeConfig):
            yield from needs_fp32(f"train.ema={self.ema}", others.precision.name)

    @rule
    def _evals_have_names(self, others: Any) -> Iterator[str]:
        names = Counter(each.name for each in self.evals)
        for number, each in enumerate(self.evals):
            if not (each.path and names[each.name] == 1 and re.fullmatch(r"[\w.-]+", str(each.name))):
                given, wanted = f"path={each.path!r} name={each.name!r}", "of letters, digits and any of _ . -"
                yield f"train.evals[{number}]: {given}: must have a path, and a name {wanted} that no other entry has."

    @rule
    def _one_source(self, others: Any) -> Iterator[str]:
        folder = getattr(others.model, "from_", None)
        if folder is not None and self.init_from is not None:
            yield f"train.init_from={self.init_from}: model.from={folder} is a source too. Leave one of the two out."


def _growth_problem(key: str, sizes: list[int], end_key: str, end: int | None) -> str | None:
    """Return the problem with sizes that are to grow up to the value of another key; None where they do."""
    if any(later < earlier for earlier, later in pairwise(sizes)):
        return f"{key}={sizes}: none may be smaller than the one before it."
    if end is not None and sizes[-1] != end:
        return f"{key}={sizes}: must end with {end_key}={end}. Give {end_key}={sizes[-1]}, or end with {end}."
    return None


def superseded(given: Collection[str]) -> set[str]:
    """Return the keys of train that say how long a run is, where a `given` key takes their place."""
    named = {name for name in DURATIONS if f"train.{name}" in given}
    return DURATIONS - named if named else set()


def without_phases(train: TrainConfig, **changes: Any) -> TrainConfig:
    """Return the config with the largest batches and sequences from the first step on, and with changes."""
    return replace(train, batch_schedule=[], length_schedule=[], **changes)


@dataclass
class RunConfig:
    """Run directory and seed."""

    dir: str | None = option(None, "run directory; null is outputs/<date>/<time>_<model>_<device>_<engine>", path=True)
    seed: int = option(1337, "seed of weights, batches and dropout", minimum=0, maximum=2**31 - 1)

    @rule
    def _resume(self, others: Any) -> Iterator[str]:
        resume = others.resume
        if resume == "auto" and self.dir is None:
            yield "resume=auto: continues the run in run.dir, which has no value. Give run.dir=<run directory> as well."
        for key, value in (("train.init_from", others.train.init_from), ("lora.from", others.lora.from_)):
            if resume not in ("", "none", "auto") and key in others.source.explicit:
                yield f"{key}={value}: is for new runs, but resume={resume} continues one. Leave one of the two out."
        if not resume:
            yield "resume='': must be none, auto or the folder of a run or checkpoint."


@dataclass
class ReplicasConfig:
    """Differences between the runs that device.subdevices=2 trains side by side."""

    seed: list[int] | None = option(None, "run.seed of each replica, such as [1,2]; null counts up from run.seed")
    lr: list[float] | None = option(None, "optimizer.lr of each replica, such as [1e-3,3e-4]; null takes optimizer.lr")

    @rule
    def _one_value_each(self, others: Any) -> Iterator[str]:
        run, task, count = others.run, others.task.name, info_of(others.device).replicas(others.device)
        title = others.info_that(lambda each: each.divides).title
        for key in ("seed", "lr"):
            given = getattr(self, key)
            if given is not None and count == 1:
                yield f"replicas.{key}={given}: there is one run. Give device.subdevices=2 on a {title} device."
            elif given is not None and len(given) != count:
                yield f"replicas.{key}={given}: must hold one value for each of the {count} replicas."
            elif given is not None and min(given) < 0:
                yield f"replicas.{key}={given}: must be 0 or more."
        largest = max(self.seed or [run.seed + count - 1])
        if count > 1 and largest >= 2**31:
            key = "replicas.seed" if self.seed else "run.seed"
            yield f"{key}: the largest seed would be {largest}, above {2**31 - 1}."
        if count > 1 and task not in ("train", "plan", "doctor", "runs", "report"):
            yield f"device.subdevices={count}: task={task} runs on a whole chip. Give device.subdevices=1."

    @rule
    def _share_a_device(self, others: Any) -> Iterator[str]:
        count = info_of(others.device).replicas(others.device)
        if count == 1:
            return
        wanted = others.supervise.wanted(others.source.explicit)
        wrong = {
            "logger": (isinstance(others.logger, WandbConfig), "console", "W&B follows one run per process"),
            "train.steps": (others.train.minutes is not None, "<steps>", "no step can be timed alone"),
            "recover.oom": (others.recover.oom == "shrink", "stop", "the replicas share the memory"),
            "supervise.enabled": (wanted, "false", "a supervisor follows one run"),
        }
        for key, (given, instead, why) in wrong.items():
            if given:
                yield f"device.subdevices={count}: {why}. Give {key}={instead}."


@dataclass
class LoggerConfig:
    """Logger that shows the metrics; metrics.jsonl is always written."""

    name: str = option("console", "console (progress bar), jsonl (no bar), wandb or tensorboard", choices=LOGGERS)
    beside: list[str] = option([], "further loggers; logger=[wandb,tensorboard] fills this in")


@dataclass
class WandbConfig(LoggerConfig):
    """Weights & Biases next to the progress bar."""

    name: str = option("wandb", "console (progress bar), jsonl (no bar), wandb or tensorboard", choices=LOGGERS)
    project: str | None = option(None, "project of the run; null takes WANDB_PROJECT, else ttrain")
    entity: str | None = option(None, "user or team; null takes WANDB_ENTITY, else the account's default")
    mode: str | None = option(
        None, "mode of W&B; null takes WANDB_MODE, else online if logged in", choices=("online", "offline", "disabled")
    )
    run_name: str | None = option(None, "display name of the run; null takes WANDB_NAME, else the run directory's name")
    group: str | None = option(None, "name that related runs share; null takes WANDB_RUN_GROUP")
    tags: list[str] | None = option(None, "labels of the run; null takes WANDB_TAGS, separated by commas")
    artifacts: list[str] = option([], "files to upload at the end of the run", choices=("config", "checkpoint"))

    @rule
    def _has_a_project(self, others: Any) -> Iterator[str]:
        if self.project == "":
            yield "logger.project='': must not be empty."


@dataclass
class SuperviseConfig:
    """Training as a child process that is restarted from its newest checkpoint. `supervise=true` turns it on."""

    enabled: bool | None = option(None, "watch training from a parent process; null does if a supervise key is given")
    max_restarts: int = option(3, "restarts in a row without a new checkpoint before it gives up", minimum=0)
    backoff: float = option(2.0, "seconds before a restart, doubled up to 300 while there is no progress", minimum=0)
    hang_timeout: float | None = option(1800.0, "seconds without a sign of life before a kill; null is never", above=0)
    on_restart: str | None = option(None, "shell command before every restart, such as a card reset; command line only")

    def wanted(self, explicit: Collection[str]) -> bool:
        """Return True if training is to run under a supervisor; `explicit` are the keys that the user gave."""
        if self.enabled is None:
            return any(key.startswith("supervise.") for key in explicit)
        return self.enabled


@dataclass
class GuardConfig:
    """Reactions to numbers that go wrong."""

    nonfinite: str = option("stop", "reaction to a NaN or infinite loss or norm", choices=("stop", "skip", "rollback"))
    activations: bool = option(False, "also watch and record the norm of the activations before the loss")
    max_skips: int = option(10, "skipped updates in a row before the run stops", minimum=1)
    spike: str = option("ignore", "reaction to a loss far above recent ones", choices=("ignore", "warn", "rollback"))
    spike_factor: float = option(2.0, "factor of the median above which a loss is a spike", above=1)
    spike_window: int = option(50, "steps of the median; earlier losses are never spikes", minimum=2)
    lr_factor: float = option(0.5, "factor of the learning rate after a rollback", above=0, maximum=1)
    max_rollbacks: int = option(3, "rollbacks of a run before it stops", minimum=1)
    check_learning: int | None = option(3, "first steps that must change all trained weights; null is off", minimum=1)


@dataclass
class RecoverConfig:
    """Changes that a run may make by itself to continue."""

    oom: str = option("stop", "out of memory: stop, or halve micro-batches, not the batch", choices=("stop", "shrink"))
