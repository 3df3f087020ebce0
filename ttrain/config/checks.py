"""Checks over several fields. Each yields one sentence per problem: what was given, what is expected, how to fix it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from itertools import pairwise
from typing import Any, Protocol

from ttrain.bench.settings import ChipBenchConfig
from ttrain.config.registry import family_that
from ttrain.config.schema import Config
from ttrain.core.names import nearest_divisor
from ttrain.data.settings import DocumentsConfig, RegressionConfig, TextConfig, TokensConfig
from ttrain.device.family import MOCK, family_of
from ttrain.models.settings import AGILLMConfig, MLPConfig, TransformerConfig
from ttrain.optim.settings import AdamWConfig, SGDConfig

Check = Callable[[Config], Iterator[str]]
_CHECKS: list[tuple[frozenset[str], Check]] = []


class BuiltData(Protocol):
    """What the checks after building the data look at."""

    vocabulary: int | None


def check(*sections: str) -> Callable[[Check], Check]:
    """Register a check; it runs only if every section it reads holds valid values."""

    def add(function: Check) -> Check:
        _CHECKS.append((frozenset(sections), function))
        return function

    return add


def cross_field_problems(config: Config, bad_sections: Set[str] = frozenset()) -> list[str]:
    """Every problem that needs no data, in the order of declaration."""
    return [problem for needs, run in _CHECKS if not needs & bad_sections for problem in run(config)]


def data_problems(config: Config, data: BuiltData) -> list[str]:
    """Every problem that only shows once the data is built and before a device is touched."""
    found: list[str] = []
    if config.train.length_schedule and not hasattr(data, "at"):
        found.append(
            f"train.length_schedule={config.train.length_schedule}: data={config.data.name} can't change the length of "
            "its sequences. Leave it empty."
        )
    vocabulary = getattr(config.model, "vocabulary", None)
    if vocabulary is not None and data.vocabulary is not None and vocabulary < data.vocabulary:
        larger = f"Give model.vocabulary={data.vocabulary} or more, or null to take the tokenizer's."
        advice = larger if getattr(config.model, "from_", None) is None else "Give the tokenizer of model.from."
        found.append(f"model.vocabulary={vocabulary}: the tokenizer has {data.vocabulary} ids. {advice}")
    return found


@check("train")
def _accumulation_divides_batch(config: Config) -> Iterator[str]:
    size, parts = config.train.batch_size, config.train.accumulation
    if size % parts:
        yield f"train.accumulation={parts}: must divide train.batch_size={size}. {nearest_divisor(size, parts)}"


@check("train", "model")
def _length_schedule(config: Config) -> Iterator[str]:
    lengths = config.train.length_schedule
    if not lengths or config.source.awaits_model(config.resume):
        return
    key = f"train.length_schedule={lengths}"
    if not hasattr(config.model, "context"):
        yield f"{key}: model={config.model.name} does not train on sequences. Leave it empty."
        return
    context = context_of(config)
    if any(later <= earlier for earlier, later in pairwise(lengths)):
        yield f"{key}: every length must be greater than the one before it."
    elif context is not None and lengths[-1] != context:
        yield (
            f"{key}: must end with model.context={context}, which evaluation and sampling use. Give model.context="
            f"{lengths[-1]}, or end with {context}."
        )


@check("task", "data")
def _prepared_replies(config: Config) -> Iterator[str]:
    if config.task.name == "prepare" and getattr(config.data, "loss_on", "all") != "all":
        yield "data.loss_on=replies: data=tokens counts every token. Train on data=documents, which keeps tokens too."


@check("train", "device")
def _one_capture_at_a_time(config: Config) -> Iterator[str]:
    count = family_of(config.device).replicas(config.device)
    if config.train.length_schedule and count > 1:
        yield (
            f"train.length_schedule={config.train.length_schedule}: a phase captures steps anew, which would spoil "
            f"what the other of device.subdevices={count} has captured. Leave it empty, or give device.subdevices=1."
        )


def context_of(config: Config) -> int | None:
    """The model's context, with what its preset says; None where it has none."""
    model = config.model
    known = isinstance(model, TransformerConfig) and (model.preset is None or model.preset in model.presets)
    return getattr(model.resolved() if known else model, "context", None)


@check("optimizer")
def _optimizer(config: Config) -> Iterator[str]:
    optimizer: Any = config.optimizer
    if isinstance(optimizer, SGDConfig) and optimizer.nesterov and optimizer.momentum == 0:
        yield "optimizer.nesterov=true: needs momentum. Give optimizer.momentum=0.9 or optimizer.nesterov=false."
    if isinstance(optimizer, AdamWConfig) and len(optimizer.betas) != 2:
        yield f"optimizer.betas={optimizer.betas}: must hold two numbers, got {len(optimizer.betas)}."


@check("optimizer", "precision")
def _stochastic_rounding(config: Config) -> Iterator[str]:
    if config.optimizer.stochastic_rounding and config.precision.name != "bf16_pure":
        yield (
            f"optimizer.stochastic_rounding=true: precision={config.precision.name} keeps fp32 weights, so there is "
            "nothing to round. Give precision=bf16_pure, or optimizer.state_dtype=bf16 for moments alone."
        )


@check("schedule", "train")
def _schedule(config: Config) -> Iterator[str]:
    schedule = config.schedule
    end, key = (config.train.steps, "train.steps") if schedule.steps is None else (schedule.steps, "schedule.steps")
    if schedule.warmup > end:
        yield f"schedule.warmup={schedule.warmup}: must be at most {key}={end}."
    elif schedule.name == "wsd" and schedule.warmup + schedule.decay * end > end:
        yield (
            f"schedule.decay={schedule.decay}: warm-up ({schedule.warmup} steps) and decay "
            f"({schedule.decay * end:g} steps) together are longer than {key}={end}."
        )


@check("model")
def _transformer_size(config: Config) -> Iterator[str]:
    model = config.model
    if not isinstance(model, TransformerConfig):
        return
    if model.preset is not None and model.preset not in model.presets:
        yield f"model.preset={model.preset}: no such preset. Valid: {', '.join(model.presets)}."
        return
    sized = model.resolved()
    missing = [f"model.{name}" for name in model.size_names() if getattr(sized, name) is None]
    if missing:
        yield f"{', '.join(missing)}: no value. Give one, or take a model.preset: {', '.join(model.presets)}."
    yield from sized.head_problems()


@check("model", "data")
def _data_fits_model(config: Config) -> Iterator[str]:
    model, data = config.model, config.data
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


@check("data", "task")
def _data_source(config: Config) -> Iterator[str]:
    if isinstance(config.data, TokensConfig) and config.data.path is None and config.task.name in ("train", "plan"):
        yield "data.path: no value. data=tokens needs data.path=<folder or file of token ids>."
    if isinstance(config.data, DocumentsConfig) and not config.data.sources:
        yield "data.sources=[]: no value. data=documents needs data.sources=[<file or folder>,<another>]."


@check("data", "task", "prepare")
def _prepare(config: Config) -> Iterator[str]:
    if config.task.name != "prepare":
        return
    if config.prepare.dir is None:
        yield "prepare.dir: no value. task=prepare needs prepare.dir=<new folder for the token files>."
    if not isinstance(config.data, TextConfig | DocumentsConfig):
        yield (
            f"data={config.data.name}: task=prepare reads text. Give data=stdlib, data=text with data.path, or "
            "data=documents with data.sources."
        )


def model_problems(config: Config, parameters: Iterable[str], tied: bool) -> list[str]:
    """Every problem that only shows once the model is built: names that lead to no parameter."""
    return family_of(config.device).parameter_problems(config.device, list(parameters), tied)


@check("task", "profile", "device")
def _profile(config: Config) -> Iterator[str]:
    if config.task.name != "profile" or config.profile.csv is not None:
        return
    family, profiled = family_of(config.device), family_that(lambda each: each.profiles)
    if not family.profiles or family.mode(config.device) == MOCK:
        yield (
            f"task=profile: {family.named(config.device)} has no device profiler. Give a {profiled.title} card or "
            "simulator, or profile.csv=<its report>; task=plan plan.show=ops tells what ops cost on any device."
        )


@check("task", "run")
def _sample_needs_a_run(config: Config) -> Iterator[str]:
    if config.task.name in ("sample", "chat") and config.run.dir is None:
        yield f"task={config.task.name}: needs a trained run. Give run.dir=<run directory>."


@check("task", "run", "model", "eval")
def _eval(config: Config) -> Iterator[str]:
    wanted = config.eval
    if config.task.name != "eval":
        return
    folder = getattr(config.model, "from_", None)
    if config.run.dir is None and folder is None:
        yield "task=eval: needs a trained model. Give run.dir=<run directory> or model.from=<model folder>."
    elif config.run.dir is not None and folder is not None and not config.source.merged:
        yield "task=eval: run.dir and model.from both name a model. Give one of them."
    if not wanted.text and wanted.choices is None:
        yield "task=eval: nothing to measure. Give eval.text=[<file or folder>] or eval.choices=<file of questions>."
    if wanted.checkpoint not in ("last", "best") and not wanted.checkpoint.isdecimal():
        yield f"eval.checkpoint={wanted.checkpoint}: must be last, best or a step number."


@check("task", "run", "export")
def _export(config: Config) -> Iterator[str]:
    export = config.export
    if config.task.name != "export":
        return
    if export.source is None and config.run.dir is None and getattr(config.model, "from_", None) is None:
        yield "task=export: needs parameters. Give run.dir=<run directory>, or export.source=<file of weights>."
    elif export.source is not None and config.run.dir is not None:
        yield "task=export: run.dir and export.source both name parameters. Give one of them; a new run is export.dir."
    if export.file is not None and export.file == export.source:
        yield f"export.file={export.file}: is export.source; all but the weights would be lost. Give another name."
    if export.file is None and export.dir is None:
        yield "task=export: nothing to write. Give export.file=<name>.pt or .safetensors, or export.dir=<new folder>."
    if export.form in ("huggingface", "peft") and export.file is not None:
        yield f"export.file={export.file}: export.form={export.form} writes a folder. Give export.dir=<new folder>."
    if export.checkpoint not in ("last", "best") and not export.checkpoint.isdecimal():
        yield f"export.checkpoint={export.checkpoint}: must be last, best or a step number."


@check("task", "run", "report")
def _report(config: Config) -> Iterator[str]:
    if config.task.name == "report" and not (config.report.run or config.run.dir):
        yield "task=report: needs a run. Give run.dir=<run directory>, or run=<one>,<another> to compare."
    elif config.task.name == "report" and config.report.run and config.run.dir:
        yield "task=report: run.dir and report.run both name runs. Give run=<one>,<another> for all of them."
    elif config.task.name != "report" and config.report.run and config.run.dir is None:
        yield f"report.run={config.report.run}: task={config.task.name} takes one run. Give run.dir=<run directory>."


@check("resume", "run", "train")
def _resume(config: Config) -> Iterator[str]:
    if config.resume == "auto" and config.run.dir is None:
        yield "resume=auto: continues the run in run.dir, which has no value. Give run.dir=<run directory> as well."
    if config.resume not in ("", "none", "auto") and "train.init_from" in config.source.explicit:
        yield (
            f"train.init_from={config.train.init_from}: is for new runs, but resume={config.resume} continues one. "
            "Leave one of the two out."
        )
    if not config.resume:
        yield "resume='': must be none, auto or the folder of a run or checkpoint."


@check("model", "train")
def _first_values(config: Config) -> Iterator[str]:
    folder, other = getattr(config.model, "from_", None), config.train.init_from
    if folder is not None and other is not None:
        yield f"train.init_from={other}: the first values are those of model.from={folder}. Leave one of the two out."


@check("sample")
def _sample(config: Config) -> Iterator[str]:
    if (which := config.sample.checkpoint) not in ("last", "best") and not which.isdecimal():
        yield f"sample.checkpoint={which}: must be last, best or a step number."
    if "" in config.sample.stop:
        yield "sample.stop: an empty text would end every sample at once. Give a text, or the name of a special token."


_BENCH_LISTS = {"precision": "fp32", "batch": "256", "dim": "256", "layers": "2", "size": "1024", "work": "gpt"}


@check("task", "bench", "device")
def _bench(config: Config) -> Iterator[str]:
    if config.task.name != "bench":
        return
    bench: Any = config.bench
    contest = hasattr(bench, "baselines")
    if getattr(bench, "engines", None) == [] and not getattr(bench, "baselines", []):
        both = " and bench.baselines=[]" if contest else ""
        yield f"bench.engines=[]{both}: nobody takes part. Name at least one."
    for key, example in _BENCH_LISTS.items():
        if getattr(bench, key, None) == []:
            yield f"bench.{key}=[]: name at least one, such as [{example}]."
    family = family_of(config.device)
    if isinstance(bench, ChipBenchConfig) and family.published_on is None and config.device.name != "auto":
        chip = family_that(lambda each: each.published_on)
        yield (
            f"device={config.device.name}: bench={bench.name} is about a {chip.title} chip. Give "
            f"device={chip.published_on}, or leave it out; without a card the times come from the cost model."
        )
    elif config.device.name == "null":
        yield "device=null: computes nothing, so there is nothing to time. Give device=cpu or device=cuda."
    for name in bench.precision if contest else []:
        yield from _lacks_precision(config, "bench.precision", name, "bench.precision=[bf16]")
    for key in sorted(config.source.explicit):
        if key.partition(".")[0] in ("model", "data", "train", "lora", "optimizer", "schedule", "precision"):
            yield f"{key}: task=bench does not read it; the keys of bench decide what is measured."
        elif key == "engine.name":
            yield f"engine={config.engine.name}: task=bench takes its engines from bench.engines."


@check("device", "precision")
def _precision(config: Config) -> Iterator[str]:
    yield from _lacks_precision(config, "precision", config.precision.name, "precision=bf16")


def _lacks_precision(config: Config, key: str, name: str, instead: str) -> Iterator[str]:
    """Who has a precision that the device has not."""
    having = family_that(lambda each: name in each.precisions)
    if name in having.precisions and name not in family_of(config.device).precisions:
        yield f"{key}={name}: only on {having.title} devices. Give {instead}, or device={having.example}."


@check("device", "train")
def _device(config: Config) -> Iterator[str]:
    yield from family_of(config.device).problems(config.device, config.train.batch_size // config.train.accumulation)


@check("device", "replicas", "run", "task")
def _replicas(config: Config) -> Iterator[str]:
    count = family_of(config.device).replicas(config.device)
    divided = family_that(lambda each: each.divides)
    for key in ("seed", "lr"):
        given = getattr(config.replicas, key)
        if given is not None and count == 1:
            yield f"replicas.{key}={given}: there is one run. Give device.subdevices=2 on a {divided.title} device."
        elif given is not None and len(given) != count:
            yield f"replicas.{key}={given}: must hold one value for each of the {count} replicas."
        elif given is not None and min(given) < 0:
            yield f"replicas.{key}={given}: must be 0 or more."
    largest = max(config.replicas.seed or [config.run.seed + count - 1])
    if count > 1 and largest >= 2**31:
        key = "replicas.seed" if config.replicas.seed else "run.seed"
        yield f"{key}: the largest seed would be {largest}, above {2**31 - 1}."
    if count > 1 and config.task.name not in ("train", "plan", "doctor", "runs", "report"):
        yield f"device.subdevices={count}: task={config.task.name} runs on a whole chip. Give device.subdevices=1."


@check("device", "logger", "supervise", "recover", "task")
def _shared_device(config: Config) -> Iterator[str]:
    count = family_of(config.device).replicas(config.device)
    if count == 1:
        return
    others = {
        "logger": (config.logger.name == "wandb", "console", "W&B follows one run per process"),
        "recover.oom": (config.recover.oom == "shrink", "stop", "the replicas share the memory"),
        "supervise.enabled": (supervised(config), "false", "a supervisor follows one run"),
    }
    for key, (wrong, instead, why) in others.items():
        if wrong:
            yield f"device.subdevices={count}: {why}. Give {key}={instead}."


def supervised(config: Config) -> bool:
    """Whether training is wanted under a supervisor."""
    if config.supervise.enabled is None:
        return any(key.startswith("supervise.") for key in config.source.explicit)
    return config.supervise.enabled


@check("model", "sample", "task")
def _sample_mode(config: Config) -> Iterator[str]:
    model, mode, slide = config.model, config.sample.mode, config.sample.slide
    if config.task.name in ("sample", "chat") or config.source.awaits_model(config.resume):
        return  # the model is that of a run, and is checked there
    context = context_of(config)
    if slide is not None and context is not None and slide >= max(2, context):
        yield f"sample.slide={slide}: must be less than model.context={context}."
    if mode == "ar" or not isinstance(model, TransformerConfig):
        return
    if not isinstance(model, AGILLMConfig) or model.objective == "ar_only":
        why = f"model.name={model.name}" if not isinstance(model, AGILLMConfig) else "model.objective=ar_only"
        yield f"sample.mode={mode}: needs a SAT head, and {why} has none. Give sample.mode=ar."


@check("logger")
def _logger(config: Config) -> Iterator[str]:
    if getattr(config.logger, "project", "x") == "":
        yield "logger.project='': must not be empty."
