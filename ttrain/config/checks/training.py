"""What the sections of a training run say of each other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from ttrain.config.checks.check import check
from ttrain.config.components import TaskConfig
from ttrain.config.schema import Source
from ttrain.core.names import did_you_mean, nearest_divisor
from ttrain.data.settings import DataConfig, DocumentsConfig, RegressionConfig, TokensConfig
from ttrain.models.settings import MLPConfig, TransformerConfig
from ttrain.nn.precision import PrecisionConfig
from ttrain.nn.settings import LoraConfig
from ttrain.optim.settings import (
    AdafactorConfig,
    AdamWConfig,
    LionConfig,
    MuonConfig,
    OptimizerConfig,
    ScheduleConfig,
    ScheduleFreeConfig,
    SGDConfig,
)
from ttrain.train.settings import LoggerConfig, RunConfig, TrainConfig


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
def _batch_schedule(train: TrainConfig) -> Iterator[str]:
    sizes, size = train.batch_schedule, train.batch_size
    key = f"train.batch_schedule={sizes}"
    if not sizes or size % train.accumulation:
        return
    micro_batch, common = size // train.accumulation, math.gcd(*sizes)
    if any(later < earlier for earlier, later in pairwise(sizes)):
        yield f"{key}: no size may be smaller than the one before it."
    elif sizes[-1] != size:
        yield f"{key}: must end with train.batch_size={size}. Give train.batch_size={sizes[-1]}, or end with {size}."
    elif common % micro_batch:
        yield (
            f"{key}: a batch grows by micro-batches, of train.batch_size / train.accumulation = {micro_batch} rows "
            f"here, and every size must be a multiple of it. Give train.accumulation={size // common}."
        )


@check
def _documents_have_targets(model: Any, data: DataConfig, train: TrainConfig) -> Iterator[str]:
    if isinstance(data, DocumentsConfig) and 1 in (getattr(model, "context", 0), *train.length_schedule):
        yield (
            "data=documents: the last token of a sequence has no target, so sequences of 1 token teach nothing. Give "
            "model.context and train.length_schedule of 2 or more."
        )


@check
def _optimizer(optimizer: Any) -> Iterator[str]:
    if isinstance(optimizer, SGDConfig) and optimizer.nesterov and optimizer.momentum == 0:
        yield "optimizer.nesterov=true: needs momentum. Give optimizer.momentum=0.9 or optimizer.nesterov=false."
    if isinstance(optimizer, AdamWConfig | LionConfig | MuonConfig | ScheduleFreeConfig) and len(optimizer.betas) != 2:
        yield f"optimizer.betas={optimizer.betas}: must hold two numbers, got {len(optimizer.betas)}."
    if isinstance(optimizer, AdafactorConfig) and optimizer.state_dtype == "bf16":
        yield (
            "optimizer.state_dtype=bf16: adafactor keeps a number a row and column, in fp32: they change too little in "
            "a step for bf16. Leave it out."
        )


@check
def _adapters_under_mup(model: Any, lora: LoraConfig, optimizer: OptimizerConfig) -> Iterator[str]:
    mup = getattr(model, "parametrization", "standard") == "mup"
    if lora.rank and mup and isinstance(optimizer, SGDConfig | MuonConfig):
        yield (
            f"optimizer={optimizer.name}: has no rule for the rates of adapters under model.parametrization=mup. Give "
            "optimizer=adamw, or model.parametrization=standard."
        )


@check
def _stochastic_rounding(optimizer: OptimizerConfig, precision: PrecisionConfig) -> Iterator[str]:
    if optimizer.stochastic_rounding and precision.name != "bf16_pure":
        yield (
            f"optimizer.stochastic_rounding=true: precision={precision.name} keeps fp32 weights, so there is "
            "nothing to round. Give precision=bf16_pure, or optimizer.state_dtype=bf16 for moments alone."
        )


@check
def _noise_scale(train: TrainConfig) -> Iterator[str]:
    if train.noise_scale and train.accumulation < 2:
        yield "train.noise_scale=true: compares a micro-batch with the batch. Give train.accumulation of 2 or more."


@check
def _averages(train: TrainConfig, optimizer: Any, precision: PrecisionConfig) -> Iterator[str]:
    averages = isinstance(optimizer, ScheduleFreeConfig)
    if averages and train.ema is not None:
        yield f"train.ema={train.ema}: optimizer=schedule_free keeps an average of its own. Give train.ema=null."
    elif averages and optimizer.average_after >= train.steps:
        yield (
            f"optimizer.average_after={optimizer.average_after}: must be below train.steps={train.steps}, or the "
            "average has no step to take in."
        )
    elif (averages or train.ema is not None) and precision.name == "bf16_pure":
        key = "optimizer=schedule_free" if averages else f"train.ema={train.ema}"
        yield f"{key}: an average needs weights in fp32, and precision=bf16_pure has none. Give precision=bf16."


@check
def _schedule(train: TrainConfig, schedule: ScheduleConfig) -> Iterator[str]:
    end, key = (train.steps, "train.steps") if schedule.steps is None else (schedule.steps, "schedule.steps")
    if schedule.warmup > end:
        yield f"schedule.warmup={schedule.warmup}: must be at most {key}={end}."
    elif schedule.decay_from is not None and schedule.name != "wsd":
        yield f"schedule.decay_from={schedule.decay_from}: is for schedule=wsd, not {schedule.name}. Give schedule=wsd."
    elif schedule.decay_from is not None and schedule.decay_from >= end:
        yield f"schedule.decay_from={schedule.decay_from}: must be below {key}={end}, where the decay ends."
    elif schedule.decay_from and schedule.decay_from < schedule.warmup:
        yield f"schedule.decay_from={schedule.decay_from}: must be at least schedule.warmup={schedule.warmup}."
    elif schedule.decay_from is None and schedule.name == "wsd" and schedule.warmup + schedule.decay * end > end:
        yield (
            f"schedule.decay={schedule.decay}: warm-up ({schedule.warmup} steps) and decay "
            f"({schedule.decay * end:g} steps) together are longer than {key}={end}."
        )


@check
def _transformer_size(model: Any) -> Iterator[str]:
    if not isinstance(model, TransformerConfig):
        return
    if model.preset is not None and model.preset not in model.presets:
        yield f"model.preset={model.preset}: no such preset. {did_you_mean(model.preset, model.presets)}"
        return
    missing = [f"model.{name}" for name in model.size_names() if getattr(model, name) is None]
    if missing:
        yield f"{', '.join(missing)}: no value. Give one, or take a model.preset: {', '.join(model.presets)}."
    yield from model.head_problems()


@check
def _resident(data: DataConfig) -> Iterator[str]:
    if data.resident == "device" and isinstance(data, DocumentsConfig):
        yield (
            "data.resident=device: the host makes the sequences of data=documents, by where documents begin and what "
            "of them counts. Give auto or host, or data=tokens with the folder that task=prepare writes of them."
        )


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
    if isinstance(data, DocumentsConfig) and not data.sources and task.name not in ("sample", "chat"):
        yield "data.sources=[]: no value. data=documents needs data.sources=[<file or folder>,<another>]."


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
def _logger(logger: LoggerConfig) -> Iterator[str]:
    if getattr(logger, "project", "x") == "":
        yield "logger.project='': must not be empty."
