"""The work that all contenders of a benchmark do: sizes, batches, first weights, optimizer. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ttrain.core.spec import DType
from ttrain.models.settings import GPTConfig, LlamaConfig, MLPConfig
from ttrain.nn.initialize import generator_of, initial_value
from ttrain.nn.module import ADAPTER
from ttrain.nn.precision import PrecisionConfig
from ttrain.nn.settings import LoraConfig
from ttrain.optim.settings import AdamWConfig, OptimizerConfig, SGDConfig

if TYPE_CHECKING:
    from torch import nn

    from ttrain.models.base import Model

Batch = dict[str, np.ndarray]
BATCHES = 8  # distinct ones; steps take them in turn
PRODUCT = "product"  # stands for a parameter's path where the work is one matrix product


@dataclass(frozen=True)
class GPTWork:
    """Next-token prediction by GPT-2's architecture: tokens and targets int64 [rows, context]."""

    layers: int
    heads: int
    width: int
    context: int
    rows: int
    vocabulary: int
    bias: bool
    kind: str = "gpt"
    lr: float = 1e-3

    item = "token"
    item_plural = "tokens"

    @property
    def title(self) -> str:
        sizes = f"{self.layers} layers, {self.width} wide, {self.heads} heads, vocabulary {self.vocabulary}"
        return f"{self.kind}: {sizes}, {self.rows} x {self.context} tokens"

    @property
    def items_per_step(self) -> int:
        return self.rows * self.context

    @property
    def optimizer(self) -> OptimizerConfig:
        """nanoGPT's settings for a small transformer."""
        return AdamWConfig(lr=self.lr, betas=[0.9, 0.99], weight_decay=0.1, clip_norm=1.0)

    def smaller(self) -> GPTWork:
        """The same ops at the same shapes in one layer."""
        return replace(self, layers=1)

    def model(self, compute: DType) -> Model:
        """Ours."""
        from ttrain.models.gpt import GPT

        sizes = {name: getattr(self, name) for name in ("layers", "heads", "width", "context", "vocabulary", "bias")}
        return GPT(GPTConfig(**sizes), compute)

    def reference(self) -> nn.Module:
        """The same in plain PyTorch."""
        from ttrain.bench.reference import PlainGPT

        return PlainGPT(self.layers, self.heads, self.width, self.context, self.vocabulary, self.bias)

    def reference_name(self, path: str) -> str:
        """Our parameter path -> the reference's parameter."""
        from ttrain.models.gpt_weights import original_name

        return original_name(path)

    def batches(self, seed: int) -> list[Batch]:
        """Tokens by Zipf's law, so that there is something to learn and a wrong update shows in the losses."""
        generator = generator_of(seed, "bench tokens")
        shares = 1 / np.arange(1, self.vocabulary + 1)
        drawn = generator.choice(self.vocabulary, (BATCHES, self.rows, self.context + 1), p=shares / shares.sum())
        return [{"tokens": rows[:, :-1].copy(), "targets": rows[:, 1:].copy()} for rows in drawn]


@dataclass(frozen=True)
class LlamaWork(GPTWork):
    """The same by Llama's architecture, beside that of Transformers; with a `rank`, by adapters beside those of PEFT.

    Thirty layers take a rate of 1e-3 badly without warm-up: losses drift apart within five steps of bf16.
    """

    kind: str = "llama"
    kv_heads: int = 1
    hidden: int = 1
    rank: int = 0  # of the adapters; 0 trains the model itself

    @property
    def title(self) -> str:
        return super().title + (f", adapters of rank {self.rank}" if self.rank else "")

    @property
    def adapters(self) -> LoraConfig:
        return LoraConfig(rank=self.rank)

    def _sizes(self) -> dict[str, Any]:
        names = ("layers", "heads", "kv_heads", "width", "hidden", "context", "vocabulary")
        return {name: getattr(self, name) for name in names}

    def model(self, compute: DType) -> Model:
        from ttrain.models.llama import Llama
        from ttrain.nn.lora import attach

        model = Llama(LlamaConfig(**self._sizes()), compute)
        if self.rank:
            attach(model, self.adapters)
        return model

    def reference(self) -> nn.Module:
        from ttrain.bench.reference import TransformersLlama
        from ttrain.models.llama_weights import config_to_transformers

        config = config_to_transformers(LlamaConfig(**self._sizes()))
        return TransformersLlama(config, self.rank, self.adapters.alpha)

    def reference_name(self, path: str) -> str:
        from ttrain.models.llama_weights import original_name

        if not self.rank:
            return f"causal.{original_name(path)}"
        layer, adapter, matrix = path.partition(ADAPTER)
        own = original_name(f"{layer}.weight" if adapter else path).removesuffix(".weight")
        if adapter:
            own = f"{own}.lora_{matrix[0].upper()}.default"
        elif original_name(path).endswith("_proj.weight"):
            own = f"{own}.base_layer"
        return f"causal.base_model.model.{own}.weight"


@dataclass(frozen=True)
class MLPWork:
    """Regression on mean squared error: inputs and targets fp32 [rows, width], linear layers with a ReLU between."""

    layers: int
    width: int
    rows: int
    kind: str = "mlp"

    item = "example"
    item_plural = "examples"

    @property
    def title(self) -> str:
        return f"mlp: {self.layers} layers, {self.width} wide, batch {self.rows}"

    @property
    def items_per_step(self) -> int:
        return self.rows

    @property
    def optimizer(self) -> OptimizerConfig:
        return SGDConfig(lr=0.1, momentum=0.0, clip_norm=None)

    def smaller(self) -> MLPWork:
        """The same ops at the same shapes in two layers."""
        return replace(self, layers=min(self.layers, 2))

    def model(self, compute: DType) -> Model:
        """Ours."""
        from ttrain.models.mlp import MLP

        return MLP(MLPConfig(layers=self.layers, width=self.width), compute)

    def reference(self) -> nn.Module:
        """The same in plain PyTorch."""
        from ttrain.bench.reference import PlainMLP

        return PlainMLP(self.layers, self.width)

    def reference_name(self, path: str) -> str:
        """Our parameter path -> the reference's parameter: both call the list of linear layers `layers`."""
        return path

    def batches(self, seed: int) -> list[Batch]:
        """Normal inputs and a random linear map of them."""
        generator = generator_of(seed, "bench examples")
        teacher = generator.standard_normal((self.width, self.width), dtype=np.float32) / np.float32(self.width**0.5)
        inputs = generator.standard_normal((BATCHES, self.rows, self.width), dtype=np.float32)
        return [{"inputs": x, "targets": x @ teacher} for x in inputs]


@dataclass(frozen=True)
class ProductWork:
    """One square matrix product [size, size] x [size, size]; nothing is trained."""

    size: int
    kind: str = "product"

    item = "product"
    item_plural = "products"
    items_per_step = 1

    @property
    def title(self) -> str:
        return f"matrix product of {self.size}"

    @property
    def flops(self) -> int:
        """A multiply-add counts two."""
        return 2 * self.size**3

    def factors(self, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Both matrices, fp32."""
        generator = generator_of(seed, "bench product")
        a, b = (generator.standard_normal((self.size, self.size), dtype=np.float32) for _ in range(2))
        return a, b


TrainingWork = GPTWork | MLPWork
Work = TrainingWork | ProductWork
KINDS: dict[str, Callable[..., Work]] = {"gpt": GPTWork, "llama": LlamaWork, "mlp": MLPWork, "product": ProductWork}

_SMOLLM2 = LlamaWork(30, 9, 576, context=256, rows=2, vocabulary=49152, bias=False, kv_heads=3, hidden=1536, lr=1e-4)
GPT_WORK = {
    "char": GPTWork(layers=4, heads=4, width=128, context=64, rows=12, vocabulary=65, bias=False),
    "nano": GPTWork(layers=6, heads=6, width=384, context=256, rows=8, vocabulary=65, bias=False),
    "nano32": GPTWork(layers=6, heads=6, width=384, context=256, rows=32, vocabulary=256, bias=True),
    "gpt2": GPTWork(layers=12, heads=12, width=768, context=256, rows=2, vocabulary=50257, bias=True),
    "smollm2": _SMOLLM2,
    "smollm2-lora": replace(_SMOLLM2, rank=8),
}
MLP_WORK = {
    "tiny": MLPWork(layers=2, width=64, rows=32),
    "256": MLPWork(layers=2, width=256, rows=256),
    "1024x512": MLPWork(layers=2, width=512, rows=1024),
}


def work_of(values: dict[str, Any]) -> Work:
    """The work whose `asdict` these values are."""
    return KINDS[values["kind"]](**values)


@dataclass(frozen=True)
class Case:
    """One work at one precision from one seed: what a contender is built for."""

    work: Work
    precision: str
    seed: int
    resident: bool = False  # whether one batch stays on the device for all steps

    @property
    def title(self) -> str:
        """Of the work, with what is unusual about how it is done."""
        return self.work.title + (", batch on the device" if self.resident else "")

    @property
    def dtypes(self) -> PrecisionConfig:
        """What computes in which dtype, as in training."""
        return PrecisionConfig(self.precision)

    @property
    def training(self) -> TrainingWork:
        """The work, where it is that of training."""
        assert not isinstance(self.work, ProductWork)
        return self.work

    @cached_property
    def model(self) -> Model:
        """Ours, on symbolic tensors: the list of parameters, whoever computes."""
        model = self.training.model(self.dtypes.compute)
        self.dtypes.set_masters(model.parameters().values())
        return model

    @cached_property
    def batches(self) -> list[Batch]:
        """What steps take in turn."""
        found = self.training.batches(self.seed)
        return found[:1] if self.resident else found

    def first_weights(self) -> Iterator[tuple[str, np.ndarray]]:
        """(our parameter path, first values fp32), one parameter in memory at a time."""
        if isinstance(self.work, ProductWork):
            yield PRODUCT, np.zeros((self.work.size, self.work.size), np.float32)
            return
        for path, parameter in self.model.parameters().items():
            yield path, initial_value(parameter, self.seed)

    def trains(self, path: str) -> bool:
        """Whether steps change the parameter."""
        return isinstance(self.work, ProductWork) or self.model.parameters()[path].trainable

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "work": asdict(self.work)}

    @staticmethod
    def of(values: dict[str, Any]) -> Case:
        return Case(**{**values, "work": work_of(values["work"])})
