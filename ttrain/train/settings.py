"""Small config of the training loop, supervision, guards, the run directory, the loggers and sampling."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ttrain.core.options import option

LOGGERS = ("console", "jsonl", "wandb")


@dataclass
class TrainConfig:
    """How long to train, on how much per step, and what happens between steps."""

    steps: int = option(1000, "optimizer steps of the whole run, counted from the first attempt", minimum=1)
    batch_size: int = option(16, "sequences (or examples) per optimizer step", minimum=1)
    accumulation: int = option(1, "micro-batches per step; must divide batch_size", minimum=1)
    batch_schedule: list[int] = option(
        [],
        "sequences (or examples) per step, from few to batch_size, each for phase_steps steps and the last for the "
        "rest, in micro-batches of batch_size / accumulation; empty always takes batch_size",
        minimum=1,
    )
    ema: float | None = option(
        None,
        "decay of an exponential moving average of the weights, such as 0.999, which evaluations and what is made of "
        "the run read instead of them; null keeps none",
        minimum=0,
        below=1,
    )
    noise_scale: bool = option(
        False,
        "record noise_scale, the rows of a batch whose gradient is as much signal as noise, from the first micro-batch "
        "beside the whole batch; needs accumulation of 2 or more. Where it grows, so may the batch: batch_schedule",
    )
    length_schedule: list[int] = option(
        [],
        "lengths of training sequences in tokens, from short to model.context, each for phase_steps steps and the last "
        "for the rest; empty always takes model.context",
        minimum=1,
    )
    phase_steps: int = option(
        50_000,
        "steps at each entry of batch_schedule and length_schedule but the last",
        minimum=1,
    )
    long_hours: float | None = option(
        1.0,
        "hours; a run that is expected to take longer says so before its first step, with commands that take less, and "
        "goes on; null never says it",
        above=0,
    )
    init_from: str | None = option(
        None,
        "what a new run takes its first values from, where name and shape match: a run, a checkpoint, a folder of "
        "Transformers, a .safetensors file or the original's .pt file; null draws all of them",
        path=True,
    )
    init_anyway: bool = option(
        False,
        "take what fits of train.init_from although a key that changes what weights compute, or the tokenizer, is "
        "another one there",
    )
    eval_every: int | None = option(250, "steps between evaluations; null evaluates once, at the end", minimum=1)
    eval_sequences: int | None = option(
        320,
        "held-out sequences (or examples) per evaluation, the same ones for every batch size; null takes all of them",
        minimum=1,
    )
    save_every: int | None = option(500, "steps between checkpoints; null saves by time and at the end", minimum=1)
    save_minutes: float | None = option(
        10.0, "minutes between checkpoints; null saves by steps and at the end", above=0
    )
    keep_last: int = option(2, "newest checkpoints that are kept", minimum=1)
    keep_best: bool = option(True, "whether the checkpoint with the lowest val/loss is kept as well")
    keep_every: int | None = option(
        None, "checkpoints of every so many steps are kept for ever; null keeps none", minimum=1
    )
    keep_hours: float | None = option(
        None, "one checkpoint of every so many hours is kept for ever; null keeps none", above=0
    )
    async_save: bool = option(
        True, "write checkpoints while training goes on; a step waits for the copy to host memory only"
    )
    log_every: int = option(10, "steps between two lines of metrics.jsonl; 1 records every step", minimum=1)
    early_stop: int | None = option(
        None, "evaluations without a lower val/loss after which the run stops; null never stops early", minimum=1
    )
    min_improvement: float = option(0.0, "by how much val/loss must fall to count as lower", minimum=0)
    peak_tflops: float | None = option(
        None, "peak of the device in 1e12 FLOP/s that mfu is relative to; null measures a matmul once", above=0
    )


def without_phases(train: TrainConfig, **changes: Any) -> TrainConfig:
    """With batches and sequences as large as they get from the first step on, and with changes."""
    return replace(train, batch_schedule=[], length_schedule=[], **changes)


@dataclass
class RunConfig:
    """Where the run lives and what its random numbers start from."""

    dir: str | None = option(
        None, "run directory; null claims outputs/<date>/<time>_<model>_<device>_<engine>", path=True
    )
    seed: int = option(1337, "start of every random number: weights, batches, dropout", minimum=0, maximum=2**31 - 1)


@dataclass
class ReplicasConfig:
    """How the runs differ that device.subdevices=2 trains side by side."""

    seed: list[int] | None = option(
        None, "run.seed of each replica, such as [1,2]; null takes run.seed for the first, and the next number on"
    )
    lr: list[float] | None = option(None, "optimizer.lr of each replica, such as [1e-3,3e-4]; null takes optimizer.lr")


@dataclass
class LoggerConfig:
    """Who else sees the metrics. metrics.jsonl is always written."""

    name: str = option("console", "console (progress bar), jsonl (metrics.jsonl only) or wandb", choices=LOGGERS)


@dataclass
class WandbConfig(LoggerConfig):
    """Weights & Biases next to the progress bar."""

    name: str = option("wandb", "console (progress bar), jsonl (metrics.jsonl only) or wandb", choices=LOGGERS)
    project: str | None = option(None, "project that the run belongs to; null takes WANDB_PROJECT, else ttrain")
    entity: str | None = option(None, "user or team; null takes WANDB_ENTITY, else the account's default")
    mode: str | None = option(
        None,
        "online, offline or disabled; null takes WANDB_MODE, else online; not logged in means offline",
        choices=("online", "offline", "disabled"),
    )
    run_name: str | None = option(None, "display name of the run; null takes WANDB_NAME, else the run directory's name")
    group: str | None = option(None, "name that related runs share; null takes WANDB_RUN_GROUP")
    tags: list[str] | None = option(None, "labels of the run; null takes WANDB_TAGS, which commas separate")


@dataclass
class CheckpointConfig:
    """Which weights of a run a task takes."""

    checkpoint: str = option("last", "which checkpoint of the run: last, best, or a step number")
    average: bool = option(True, "take the averages of the weights, where the run keeps them; false: the weights")


@dataclass
class SampleConfig(CheckpointConfig):
    """How text is drawn from a trained model."""

    prompt: str | None = option(
        None,
        "text that the model continues; null takes held-out text at the end of a run, and for task=sample a line "
        "break, or where the tokenizer has none the token between documents, or any",
    )
    prompts: str | None = option(
        None,
        "file of prompts that are each continued: one a line, or in a .jsonl a row with prompt or messages a line",
        path=True,
    )
    results: str | None = option(
        None, "file that takes a row of JSON for each sample of sample.prompts; null writes to stdout", path=True
    )
    system: str | None = option(None, "task=chat only: message of the system that a conversation begins with")
    tokens: int = option(200, "tokens to draw per sample, at most", minimum=1)
    stop: list[str] = option(
        [],
        "texts, in which \\n is a line break, and names of special tokens at which a sample ends, besides the token "
        "that ends a document; they are not printed",
    )
    temperature: float = option(0.8, "logits are divided by it; 0 always takes the likeliest token", minimum=0)
    top_k: int | None = option(None, "draw from the k likeliest tokens only; null draws from all", minimum=1)
    top_p: float | None = option(
        None,
        "draw from the likeliest tokens that together reach this probability; null draws from all",
        above=0,
        maximum=1,
    )
    seed: int = option(1337, "start of the random numbers that choose tokens", minimum=0, maximum=2**31 - 1)
    count: int = option(1, "number of samples", minimum=1)
    mode: str = option(
        "ar",
        "ar: one token a pass. For a model with a SAT head also sat: two tokens a pass; sat_variable: one or two, as "
        "its gate says; speculative: the SAT head drafts two tokens and the AR head accepts or replaces them, which "
        "draws from the distribution of ar",
        choices=("ar", "sat", "sat_variable", "speculative"),
    )
    cache: bool | None = option(
        None,
        "whether keys and values of the text so far are kept instead of computed again for every token; null: where "
        "the model can",
    )
    slide: int | None = option(
        None,
        "how many of the oldest tokens a text loses at once when it outgrows the context; every time, what is left is "
        "computed anew; null: an eighth of the context",
        minimum=1,
    )
    min_p: float | None = option(
        None,
        "draw only from tokens with at least this share of the likeliest one's probability; null draws from all",
        above=0,
        maximum=1,
    )
    repetition: float = option(
        1.0,
        "logits of tokens that occurred are divided by it where positive, else multiplied; 1 changes nothing",
        above=0,
    )
    presence: float = option(0.0, "taken off the logits of tokens that occurred")
    frequency: float = option(0.0, "taken off the logits of tokens for each time that they occurred")
    penalty_window: int | None = option(
        128, "how many of the newest tokens count for the three penalties; null counts all", minimum=1
    )


@dataclass
class EvalConfig(CheckpointConfig):
    """What task=eval measures of a trained model."""

    text: list[str] = option(
        [],
        "files or folders whose documents the model predicts, in the forms that data.sources takes: loss, perplexity "
        "and bits per byte",
        path=True,
    )
    text_key: str = option("text", "key of the text of a row, where a file of eval.text has rows")
    choices: str | None = option(
        None,
        "file of questions in HellaSwag's form, a row of JSON each: ctx, endings and label, the number of the right "
        "one; the model chooses the likeliest",
        path=True,
    )
    stride: int | None = option(
        None,
        "tokens of a long document that are predicted at a time, each from as much before them as the context holds; "
        "null: a context",
        minimum=1,
    )
    limit: int | None = option(None, "read no more documents and questions than this; null reads all", minimum=1)
    batch_size: int = option(8, "sequences that are computed at once", minimum=1)
    out: str | None = option(
        None, "JSON file for the results; null takes results.json in a new folder below outputs/eval", path=True
    )


@dataclass
class ExportConfig(CheckpointConfig):
    """What task=export makes of a run's parameters, or of a file of weights."""

    source: str | None = option(
        None,
        "file of weights to export instead of those of run.dir, .pt or .safetensors, in the names of ttrain or of the "
        "original; `model` says what it holds, AGILLM's sizes follow from the file",
        path=True,
    )
    file: str | None = option(None, "file to write: .pt, .safetensors or .gguf", path=True)
    form: str = option(
        "original",
        "names and layout; original: a file that the model's first implementation reads; huggingface: a folder that "
        "Transformers reads; ttrain: a file of parameters by path; peft: a folder of adapters that PEFT reads; gguf: a "
        "file that llama.cpp reads",
        choices=("original", "huggingface", "ttrain", "peft", "gguf"),
    )
    merge: bool = option(
        True, "add adapters to the weights that they stand beside; false keeps them apart, in a new run folder only"
    )
    dir: str | None = option(
        None,
        "new folder to write: a run for task=sample and train.init_from, or with form=huggingface a model of "
        "Transformers",
        path=True,
    )
    shard_mb: int = option(5000, "form=huggingface: a file of weights has at most so many MB", minimum=1)
    compact: bool = option(
        False, "AGILLM only: leave out the columns of each layer's rank matrix that add nothing to the scores"
    )
    tokenizer: str | None = option(
        None, "tokenizer.json for a new folder made of export.source, if the file has none", path=True
    )


@dataclass
class SuperviseConfig:
    """Training as a child process that is restarted from its newest checkpoint. `supervise=true` turns it on."""

    enabled: bool | None = option(
        None, "whether a parent process watches training; null: yes where another supervise key is given"
    )
    max_restarts: int = option(3, "restarts in a row without a new checkpoint after which it gives up", minimum=0)
    backoff: float = option(2.0, "seconds before a restart, doubled while there is no progress", minimum=0)
    max_backoff: float = option(300.0, "longest wait before a restart in seconds", minimum=0)
    hang_timeout: float | None = option(
        1800.0, "seconds without a sign of life after which the child is killed; null waits for ever", above=0
    )
    on_restart: str | None = option(
        None, "shell command to run before every restart, such as a card reset; only the command line may give one"
    )
    on_restart_timeout: float = option(300.0, "seconds that on_restart may take", above=0)


@dataclass
class GuardConfig:
    """What happens when numbers go wrong."""

    nonfinite: str = option(
        "stop",
        "a loss or gradient norm that is NaN or infinite: stop the run, skip the update, or roll back to the newest "
        "checkpoint with a lower learning rate",
        choices=("stop", "skip", "rollback"),
    )
    activations: bool = option(
        False, "also watch the norm of the activations that the loss reads, and record it as activation_norm"
    )
    max_skips: int = option(10, "skipped updates in a row after which the run stops", minimum=1)
    spike: str = option(
        "ignore",
        "a loss far above its recent median: ignore it, warn, or roll back",
        choices=("ignore", "warn", "rollback"),
    )
    spike_factor: float = option(2.0, "a loss above this times the median is a spike", above=1)
    spike_window: int = option(
        50, "steps that the median is taken over; no spike is seen before they are done", minimum=2
    )
    lr_factor: float = option(0.5, "what a rollback multiplies the learning rate by from then on", above=0, maximum=1)
    max_rollbacks: int = option(3, "rollbacks of a run after which it stops", minimum=1)
    check_learning: int | None = option(
        3, "steps after which every parameter with a gradient must have moved; null does not check", minimum=1
    )


@dataclass
class RecoverConfig:
    """What the run may change by itself to go on."""

    oom: str = option(
        "stop",
        "out of memory: stop, or shrink (halve the micro-batch and double train.accumulation, which leaves the "
        "optimisation problem as it is)",
        choices=("stop", "shrink"),
    )
