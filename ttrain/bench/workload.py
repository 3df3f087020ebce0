"""Work that all contenders of a benchmark do: model, batches, first weights, optimizer. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from ttrain.bench.settings import PERCEPTRON, SHAPED
from ttrain.config.build import build_model, made
from ttrain.config.schema import Config
from ttrain.device.settings import DeviceConfig
from ttrain.models.base import Model
from ttrain.models.gpt_weights import NAMING as GPT_NAMING
from ttrain.models.llama_weights import NAMING
from ttrain.models.settings import GPTConfig, LlamaConfig, MLPConfig
from ttrain.nn.initialize import generator_of, initial_value
from ttrain.nn.module import ADAPTER
from ttrain.nn.settings import LoraConfig, PrecisionConfig
from ttrain.optim.settings import AdamWConfig, OptimizerConfig, SGDConfig
from ttrain.train.steps.session import flops_per_step
from ttrain.train.steps.step_graph import StepGraph

Batch = dict[str, np.ndarray]
BATCHES = 8  # distinct ones; steps take them in turn


@dataclass(frozen=True)
class TrainingWork:
    """Optimizer steps of a model on batches of `rows` examples or sequences."""

    model: MLPConfig | GPTConfig | LlamaConfig
    rows: int
    optimizer: OptimizerConfig
    lora: LoraConfig = field(default_factory=LoraConfig)

    @property
    def unit(self) -> str:
        return "examples" if isinstance(self.model, MLPConfig) else "tokens"

    @property
    def units_per_step(self) -> int:
        return self.rows if isinstance(self.model, MLPConfig) else self.rows * int(self.model.context or 1)

    @property
    def title(self) -> str:
        model = self.model
        if isinstance(model, MLPConfig):
            return f"mlp: {model.layers} layers, {model.width} wide, batch {self.rows}"
        sizes = f"{model.layers} layers, {model.width} wide, {model.heads} heads, vocabulary {model.vocabulary}"
        adapters = f", adapters of rank {self.lora.rank}" if self.lora.rank else ""
        return f"{model.name}: {sizes}, {self.rows} x {model.context} tokens{adapters}"

    def smaller(self) -> TrainingWork:
        """Return work of the same ops at the same shapes in as few layers as have them all."""
        fewest = 2 if isinstance(self.model, MLPConfig) else 1
        return replace(self, model=replace(self.model, layers=min(int(self.model.layers or 1), fewest)))

    def reference_name(self, path: str) -> str:
        """Return the reference's name of the parameter that we call `path`."""
        if isinstance(self.model, MLPConfig):
            return path
        if isinstance(self.model, GPTConfig):
            return GPT_NAMING.name(path)
        original_name = NAMING.name
        if not self.lora.rank:
            return f"causal.{original_name(path)}"
        layer, adapter, matrix = path.partition(ADAPTER)
        own = original_name(f"{layer}.weight" if adapter else path).removesuffix(".weight")
        if adapter:
            own = f"{own}.lora_{matrix[0].upper()}.default"
        elif original_name(path).endswith("_proj.weight"):
            own = f"{own}.base_layer"
        return f"causal.base_model.model.{own}.weight"

    def batches(self, seed: int) -> list[Batch]:
        """Return BATCHES batches.

        Inputs and a random linear map of them: fp32 [rows, width]. Or tokens and targets: int64 [rows, context], by
        Zipf's law, so that there is something to learn and a wrong update shows in losses.
        """
        model = self.model
        if isinstance(model, MLPConfig):
            generator = generator_of(seed, "bench examples")
            root = np.float32(model.width**0.5)
            teacher = generator.standard_normal((model.width, model.width), dtype=np.float32) / root
            inputs = generator.standard_normal((BATCHES, self.rows, model.width), dtype=np.float32)
            return [{"inputs": x, "targets": x @ teacher} for x in inputs]
        generator = generator_of(seed, "bench tokens")
        vocabulary, context = int(model.vocabulary or 1), int(model.context or 1)
        shares = 1 / np.arange(1, vocabulary + 1)
        drawn = generator.choice(vocabulary, (BATCHES, self.rows, context + 1), p=shares / shares.sum())
        return [{"tokens": rows[:, :-1].copy(), "targets": rows[:, 1:].copy()} for rows in drawn]


def _transformer(model: GPTConfig | LlamaConfig, rows: int, lr: float = 1e-3, rank: int = 0) -> TrainingWork:
    """Return the work with nanoGPT's settings for a small transformer."""
    adam = AdamWConfig(lr=lr, betas=[0.9, 0.99], weight_decay=0.1, clip_norm=1.0)
    return TrainingWork(model, rows, adam, LoraConfig(rank=rank))


_NANO = GPTConfig(layers=6, heads=6, width=384, context=256, vocabulary=65, bias=False)
_SMOLLM2 = LlamaConfig(layers=30, heads=9, kv_heads=3, width=576, hidden=1536, context=256, vocabulary=49152)
NAMED: dict[str, TrainingWork] = {
    "char": _transformer(GPTConfig(layers=4, heads=4, width=128, context=64, vocabulary=65, bias=False), 12),
    "nano": _transformer(_NANO, 8),
    "nano32": _transformer(replace(_NANO, vocabulary=256, bias=True), 32),
    "gpt2": _transformer(GPTConfig(layers=12, heads=12, width=768, context=256, vocabulary=50257), 2),
    # Thirty layers take a rate of 1e-3 badly without warm-up: losses drift apart within five steps of bf16.
    "smollm2": _transformer(_SMOLLM2, 2, 1e-4),
    "smollm2-lora": _transformer(_SMOLLM2, 2, 1e-4, 8),
}


def work_of(size: str) -> TrainingWork:
    """Return the work that a value of `bench.size` stands for."""
    size = "32x64" if size == "tiny" else size
    if (shape := PERCEPTRON.fullmatch(size)) is not None:
        rows, width, layers = (int(number or 2) for number in shape.groups())
        return TrainingWork(MLPConfig(layers=layers, width=width), rows, SGDConfig(lr=0.1, momentum=0, clip_norm=None))
    if (shaped := SHAPED.fullmatch(size)) is not None:
        work = NAMED[shaped[1]]
        model: Any = work.model
        return replace(work, rows=int(shaped[2]), model=replace(model, context=int(shaped[3])))
    return NAMED[size]


@dataclass(frozen=True)
class Case:
    """One size at one precision from one seed: what a contender is built for."""

    size: str
    precision: str
    seed: int
    resident: bool = False  # one batch stays on the device for all steps
    small: bool = False  # the same ops in few layers

    @cached_property
    def work(self) -> TrainingWork:
        work = work_of(self.size)
        return work.smaller() if self.small else work

    @property
    def title(self) -> str:
        return self.work.title + (", batch on the device" if self.resident else "")

    @property
    def dtypes(self) -> PrecisionConfig:
        return PrecisionConfig(self.precision)

    @cached_property
    def model(self) -> Model:
        """Our model on symbolic tensors: the list of parameters, whoever computes."""
        work = self.work
        return build_model(Config(model=work.model, precision=self.dtypes, device=DeviceConfig(), lora=work.lora))

    @cached_property
    def batches(self) -> list[Batch]:
        """Batches that steps take in turn."""
        found = self.work.batches(self.seed)
        return found[:1] if self.resident else found

    def first_weights(self, trained: bool = False) -> Iterator[tuple[str, np.ndarray]]:
        """Yield (our parameter path, initial values fp32), one parameter in memory at a time; all, or those trained."""
        for path, parameter in self.model.parameters().items():
            if parameter.trainable or not trained:
                yield path, initial_value(parameter, self.seed)

    def flops(self) -> int:
        """Return the floating-point operations of one step, as the ops of our graph declare them."""
        return flops_per_step(StepGraph(self.model, made("optimizer", self.work.optimizer), self.work.rows))
