"""Small config of the tasks beside training: samples, measurements, exports, plans and lists of runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ttrain.core.options import option, rule
from ttrain.device.info import MOCK, info_of

BASELINE = "baseline"  # the config that variants are compared with


@dataclass
class CheckpointConfig:
    """The weights of a run that a task takes."""

    checkpoint: str = option("last", "checkpoint of the run: last, best, or a step number")
    average: bool = option(True, "take averaged weights if the run keeps them")

    @rule
    def _is_a_checkpoint(self, others: Any) -> Iterator[str]:
        which, section = self.checkpoint, type(self).__name__.removesuffix("Config").lower()
        if which not in ("last", "best") and not which.isdecimal():
            yield f"{section}.checkpoint={which}: must be last, best or a step number."


@dataclass
class SampleConfig(CheckpointConfig):
    """Options for drawing text from a trained model."""

    prompt: str | None = option(None, "text to continue; null is held-out, for task=sample a line break", verbatim=True)
    prompts: str | None = option(None, "file of a prompt per line, or .jsonl rows of prompt or messages", path=True)
    results: str | None = option(None, "JSON-lines file for answers to sample.prompts; null is stdout", path=True)
    system: str | None = option(None, "task=chat: system message of the conversation", verbatim=True)
    tokens: int = option(200, "most tokens per sample", minimum=1)
    stop: list[str] = option([], "texts (\\n is a line break) and special tokens at which a sample ends; not printed")
    temperature: float = option(0.8, "divisor of the logits; 0 takes the likeliest token", minimum=0)
    top_k: int | None = option(None, "draw from the k likeliest tokens; null draws from all", minimum=1)
    top_p: float | None = option(None, "total probability of the likeliest tokens drawn; null is 1", above=0, maximum=1)
    seed: int = option(1337, "seed of the drawn tokens", minimum=0, maximum=2**31 - 1)
    count: int = option(1, "number of samples", minimum=1)
    batch_size: int = option(32, "most samples written at once", minimum=1)
    mode: str = option(
        "ar",
        "ar draws a token a pass; with a SAT head, sat draws 2, sat_variable 1 or 2, speculative drafts and checks 2",
        choices=("ar", "sat", "sat_variable", "speculative"),
    )
    cache: bool | None = option(None, "keep keys and values instead of recomputing them; null does if the model can")
    slide: int | None = option(None, "oldest tokens dropped when the context is full; null is an eighth", minimum=1)
    min_p: float | None = option(None, "least share of the highest probability; null draws all", above=0, maximum=1)
    repetition: float = option(1.0, "divide positive logits of seen tokens by this, multiply others; 1 is off", above=0)
    presence: float = option(0.0, "subtract this from the logits of seen tokens")
    frequency: float = option(0.0, "subtract this from the logits of seen tokens, once per occurrence")
    penalty_window: int | None = option(128, "newest tokens that the three penalties look at; null is all", minimum=1)

    @rule
    def _one_prompt(self, others: Any) -> Iterator[str]:
        task, several, one = others.task.name, self.prompts is not None, "sample.prompt" in others.source.explicit
        if task == "chat" and (several or one):
            key = "prompts" if several else "prompt"
            yield f"sample.{key}: task=chat reads what is typed. Leave the key out, or give task=sample."
        elif several and one:
            yield "sample.prompt and sample.prompts both say what is continued. Give one of them."
        if self.results is not None and not several and task in ("sample", "chat"):
            yield f"sample.results={self.results}: takes the answers to sample.prompts. Give those as well."
        if task == "sample" and self.system is not None:
            yield "sample.system: begins a conversation of task=chat. Give a row of sample.prompts with that role."

    @rule
    def _stops_at_text(self, others: Any) -> Iterator[str]:
        if "" in self.stop:
            yield "sample.stop: an empty text would end every sample at once. Give text, or a special token's name."


@dataclass
class EvalConfig(CheckpointConfig):
    """Options of task=eval, which measures a trained model."""

    text: list[str] = option([], "files or folders to predict, as in data.sources", path=True)
    text_key: str = option("text", "key of the text in rows of eval.text")
    choices: str | None = option(None, ".jsonl file of questions in HellaSwag's form: ctx, endings, label", path=True)
    stride: int | None = option(None, "tokens of a long document predicted at a time; null is the context", minimum=1)
    limit: int | None = option(None, "most documents and questions to read; null reads all", minimum=1)
    batch_size: int = option(8, "sequences computed at once", minimum=1)
    out: str | None = option(None, "JSON file for the results; null takes a new folder below outputs/eval", path=True)


@dataclass
class ExportConfig(CheckpointConfig):
    """Options of task=export, which writes the parameters of a run or of a file of weights."""

    source: str | None = option(None, "file of weights in place of run.dir; `model` names its model", path=True)
    file: str | None = option(None, "file to write: .pt, .safetensors or .gguf", path=True)
    form: str = option(
        "original",
        "original is the original program's file, ttrain has parameters by path, gguf is for llama.cpp; huggingface "
        "and peft are folders",
        choices=("original", "huggingface", "ttrain", "peft", "gguf"),
    )
    dtype: str = option("fp32", "gguf: dtype of matrices, in llama.cpp's words", choices=("fp32", "q8_0", "q4_0"))
    merge: bool = option(True, "add adapters to their weights; false keeps them apart, in a new run folder only")
    dir: str | None = option(None, "new folder: a run, or with form=huggingface a model of Transformers", path=True)
    shard_mb: int = option(5000, "huggingface: largest file of weights in MB", minimum=1)
    compact: bool = option(False, "AGILLM: drop columns of each rank matrix that add nothing to the scores")
    tokenizer: str | None = option(None, "tokenizer.json for export.source, if the file has none", path=True)

    @rule
    def _has_source_and_place(self, others: Any) -> Iterator[str]:
        run = others.run.dir
        if others.task.name != "export":
            return
        if self.source is None and run is None and getattr(others.model, "from_", None) is None:
            yield "task=export: needs parameters. Give run.dir=<run>, model.from=<folder> or export.source=<file>."
        elif self.source is not None and run is not None:
            yield ("task=export: run.dir and export.source both name parameters. Give one; a new run is export.dir.")
        if self.file is not None and self.file == self.source:
            yield f"export.file={self.file}: is export.source; all but the weights would be lost. Give another name."
        if others.logger.name == "wandb" and run is None:
            yield "logger=wandb: keeps an export with the W&B run of run.dir, which has no value. Leave it out."
        if self.form == "gguf" and (self.dir is not None or not (self.file or "").endswith(".gguf")):
            yield "export.form=gguf: writes a file. Give export.file=<name>.gguf and no export.dir."
        elif self.form in ("huggingface", "peft") and (self.dir is None or self.file is not None):
            yield f"export.form={self.form}: writes a folder. Give export.dir=<new folder> and no export.file."
        elif self.file is None and self.dir is None:
            yield "task=export: nothing to write. Give export.file=<name>.safetensors or export.dir=<new folder>."
        if self.dtype != "fp32" and self.form != "gguf":
            yield f"export.dtype={self.dtype}: is a type of GGUF. Give export.form=gguf export.file=<name>.gguf."


@dataclass
class RunsConfig:
    """Options of task=runs, which lists runs."""

    root: str = option("outputs", "folder that is searched for runs and sweeps", path=True)
    state: str | None = option(
        None,
        "list runs in this state only",
        choices=("running", "finished", "failed", "resumable", "interrupted", "dry_run", "new"),
    )


@dataclass
class SchemaConfig:
    """Options of task=schema, which prints a JSON Schema of config files."""

    group: str | None = option(None, "group whose files it is of, such as model; null is recipes and main configs")


@dataclass
class ReportConfig:
    """Options of task=report. `run=<folder>,<folder>` is short for report.run=[<folder>,<folder>]."""

    run: list[str] = option([], "runs to compare side by side; one run is given as run.dir", path=True)
    out: str | None = option(None, "HTML file; null takes report.html in the run, or here for several runs", path=True)

    @rule
    def _has_a_run(self, others: Any) -> Iterator[str]:
        task, run = others.task.name, others.run.dir
        if task == "report" and not (self.run or run):
            yield "task=report: needs a run. Give run.dir=<run directory>, or run=<one>,<another> to compare."
        elif task == "report" and self.run and run:
            yield "task=report: run.dir and report.run both name runs. Give run=<one>,<another> for all of them."
        elif task != "report" and self.run and run is None:
            yield f"report.run={self.run}: task={task} takes one run. Give run.dir=<run directory>."


@dataclass
class VerifyConfig:
    """Settings of task=verify, which compares ops and models with PyTorch in fp64."""

    ops: list[str] = option([], "names or families of ops; empty takes all, none takes no op", one=True)
    model: bool = option(True, "verify the gradients of the configured model too")
    rows: int = option(2, "sequences or examples of the model's batch", minimum=1)
    engines: str = option("one", "one is the configured engine; all compares every engine", choices=("one", "all"))
    tolerance: float = option(1.0, "factor on every allowed error", above=0)
    json: str | None = option(None, "file to write every comparison into", path=True)

    @rule
    def _none_stands_alone(self, others: Any) -> Iterator[str]:
        if "none" in self.ops and len(self.ops) > 1:
            yield f"verify.ops=[{','.join(self.ops)}]: none takes no op. Leave it out, or the others."


@dataclass
class TrialConfig:
    """Options of task=trial, which compares variants of a config with the config, seed by seed."""

    variants: dict[str, list[str]] = option({}, "overrides of the config by name, such as {wide:[model.width=160]}")
    seeds: int = option(8, "largest number of seeds, from run.seed on", minimum=2, maximum=64)
    level: float = option(0.05, "largest probability of a wrong verdict on a variant", minimum=1e-3, maximum=0.5)
    bound: float | None = option(None, "verdict bounded: largest difference that does not matter; null is off", above=0)
    metric: str = option("val/loss", "metric whose last value is compared", choices=("val/loss", "val/bits_per_byte"))

    @rule
    def _compares(self, others: Any) -> Iterator[str]:
        if others.task.name != "trial":
            return
        if not self.variants:
            yield "trial.variants={}: there is nothing to compare. Give trial.variants={wide:[model.width=160]}, say."
        for name in self.variants:
            if name == BASELINE or not re.fullmatch(r"\w[\w.+-]{,58}", name):
                word = f"a word of at most 59 letters, digits and any of _ . + -, other than {BASELINE}"
                yield f"trial.variants.{name}: must be {word}, because its folders get this name."
        for key in sorted(others.source.explicit):
            if key.startswith("sweep.") and key not in ("sweep.dir", "sweep.parallel", "sweep.srun", "sweep.fail_fast"):
                yield f"{key}: says how a search compares its jobs; a trial has trial.metric. Leave it out."
        if (last := others.run.seed + self.seeds - 1) >= 2**31:
            yield f"run.seed={others.run.seed}: the largest of trial.seeds={self.seeds} is {last}, above {2**31 - 1}."
        if others.run.dir is not None:
            yield f"run.dir={others.run.dir}: a trial has many runs. Give sweep.dir=<folder> for all of them."


@dataclass
class PlanConfig:
    """Options of task=plan, which predicts the cost of a run."""

    show: str | None = option(
        None, "also print the graph, that with gradients, the plan with buffers, or each op's cost",
        choices=("graph", "backward", "plan", "ops"),
    )  # fmt: skip
    json: str | None = option(None, "file for the same numbers, in bytes and operations", path=True)
    picture: str | None = option(None, "image file of the planned memory over time, such as plan.png", path=True)
    time: bool = option(True, "predict a step's time; on the CPU and on a GPU this times each kernel once")
    seconds: float = option(10.0, "seconds for timing kernels; the rest is estimated from FLOPs and bytes", minimum=0)
    calibrate: bool = option(False, "first measure the constants of the card's cost model, and keep them")
    limits: bool = option(False, "search the largest micro-batch and context that fit")
    memory_gb: float | None = option(None, "memory to fit into, in GiB; null takes the device's", above=0)


@dataclass
class ProfileConfig:
    """Options of task=profile, which times the nodes of a step, or reads a report of a device's own profiler."""

    steps: int = option(5, "training steps to profile; with profile.csv the steps in it", minimum=1)
    top: int = option(20, "slowest nodes in the table", minimum=1)
    csv: str | None = option(None, "report of a device's own profiler to read instead of running", path=True)
    json: str | None = option(None, "file for the numbers of every node", path=True)
    trace: str | None = option(None, "file for one step, for ui.perfetto.dev; not with a device's profiler", path=True)

    @rule
    def _something_takes_time(self, others: Any) -> Iterator[str]:
        if others.task.name != "profile":
            return
        device, profiled = others.device, others.info_that(lambda each: each.profiles)
        info = info_of(device)
        if self.csv is None and (device.name == "null" or info.mode(device) == MOCK):
            yield (
                f"task=profile: {info.named(device)} computes nothing that takes time. Give device=cpu, device=cuda, "
                f"a {profiled.title} card or simulator, or profile.csv=<its report>; task=plan plan.show=ops tells "
                "what ops cost on any device."
            )
        if self.trace is not None and (self.csv is not None or info.profiles):
            yield "profile.trace: a device's own profiler gives no timeline. Give device=cpu or device=cuda, or null."
