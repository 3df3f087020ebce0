"""Small config of each optimizer and learning-rate schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from ttrain.core.options import option, rule

FP32_NORMAL = 1.2e-38  # smaller numbers lose digits in fp32, and become 0


def needs_fp32(key: str, precision: str) -> Iterator[str]:
    """Yield the problem of an average of the weights that `key` asks for, where those are not fp32."""
    if precision == "bf16_true":
        yield f"{key}: an average needs weights in fp32, and precision=bf16_true has none. Give precision=bf16."


@dataclass
class OptimizerConfig:
    """Settings that every optimizer has.

    `width_powers` are the exponents of the width ratio in the learning rates under muP, of hidden matrices and of all
    else. A step that does not grow with the gradient is summed over the inputs of a hidden matrix.
    """

    width_powers: ClassVar[tuple[float, float]] = (-1.0, 0.0)

    name: str = option("adamw", "registered name of the optimizer")
    lr: float = option(1e-3, "peak learning rate", minimum=0)
    weight_decay: float = option(0.0, "weight decay per unit of learning rate; see decay_rule", minimum=0)
    decay_rule: str = option("matrices", "what decays: rank 2 and up, all or none", choices=("matrices", "all", "none"))
    clip_norm: float | None = option(1.0, "largest global gradient norm; null does not clip", minimum=FP32_NORMAL)
    clip_scope: list[str] = option([], "parameter-name prefixes that clip_norm applies to, such as [blocks]; [] is all")
    lr_multipliers: dict[str, float] = option(
        {}, "learning-rate factor per parameter-name prefix, such as {head: 0.5}; the longest prefix wins", minimum=0
    )
    freeze: list[str] = option([], "parameter-name prefixes that are not trained; * is one part of a name")
    unfreeze: list[str] = option([], "prefixes within freeze that are trained; the longest wins")
    state_dtype: str | None = option(
        None, "dtype of the state; bf16 rounds stochastically; null takes that of the weights", choices=("fp32", "bf16")
    )
    stochastic_rounding: bool = option(False, "bf16_true: round weights and optimizer state stochastically")

    @rule
    def _two_betas(self, others: Any) -> Iterator[str]:
        betas = getattr(self, "betas", [0, 0])
        if len(betas) != 2:
            yield f"optimizer.betas={betas}: must hold two numbers, got {len(betas)}."

    @rule
    def _rounding(self, others: Any) -> Iterator[str]:
        precision = others.precision.name
        if self.stochastic_rounding and precision != "bf16_true":
            yield (
                f"optimizer.stochastic_rounding=true: precision={precision} keeps fp32 weights, so there is nothing to "
                "round. Give precision=bf16_true, or optimizer.state_dtype=bf16 for moments alone."
            )

    @rule
    def _adapters_under_mup(self, others: Any) -> Iterator[str]:
        mup = getattr(others.model, "parametrization", "standard") == "mup"
        if others.lora.rank and mup and isinstance(self, SGDConfig | MuonConfig):
            told = f"optimizer={self.name}: has no rule for the rates of adapters under model.parametrization=mup"
            yield f"{told}. Give optimizer=adamw, or model.parametrization=standard."


@dataclass
class SGDConfig(OptimizerConfig):
    """Stochastic gradient descent (torch.optim.SGD's formula; weight decay is added to the gradient)."""

    # A step in proportion to the gradient is as much smaller outside the hidden matrices.
    width_powers = (0.0, 1.0)

    name: str = option("sgd", "registered name of the optimizer")
    lr: float = option(0.1, "peak learning rate", minimum=0)
    momentum: float = option(0.0, "decay of the momentum", minimum=0, below=1)
    nesterov: bool = option(False, "use Nesterov momentum; needs momentum above 0")

    @rule
    def _nesterov_needs_momentum(self, others: Any) -> Iterator[str]:
        if self.nesterov and self.momentum == 0:
            yield "optimizer.nesterov=true: needs momentum. Give optimizer.momentum=0.9 or optimizer.nesterov=false."


@dataclass
class AdamWConfig(OptimizerConfig):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019)."""

    name: str = option("adamw", "registered name of the optimizer")
    betas: list[float] = option([0.9, 0.95], "decay of the first and second moment", minimum=0, below=1)
    eps: float = option(1e-8, "added to the root of the second moment", minimum=FP32_NORMAL)
    weight_decay: float = option(0.1, "weight decay per unit of learning rate; see decay_rule", minimum=0)
    cautious: bool = option(False, "decay only elements that the update moves towards zero (Chen et al., 2025)")


@dataclass
class LionConfig(OptimizerConfig):
    """Lion (Chen et al., 2023): the sign of a momentum. Its lr is 3 to 10 times smaller than AdamW's, decay larger."""

    name: str = option("lion", "registered name of the optimizer")
    lr: float = option(1e-4, "peak learning rate", minimum=0)
    betas: list[float] = option([0.9, 0.99], "momentum's share in the direction, and its decay", minimum=0, below=1)
    weight_decay: float = option(1.0, "weight decay per unit of learning rate; see decay_rule", minimum=0)


@dataclass
class MuonConfig(OptimizerConfig):
    """Muon (Jordan et al., 2024) for hidden matrices; AdamW for embeddings, heads, norms and biases."""

    name: str = option("muon", "registered name of the optimizer")
    lr: float = option(2e-3, "peak learning rate of hidden matrices", minimum=0)
    adamw_lr: float | None = option(None, "peak learning rate of AdamW's parameters; null takes lr", minimum=0)
    weight_decay: float = option(0.1, "weight decay per unit of learning rate; see decay_rule", minimum=0)
    momentum: float = option(0.95, "decay of the momentum of hidden matrices", minimum=0, below=1)
    nesterov: bool = option(True, "use Nesterov momentum")
    iterations: int = option(5, "Newton-Schulz iterations that orthogonalize a momentum", minimum=1, maximum=100)
    scale: str = option(
        "rms",
        "size of an update; rms is that of AdamW (Liu et al., 2025); spectral is sqrt(max(1, outputs / inputs)), for "
        "an lr near 0.02",
        choices=("rms", "spectral"),
    )
    betas: list[float] = option([0.9, 0.95], "AdamW's: decay of the first and second moment", minimum=0, below=1)
    eps: float = option(1e-8, "AdamW's: added to the root of the second moment", minimum=FP32_NORMAL)

    @property
    def width_powers(self) -> tuple[float, float]:  # type: ignore[override]
        """An orthogonal step changes what it reads by as much at every width; one of equal elements by its root."""
        return (0.0 if self.scale == "spectral" and self.name == "muon" else -0.5), 0.0


@dataclass
class NorMuonConfig(MuonConfig):
    """NorMuon (Li et al., 2025): Muon whose rows are scaled to equal size; its scale is always rms."""

    name: str = option("normuon", "registered name of the optimizer")
    scale: str = option("rms", "size of an update; rms is that of AdamW", choices=("rms",))
    beta2: float = option(0.95, "decay of the mean square of an update's row", minimum=0, below=1)


@dataclass
class AdafactorConfig(OptimizerConfig):
    """Adafactor (Shazeer and Stern, 2018): second moments as means of rows and columns, no first moment."""

    width_powers = (-0.5, 0.0)  # steps are relative to a parameter's size, which falls with the root of the width

    name: str = option("adafactor", "registered name of the optimizer")
    lr: float = option(1e-2, "peak step, relative to a parameter's root mean square", minimum=0)
    beta2_decay: float = option(-0.8, "exponent; the newest squares have weight step^beta2_decay in the mean", below=0)
    eps: float = option(1e-15, "smallest root of a second moment", minimum=1e-18)
    least_rms: float = option(1e-3, "smallest root mean square assumed for a parameter", minimum=FP32_NORMAL)
    threshold: float = option(1.0, "root mean square of an update above which it is scaled down", minimum=FP32_NORMAL)

    @rule
    def _state_is_fp32(self, others: Any) -> Iterator[str]:
        if self.state_dtype == "bf16":
            yield (
                "optimizer.state_dtype=bf16: adafactor keeps a number a row and column, in fp32: they change too "
                "little in a step for bf16. Leave it out."
            )


@dataclass
class ScheduleFreeConfig(OptimizerConfig):
    """Schedule-free AdamW (Defazio et al., 2024), for schedule=constant: evaluations read an average of the weights."""

    name: str = option("schedule_free", "registered name of the optimizer")
    lr: float = option(2.5e-3, "learning rate, which does not fall", minimum=0)
    betas: list[float] = option(
        [0.9, 0.999], "share of the average where gradients are taken; decay of the second moment", above=0, below=1
    )
    eps: float = option(1e-8, "added to the root of the second moment", minimum=FP32_NORMAL)
    weight_decay: float = option(0.1, "weight decay per unit of learning rate; see decay_rule", minimum=0)
    average_after: int = option(0, "steps that the average leaves out, such as schedule.warmup", minimum=0)

    @rule
    def _average(self, others: Any) -> Iterator[str]:
        train = others.train
        if train.ema is not None:
            yield f"train.ema={train.ema}: optimizer=schedule_free keeps an average of its own. Give train.ema=null."
        elif self.average_after >= (train.steps or float("inf")):
            yield (
                f"optimizer.average_after={self.average_after}: must be below train.steps={train.steps}, or the "
                "average has no step to take in."
            )
        else:
            yield from needs_fp32("optimizer=schedule_free", others.precision.name)


@dataclass
class ScheduleConfig:
    """Learning rate over steps as a factor of optimizer.lr: warm-up from 0, then the named shape."""

    name: str = option("cosine", "registered name of the shape: constant, linear, cosine or wsd")
    warmup: int = option(0, "steps of linear warm-up", minimum=0)
    steps: int | None = option(None, "step at which the final factor is reached; null takes train.steps", minimum=1)
    min_lr_ratio: float = option(0.1, "share of the peak at the end; unused by constant", minimum=0, maximum=1)
    decay: float = option(0.2, "wsd: share of the steps at the end that decays", minimum=0, maximum=1)
    decay_from: int | None = option(None, "wsd: last peak step, not with decay; 0 is the checkpoint's step", minimum=0)

    @rule
    def _within_the_run(self, others: Any) -> Iterator[str]:
        length = others.train.steps or float("inf")  # not known before it is measured
        end, key = (length, "train.steps") if self.steps is None else (self.steps, "schedule.steps")
        given = f"schedule.decay_from={self.decay_from}"
        if self.warmup > end:
            yield f"schedule.warmup={self.warmup}: must be at most {key}={end}."
        elif self.decay_from is not None and self.name != "wsd":
            yield f"{given}: is for schedule=wsd, not {self.name}. Give schedule=wsd."
        elif self.decay_from is not None and self.decay_from >= end:
            yield f"{given}: must be below {key}={end}, where the decay ends."
        elif self.decay_from and self.decay_from < self.warmup:
            yield f"{given}: must be at least schedule.warmup={self.warmup}."
        elif self.decay_from is None and self.name == "wsd" and self.warmup + self.decay * end > end:
            yield (
                f"schedule.decay={self.decay}: warm-up ({self.warmup} steps) and decay ({self.decay * end:g} steps) "
                f"together are longer than {key}={end}."
            )
