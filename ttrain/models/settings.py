"""Small config of each model. A model sees this and nothing else of the config tree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

from ttrain.core.errors import ConfigError
from ttrain.core.names import did_you_mean
from ttrain.core.options import option
from ttrain.models.presets import AGILLM_PRESETS, GPT_PRESETS, Preset

ACTIVATIONS = ("gelu_tanh", "gelu", "relu", "tanh")
_SIZES = ("layers", "heads", "width", "rank", "context")  # of those, the ones that a model has


@dataclass
class MLPConfig:
    """A stack of linear layers with an activation between them, trained on mean squared error."""

    name: str = option("mlp", "registered name of the model")
    inputs: int | None = option(None, "features per example; null takes width", minimum=1, changes="shape")
    outputs: int | None = option(None, "targets per example; null takes width", minimum=1, changes="shape")
    layers: int = option(2, "number of linear layers", minimum=1, changes="shape")
    width: int = option(64, "features of every hidden layer", minimum=1, changes="shape")
    activation: str = option("relu", "function between two layers", choices=ACTIVATIONS)
    bias: bool = option(True, "whether linear layers have a bias", changes="shape")


@dataclass
class TransformerConfig:
    """Sizes that every transformer has. Those left null are the preset's; `presets` holds its numbers by name."""

    presets: ClassVar[Mapping[str, Preset]] = {}

    name: str = option("", "registered name of the model")
    preset: str | None = option(None, "named size whose numbers fill every field left null", changes="nothing")
    layers: int | None = option(None, "number of transformer blocks", minimum=1, changes="shape")
    heads: int | None = option(None, "attention heads per block; must divide width", minimum=1)
    width: int | None = option(None, "features of the residual stream", minimum=1, changes="shape")
    context: int | None = option(
        None, "longest sequence in tokens; training uses sequences of exactly this length", minimum=1, changes="shape"
    )
    vocabulary: int | None = option(None, "number of token ids; null takes the tokenizer's", minimum=1, changes="shape")

    def size_names(self) -> list[str]:
        """Names of the sizes that a model needs apart from the vocabulary."""
        declared = {field.name for field in fields(self)}
        return [name for name in _SIZES if name in declared]

    def resolved(self) -> Self:
        """With the preset's numbers in every size left null; a null vocabulary stays, it is the tokenizer's."""
        numbers: dict[str, Any] = self.presets[self.preset] if self.preset is not None else {}
        missing = {name: numbers[name] for name in self.size_names() if name in numbers and getattr(self, name) is None}
        return replace(self, **missing)

    def required_sizes(self) -> tuple[int, ...]:
        """Numbers of `size_names`, then the vocabulary. Raises ConfigError for an unknown preset or impossible size."""
        if self.preset is not None and self.preset not in self.presets:
            raise ConfigError(f"model.preset={self.preset}: no such preset. {did_you_mean(self.preset, self.presets)}")
        sized = self.resolved()
        names = (*self.size_names(), "vocabulary")
        problems = [f"model.{name}: no value. Give a number." for name in names if getattr(sized, name) is None]
        if problems:
            raise ConfigError(problems)
        numbers = {name: int(getattr(sized, name)) for name in names}
        if numbers["width"] % numbers["heads"]:
            raise ConfigError(f"model.heads={sized.heads}: must divide model.width={sized.width}.")
        return tuple(numbers.values())


@dataclass
class GPTConfig(TransformerConfig):
    """A decoder-only transformer: learned positions, pre-norm blocks, causal attention."""

    presets = GPT_PRESETS

    name: str = option("gpt", "registered name of the model")
    bias: bool = option(True, "whether linear layers and layer norms have a bias", changes="shape")
    dropout: float = option(
        0.0,
        "probability of zeroing after embedding, attention weights and each branch",
        minimum=0,
        below=1,
        changes="nothing",
    )
    activation: str = option("gelu_tanh", "function inside the feed-forward branch", choices=ACTIVATIONS)
    tied: bool = option(True, "whether the output head shares the token embedding's weight")
    recompute: str = option(
        "none", "what backward computes again instead of keeping", choices=("none", "block"), changes="nothing"
    )


@dataclass
class AGILLMConfig(TransformerConfig):
    """AGILLM-3: one core under two objectives, next token (AR) and next pair of tokens (SAT)."""

    presets = AGILLM_PRESETS

    name: str = option("agillm", "registered name of the model")
    rank: int | None = option(
        None,
        "columns of the matrix through which a layer's queries and keys meet; any number",
        minimum=1,
        changes="shape",
    )
    context: int | None = option(
        1122, "longest sequence in tokens; training uses sequences of exactly this length", minimum=1, changes="shape"
    )
    objective: str = option(
        "joint",
        "joint: AR and SAT; ar_only: no SAT pass and no SAT head, half the work",
        choices=("joint", "ar_only"),
        changes="shape",
    )
    tied: bool = option(False, "whether the AR head shares the token embedding's weight, and then has no bias")
    dropout: float = option(
        0.1,
        "probability of zeroing after the attention branch's output projection",
        minimum=0,
        below=1,
        changes="nothing",
    )
    fold: str = option(
        "auto",
        "on: queries meet keys through U U^T at head width, off: both go through U at rank; the same function; auto: "
        "on where rank exceeds head width",
        choices=("auto", "on", "off"),
        changes="nothing",
    )
    alibi: str = option(
        "agillm3",
        "position bias; agillm3: the original's, which counts distance toward the future only, so nothing in the AR "
        "pass; standard: Press et al., 2022",
        choices=("agillm3", "standard"),
    )
    label_smoothing: float = option(
        0.1,
        "share of the target's probability spread evenly over the vocabulary, in both losses",
        minimum=0,
        below=1,
        changes="loss",
    )
    sat_target: str = option(
        "future_window",
        "what a window of two positions predicts; future_window: the two tokens after it; legacy: the last window "
        "predicts the tokens 1 and 2, a misalignment of early versions",
        choices=("future_window", "legacy"),
        changes="loss",
    )
    sat_stride: int = option(
        1, "positions from the start of a SAT window to that of the next", minimum=1, changes="loss"
    )
    sat_max_windows: int = option(
        0, "at most so many SAT windows of a sequence, evenly spaced; 0 takes all", minimum=0, changes="loss"
    )
    gate_weight: float = option(0.1, "factor of the gate's cross-entropy in the loss", minimum=0, changes="loss")
    recompute: str = option(
        "none", "what backward computes again instead of keeping", choices=("none", "block"), changes="nothing"
    )
    pad_vocabulary: int | None = option(
        None,
        "round the vocabulary up to a multiple of this while running; the added ids get no probability and are in no "
        "checkpoint; null: what the device pads to anyway, if it does",
        minimum=1,
        changes="nothing",
    )
