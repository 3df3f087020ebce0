"""Checks over several fields. Each yields one sentence per problem: what was given, what is expected, how to fix it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from inspect import signature
from itertools import pairwise
from typing import Any, Protocol

from ttrain.bench.settings import ChipBenchConfig
from ttrain.config.components import TaskConfig
from ttrain.config.registry import family_that
from ttrain.config.schema import Config, PrepareConfig, ProfileConfig, ReportConfig, Source
from ttrain.core.names import nearest_divisor
from ttrain.data.settings import DataConfig, DocumentsConfig, RegressionConfig, TextConfig, TokensConfig
from ttrain.device.family import MOCK, family_of
from ttrain.device.settings import DeviceConfig
from ttrain.engine.settings import EngineConfig
from ttrain.models.settings import AGILLMConfig, MLPConfig, TransformerConfig
from ttrain.nn.precision import PrecisionConfig
from ttrain.nn.settings import LoraConfig
from ttrain.optim.settings import AdamWConfig, OptimizerConfig, ScheduleConfig, SGDConfig
from ttrain.train.settings import (
    EvalConfig,
    ExportConfig,
    LoggerConfig,
    RecoverConfig,
    ReplicasConfig,
    RunConfig,
    SampleConfig,
    SuperviseConfig,
    TrainConfig,
)

Check = Callable[..., Iterator[str]]
_CHECKS: list[tuple[tuple[str, ...], Check]] = []


class BuiltData(Protocol):
    """What the checks after building the data look at."""

    vocabulary: int | None


def check(function: Check) -> Check:
    """Register a check of the sections that its parameters name; it runs only if all of them hold valid values."""
    _CHECKS.append((tuple(signature(function).parameters), function))
    return function


def cross_field_problems(config: Config, bad_sections: Set[str] = frozenset()) -> list[str]:
    """Every problem that needs no data, in the order of declaration."""
    return [
        problem
        for sections, run in _CHECKS
        if bad_sections.isdisjoint(sections)
        for problem in run(*(getattr(config, section) for section in sections))
    ]


def data_problems(data: BuiltData, name: str, model: Any, lengths: list[int]) -> list[str]:
    """Every problem that only shows once the data is built and before a device is touched."""
    found: list[str] = []
    if lengths and not hasattr(data, "at"):
        found.append(
            f"train.length_schedule={lengths}: data={name} can't change the length of its sequences. Leave it empty."
        )
    vocabulary = getattr(model, "vocabulary", None)
    if vocabulary is not None and data.vocabulary is not None and vocabulary < data.vocabulary:
        larger = f"Give model.vocabulary={data.vocabulary} or more, or null to take the tokenizer's."
        advice = larger if getattr(model, "from_", None) is None else "Give the tokenizer of model.from."
        found.append(f"model.vocabulary={vocabulary}: the tokenizer has {data.vocabulary} ids. {advice}")
    return found


@check
def _accumulation_divides_batch(train: TrainConfig) -> Iterator[str]:
    size, parts = train.batch_size, train.accumulation
    if size % parts:
        yield f"train.accumulation={parts}: must divide train.batch_size={size}. {nearest_divisor(size, parts)}"


@check
def _length_schedule(model: Any, train: TrainConfig, resume: str, source: Source) -> Iterator[str]:
    lengths = train.length_schedule
    if not lengths or source.awaits_model(resume):
        return
    key = f"train.length_schedule={lengths}"
    if not hasattr(model, "context"):
        yield f"{key}: model={model.name} does not train on sequences. Leave it empty."
        return
    context = model.context
    if any(later <= earlier for earlier, later in pairwise(lengths)):
        yield f"{key}: every length must be greater than the one before it."
    elif context is not None and lengths[-1] != context:
        yield (
            f"{key}: must end with model.context={context}, which evaluation and sampling use. Give model.context="
            f"{lengths[-1]}, or end with {context}."
        )


@check
def _documents_have_targets(model: Any, data: DataConfig, train: TrainConfig) -> Iterator[str]:
    if getattr(data, "attention", "") == "document" and 1 in (getattr(model, "context", 0), *train.length_schedule):
        yield (
            "data.attention=document: the last token of a document has no target, so sequences of 1 token teach "
            "nothing. Give model.context and train.length_schedule of 2 or more."
        )


@check
def _prepared_replies(task: TaskConfig, data: DataConfig) -> Iterator[str]:
    if task.name == "prepare" and getattr(data, "loss_on", "all") != "all":
        yield "data.loss_on=replies: data=tokens counts every token. Train on data=documents, which keeps tokens too."


@check
def _one_capture_at_a_time(train: TrainConfig, device: DeviceConfig) -> Iterator[str]:
    count = family_of(device).replicas(device)
    if train.length_schedule and count > 1:
        yield (
            f"train.length_schedule={train.length_schedule}: a phase captures steps anew, which would spoil "
            f"what the other of device.subdevices={count} has captured. Leave it empty, or give device.subdevices=1."
        )


@check
def _optimizer(optimizer: Any) -> Iterator[str]:
    if isinstance(optimizer, SGDConfig) and optimizer.nesterov and optimizer.momentum == 0:
        yield "optimizer.nesterov=true: needs momentum. Give optimizer.momentum=0.9 or optimizer.nesterov=false."
    if isinstance(optimizer, AdamWConfig) and len(optimizer.betas) != 2:
        yield f"optimizer.betas={optimizer.betas}: must hold two numbers, got {len(optimizer.betas)}."


@check
def _stochastic_rounding(optimizer: OptimizerConfig, precision: PrecisionConfig) -> Iterator[str]:
    if optimizer.stochastic_rounding and precision.name != "bf16_pure":
        yield (
            f"optimizer.stochastic_rounding=true: precision={precision.name} keeps fp32 weights, so there is "
            "nothing to round. Give precision=bf16_pure, or optimizer.state_dtype=bf16 for moments alone."
        )


@check
def _schedule(train: TrainConfig, schedule: ScheduleConfig) -> Iterator[str]:
    end, key = (train.steps, "train.steps") if schedule.steps is None else (schedule.steps, "schedule.steps")
    if schedule.warmup > end:
        yield f"schedule.warmup={schedule.warmup}: must be at most {key}={end}."
    elif schedule.name == "wsd" and schedule.warmup + schedule.decay * end > end:
        yield (
            f"schedule.decay={schedule.decay}: warm-up ({schedule.warmup} steps) and decay "
            f"({schedule.decay * end:g} steps) together are longer than {key}={end}."
        )


@check
def _transformer_size(model: Any) -> Iterator[str]:
    if not isinstance(model, TransformerConfig):
        return
    if model.preset is not None and model.preset not in model.presets:
        yield f"model.preset={model.preset}: no such preset. Valid: {', '.join(model.presets)}."
        return
    missing = [f"model.{name}" for name in model.size_names() if getattr(model, name) is None]
    if missing:
        yield f"{', '.join(missing)}: no value. Give one, or take a model.preset: {', '.join(model.presets)}."
    yield from model.head_problems()


@check
def _data_fits_model(model: Any, data: DataConfig) -> Iterator[str]:
    numbers = isinstance(data, RegressionConfig)
    if isinstance(model, MLPConfig) and not numbers:
        yield f"data={data.name}: model=mlp trains on numbers, not on tokens. Give data=regression."
    if isinstance(model, TransformerConfig) and numbers:
        yield "data=regression: a language model trains on tokens. Give data=stdlib, text, tokens or documents."
    if isinstance(model, MLPConfig) and isinstance(data, RegressionConfig):
        for key in ("inputs", "outputs"):
            wanted, given = getattr(model, key) or model.width, getattr(data, key)
            if given is not None and given != wanted:
                yield f"data.{key}={given}: the model has {wanted} {key}. Give data.{key}=null to take the model's."


@check
def _data_source(task: TaskConfig, data: DataConfig) -> Iterator[str]:
    if isinstance(data, TokensConfig) and data.path is None and task.name in ("train", "plan"):
        yield "data.path: no value. data=tokens needs data.path=<folder or file of token ids>."
    if isinstance(data, DocumentsConfig) and not data.sources:
        yield "data.sources=[]: no value. data=documents needs data.sources=[<file or folder>,<another>]."


@check
def _prepare(task: TaskConfig, data: DataConfig, prepare: PrepareConfig) -> Iterator[str]:
    if task.name != "prepare":
        return
    if prepare.dir is None:
        yield "prepare.dir: no value. task=prepare needs prepare.dir=<new folder for the token files>."
    if not isinstance(data, TextConfig | DocumentsConfig):
        yield (
            f"data={data.name}: task=prepare reads text. Give data=stdlib, data=text with data.path, or "
            "data=documents with data.sources."
        )


@check
def _profile(task: TaskConfig, device: DeviceConfig, profile: ProfileConfig) -> Iterator[str]:
    if task.name != "profile" or profile.csv is not None:
        return
    family, profiled = family_of(device), family_that(lambda each: each.profiles)
    if not family.profiles or family.mode(device) == MOCK:
        yield (
            f"task=profile: {family.named(device)} has no device profiler. Give a {profiled.title} card or "
            "simulator, or profile.csv=<its report>; task=plan plan.show=ops tells what ops cost on any device."
        )


@check
def _sample_needs_a_run(task: TaskConfig, run: RunConfig) -> Iterator[str]:
    if task.name in ("sample", "chat") and run.dir is None:
        yield f"task={task.name}: needs a trained run. Give run.dir=<run directory>."


@check
def _eval(
    task: TaskConfig,
    model: Any,
    run: RunConfig,
    eval: EvalConfig,  # noqa: A002 - the section's name
    source: Source,
) -> Iterator[str]:
    if task.name != "eval":
        return
    folder = getattr(model, "from_", None)
    if run.dir is None and folder is None:
        yield "task=eval: needs a trained model. Give run.dir=<run directory> or model.from=<model folder>."
    elif run.dir is not None and folder is not None and not source.merged:
        yield "task=eval: run.dir and model.from both name a model. Give one of them."
    yield from _no_checkpoint("eval", eval.checkpoint)


@check
def _export(task: TaskConfig, model: Any, run: RunConfig, export: ExportConfig) -> Iterator[str]:
    if task.name != "export":
        return
    if export.source is None and run.dir is None and getattr(model, "from_", None) is None:
        yield "task=export: needs parameters. Give run.dir=<run directory>, or export.source=<file of weights>."
    elif export.source is not None and run.dir is not None:
        yield "task=export: run.dir and export.source both name parameters. Give one of them; a new run is export.dir."
    if export.file is not None and export.file == export.source:
        yield f"export.file={export.file}: is export.source; all but the weights would be lost. Give another name."
    if export.file is None and export.dir is None:
        yield "task=export: nothing to write. Give export.file=<name>.pt or .safetensors, or export.dir=<new folder>."
    if export.form == "gguf" and (export.dir is not None or not (export.file or "").endswith(".gguf")):
        yield "export.form=gguf: writes a file. Give export.file=<name>.gguf and no export.dir."
    if export.form in ("huggingface", "peft") and export.file is not None:
        yield f"export.file={export.file}: export.form={export.form} writes a folder. Give export.dir=<new folder>."
    yield from _no_checkpoint("export", export.checkpoint)


@check
def _report(task: TaskConfig, run: RunConfig, report: ReportConfig) -> Iterator[str]:
    if task.name == "report" and not (report.run or run.dir):
        yield "task=report: needs a run. Give run.dir=<run directory>, or run=<one>,<another> to compare."
    elif task.name == "report" and report.run and run.dir:
        yield "task=report: run.dir and report.run both name runs. Give run=<one>,<another> for all of them."
    elif task.name != "report" and report.run and run.dir is None:
        yield f"report.run={report.run}: task={task.name} takes one run. Give run.dir=<run directory>."


@check
def _resume(train: TrainConfig, lora: LoraConfig, run: RunConfig, resume: str, source: Source) -> Iterator[str]:
    if resume == "auto" and run.dir is None:
        yield "resume=auto: continues the run in run.dir, which has no value. Give run.dir=<run directory> as well."
    for key, value in (("train.init_from", train.init_from), ("lora.from", lora.from_)):
        if resume not in ("", "none", "auto") and key in source.explicit:
            yield f"{key}={value}: is for new runs, but resume={resume} continues one. Leave one of the two out."
    if not resume:
        yield "resume='': must be none, auto or the folder of a run or checkpoint."


@check
def _first_values(model: Any, train: TrainConfig) -> Iterator[str]:
    folder, other = getattr(model, "from_", None), train.init_from
    if folder is not None and other is not None:
        yield f"train.init_from={other}: the first values are those of model.from={folder}. Leave one of the two out."


@check
def _sample(sample: SampleConfig) -> Iterator[str]:
    yield from _no_checkpoint("sample", sample.checkpoint)
    if "" in sample.stop:
        yield "sample.stop: an empty text would end every sample at once. Give a text, or the name of a special token."


def _no_checkpoint(section: str, which: str) -> Iterator[str]:
    if which not in ("last", "best") and not which.isdecimal():
        yield f"{section}.checkpoint={which}: must be last, best or a step number."


_BENCH_LISTS = {"precision": "fp32", "batch": "256", "dim": "256", "layers": "2", "size": "1024", "work": "gpt"}


@check
def _bench(task: TaskConfig, engine: EngineConfig, device: DeviceConfig, bench: Any, source: Source) -> Iterator[str]:
    if task.name != "bench":
        return
    contest = hasattr(bench, "baselines")
    if getattr(bench, "engines", None) == [] and not getattr(bench, "baselines", []):
        both = " and bench.baselines=[]" if contest else ""
        yield f"bench.engines=[]{both}: nobody takes part. Name at least one."
    for key, example in _BENCH_LISTS.items():
        if getattr(bench, key, None) == []:
            yield f"bench.{key}=[]: name at least one, such as [{example}]."
    family = family_of(device)
    if isinstance(bench, ChipBenchConfig) and family.published_on is None and device.name != "auto":
        chip = family_that(lambda each: each.published_on)
        yield (
            f"device={device.name}: bench={bench.name} is about a {chip.title} chip. Give "
            f"device={chip.published_on}, or leave it out; without a card the times come from the cost model."
        )
    elif device.name == "null":
        yield "device=null: computes nothing, so there is nothing to time. Give device=cpu or device=cuda."
    for name in bench.precision if contest else []:
        yield from _lacks_precision(device, "bench.precision", name, "bench.precision=[bf16]")
    for key in sorted(source.explicit):
        if key.partition(".")[0] in ("model", "data", "train", "lora", "optimizer", "schedule", "precision"):
            yield f"{key}: task=bench does not read it; the keys of bench decide what is measured."
        elif key == "engine.name":
            yield f"engine={engine.name}: task=bench takes its engines from bench.engines."


@check
def _precision(precision: PrecisionConfig, device: DeviceConfig) -> Iterator[str]:
    yield from _lacks_precision(device, "precision", precision.name, "precision=bf16")


def _lacks_precision(device: DeviceConfig, key: str, name: str, instead: str) -> Iterator[str]:
    """Who has a precision that the device has not."""
    having = family_that(lambda each: name in each.precisions)
    if name in having.precisions and name not in family_of(device).precisions:
        yield f"{key}={name}: only on {having.title} devices. Give {instead}, or device={having.example}."


@check
def _device(train: TrainConfig, device: DeviceConfig) -> Iterator[str]:
    yield from family_of(device).problems(device, train.batch_size // train.accumulation)


@check
def _replicas(task: TaskConfig, device: DeviceConfig, run: RunConfig, replicas: ReplicasConfig) -> Iterator[str]:
    count = family_of(device).replicas(device)
    divided = family_that(lambda each: each.divides)
    for key in ("seed", "lr"):
        given = getattr(replicas, key)
        if given is not None and count == 1:
            yield f"replicas.{key}={given}: there is one run. Give device.subdevices=2 on a {divided.title} device."
        elif given is not None and len(given) != count:
            yield f"replicas.{key}={given}: must hold one value for each of the {count} replicas."
        elif given is not None and min(given) < 0:
            yield f"replicas.{key}={given}: must be 0 or more."
    largest = max(replicas.seed or [run.seed + count - 1])
    if count > 1 and largest >= 2**31:
        key = "replicas.seed" if replicas.seed else "run.seed"
        yield f"{key}: the largest seed would be {largest}, above {2**31 - 1}."
    if count > 1 and task.name not in ("train", "plan", "doctor", "runs", "report"):
        yield f"device.subdevices={count}: task={task.name} runs on a whole chip. Give device.subdevices=1."


@check
def _shared_device(
    device: DeviceConfig, logger: LoggerConfig, supervise: SuperviseConfig, recover: RecoverConfig, source: Source
) -> Iterator[str]:
    count = family_of(device).replicas(device)
    if count == 1:
        return
    others = {
        "logger": (logger.name == "wandb", "console", "W&B follows one run per process"),
        "recover.oom": (recover.oom == "shrink", "stop", "the replicas share the memory"),
        "supervise.enabled": (supervised(supervise, source), "false", "a supervisor follows one run"),
    }
    for key, (wrong, instead, why) in others.items():
        if wrong:
            yield f"device.subdevices={count}: {why}. Give {key}={instead}."


def supervised(supervise: SuperviseConfig, source: Source) -> bool:
    """Whether training is wanted under a supervisor."""
    if supervise.enabled is None:
        return any(key.startswith("supervise.") for key in source.explicit)
    return supervise.enabled


@check
def _sample_mode(task: TaskConfig, model: Any, resume: str, sample: SampleConfig, source: Source) -> Iterator[str]:
    mode, slide = sample.mode, sample.slide
    if task.name in ("sample", "chat") or source.awaits_model(resume):
        return  # the model is that of a run, and is checked there
    context = getattr(model, "context", None)
    if slide is not None and context is not None and slide >= max(2, context):
        yield f"sample.slide={slide}: must be less than model.context={context}."
    if mode == "ar" or not isinstance(model, TransformerConfig):
        return
    if not isinstance(model, AGILLMConfig) or model.objective == "ar_only":
        why = f"model.name={model.name}" if not isinstance(model, AGILLMConfig) else "model.objective=ar_only"
        yield f"sample.mode={mode}: needs a SAT head, and {why} has none. Give sample.mode=ar."


@check
def _logger(logger: LoggerConfig) -> Iterator[str]:
    if getattr(logger, "project", "x") == "":
        yield "logger.project='': must not be empty."
