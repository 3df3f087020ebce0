"""What a task other than training needs, and what it does not take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ttrain.bench.settings import ChipBenchConfig
from ttrain.config.checks.check import check
from ttrain.config.checks.device import lacks_precision
from ttrain.config.components import TaskConfig
from ttrain.config.registry import family_that
from ttrain.config.schema import PrepareConfig, ProfileConfig, RampConfig, ReportConfig, Source, SweepConfig
from ttrain.core.names import did_you_mean
from ttrain.data.settings import DataConfig, DocumentsConfig, TextConfig
from ttrain.device.family import MOCK, family_of
from ttrain.device.settings import DeviceConfig
from ttrain.engine.settings import EngineConfig
from ttrain.models.settings import AGILLMConfig, TransformerConfig
from ttrain.optim.settings import OptimizerConfig
from ttrain.train.settings import EvalConfig, ExportConfig, RunConfig, SampleConfig, TrainConfig


@check
def _prepared_replies(task: TaskConfig, data: DataConfig) -> Iterator[str]:
    if task.name == "prepare" and getattr(data, "loss_on", "all") != "all":
        yield "data.loss_on=replies: data=tokens counts every token. Train on data=documents, which keeps tokens too."


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
    if task.name != "profile":
        return
    family, profiled = family_of(device), family_that(lambda each: each.profiles)
    if profile.csv is None and (device.name == "null" or family.mode(device) == MOCK):
        yield (
            f"task=profile: {family.named(device)} computes nothing that takes time. Give device=cpu, device=cuda, a "
            f"{profiled.title} card or simulator, or profile.csv=<its report>; task=plan plan.show=ops tells what ops "
            "cost on any device."
        )
    if profile.trace is not None and (profile.csv is not None or family.profiles):
        yield "profile.trace: a device's own profiler gives no timeline. Give device=cpu or device=cuda, or null."


@check
def _one_model(task: TaskConfig, model: Any, run: RunConfig, source: Source) -> Iterator[str]:
    if task.name not in ("sample", "chat", "eval"):
        return
    folder = getattr(model, "from_", None)
    if run.dir is None and folder is None:
        yield f"task={task.name}: needs a trained model. Give run.dir=<run directory> or model.from=<model folder>."
    elif run.dir is not None and folder is not None and not source.merged:
        yield f"task={task.name}: run.dir and model.from both name a model. Give one of them."


@check
def _prompts(task: TaskConfig, sample: SampleConfig, source: Source) -> Iterator[str]:
    several = sample.prompts is not None
    if task.name == "chat" and (several or "sample.prompt" in source.explicit):
        key = "prompts" if several else "prompt"
        yield f"sample.{key}: task=chat reads what is typed. Leave the key out, or give task=sample."
    elif several and "sample.prompt" in source.explicit:
        yield "sample.prompt and sample.prompts both say what is continued. Give one of them."
    if sample.results is not None and not several and task.name in ("sample", "chat"):
        yield f"sample.results={sample.results}: takes the answers to sample.prompts. Give those as well."
    if task.name == "sample" and sample.system is not None:
        yield "sample.system: begins a conversation of task=chat. Give a row of sample.prompts messages with that role."


@check
def _eval(task: TaskConfig, eval: EvalConfig) -> Iterator[str]:  # noqa: A002 - the section's name
    if task.name == "eval":
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
def _ramp(task: TaskConfig, optimizer: OptimizerConfig, ramp: RampConfig) -> Iterator[str]:
    if ramp.low >= ramp.high:
        yield f"ramp.low={ramp.low:g}: must be less than ramp.high={ramp.high:g}."
    if task.name == "lr" and optimizer.lr == 0:
        yield "optimizer.lr=0: task=lr tries rates in proportion to it. Leave it out."


@check
def _prune(task: TaskConfig, train: TrainConfig, sweep: SweepConfig) -> Iterator[str]:
    if sweep.prune is None:
        return
    if sweep.search is None:
        yield f"sweep.prune={sweep.prune}: ends jobs of a search. Give sweep.search=tpe as well."
    if task.name != "train":
        yield f"sweep.prune={sweep.prune}: task={task.name} has no evaluations to go by. Leave it out."
    elif train.eval_every is None or train.eval_every * (sweep.prune_after + 1) > train.steps:
        yield (
            f"sweep.prune={sweep.prune}: needs more than sweep.prune_after={sweep.prune_after} evaluation(s) of a job. "
            f"Give train.eval_every=<steps>, at most {max(train.steps // (sweep.prune_after + 1), 1)}."
        )


@check
def _objective(task: TaskConfig, sweep: SweepConfig) -> Iterator[str]:
    if task.name != "train" or sweep.objective == SweepConfig().objective:
        return
    from ttrain.train.runs.summary import NUMBERS

    if sweep.objective not in NUMBERS:
        hint = did_you_mean(sweep.objective, NUMBERS)
        yield f"sweep.objective={sweep.objective}: summary.json of a run has no such number. {hint}"


@check
def _report(task: TaskConfig, run: RunConfig, report: ReportConfig) -> Iterator[str]:
    if task.name == "report" and not (report.run or run.dir):
        yield "task=report: needs a run. Give run.dir=<run directory>, or run=<one>,<another> to compare."
    elif task.name == "report" and report.run and run.dir:
        yield "task=report: run.dir and report.run both name runs. Give run=<one>,<another> for all of them."
    elif task.name != "report" and report.run and run.dir is None:
        yield f"report.run={report.run}: task={task.name} takes one run. Give run.dir=<run directory>."


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
    if isinstance(bench, ChipBenchConfig) and family.modelled is None and device.name != "auto":
        chip = family_that(lambda each: each.modelled)
        yield (
            f"device={device.name}: bench={bench.name} is about a {chip.title} chip. Give "
            f"device={chip.modelled}, or leave it out; without a card the times come from the cost model."
        )
    elif device.name == "null":
        yield "device=null: computes nothing, so there is nothing to time. Give device=cpu or device=cuda."
    for name in bench.precision if contest else []:
        yield from lacks_precision(device, "bench.precision", name, "bench.precision=[bf16]")
    for key in sorted(source.explicit):
        if key.partition(".")[0] in ("model", "data", "train", "lora", "optimizer", "schedule", "precision"):
            yield f"{key}: task=bench does not read it; the keys of bench decide what is measured."
        elif key == "engine.name":
            yield f"engine={engine.name}: task=bench takes its engines from bench.engines."


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
