"""Small config of each model. A model sees this and nothing else of the config tree."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ttrain.core.errors import ConfigError
from ttrain.core.files import read_table
from ttrain.core.names import did_you_mean, nearest_divisor
from ttrain.core.options import option, rule
from ttrain.data.settings import RegressionConfig

Preset = dict[str, Any]  # values of a config's fields
PUBLISHED = read_table(Path(__file__).with_name("published.yaml"))  # presets, and names
_SIZES = ("layers", "heads", "width", "rank", "hidden", "context")  # of those, the ones that a model has
ACTIVATIONS = ("gelu_tanh", "gelu", "relu", "relu_squared", "tanh", "silu")


def name_of_activation(activation: str, gelu_tanh: str = "gelu_new") -> str:
    """Transformers' name of one of ours; `gelu_tanh` is that which the family has for this one."""
    return {"gelu_tanh": gelu_tanh, "relu_squared": "relu2"}.get(activation, activation)


def activation_of(name: str) -> str:
    """Our name of an activation of Transformers; one that is not known stays as it is."""
    return str(PUBLISHED["activations"].get(name, name))


@dataclass
class MLPConfig:
    """A stack of linear layers with an activation between them, trained on mean squared error."""

    name: str = option("mlp", "registered name of the model")
    inputs: int | None = option(None, "features per example; null takes width", minimum=1, changes="shape")
    outputs: int | None = option(None, "targets per example; null takes width", minimum=1, changes="shape")
    layers: int = option(2, "number of linear layers", minimum=1, maximum=10_000, changes="shape")
    width: int = option(64, "features of every hidden layer", minimum=1, changes="shape")
    activation: str = option("relu", "function between two layers", choices=ACTIVATIONS)
    bias: bool = option(True, "give linear layers a bias", changes="shape")

    @rule
    def _data_fits(self, others: Any) -> Iterator[str]:
        if not isinstance(others.data, RegressionConfig):
            yield f"data={others.data.name}: model=mlp trains on numbers, not on tokens. Give data=regression."


@dataclass
class TransformerConfig:
    """Sizes that every transformer has. What is left null takes the preset's value, or else that of `defaults`.

    `presets` holds the values of each preset by its name; `filled` names the fields that took one. A null vocabulary
    stays, it is the tokenizer's.
    """

    presets: ClassVar[Mapping[str, Preset]] = {}
    defaults: ClassVar[Preset] = {}

    name: str = option("", "registered name of the model")
    preset: str | None = option(None, "named size that fills every null field", changes="nothing")
    from_: str | None = option(
        None,
        "folder or hub name of Transformers, or GGUF file: gives architecture, sizes, tokenizer and initial values",
        path=True,
        changes="nothing",
    )
    layers: int | None = option(None, "number of transformer blocks", minimum=1, maximum=1_000, changes="shape")
    heads: int | None = option(None, "attention heads per block; must divide width", minimum=1)
    width: int | None = option(None, "features of the residual stream", minimum=1, changes="shape")
    context: int | None = option(None, "longest sequence, and length of training sequences", minimum=1, changes="shape")
    vocabulary: int | None = option(None, "number of token ids; null takes the tokenizer's", minimum=1, changes="shape")
    recompute: str = option("none", "parts that backward computes again", choices=("none", "block"), changes="nothing")

    @property
    def longest(self) -> int:
        """Tokens that an export states as the longest sequence."""
        return max(self.context or 0, getattr(self, "max_context", None) or 0)

    def size_names(self) -> list[str]:
        """Names of the sizes that a model needs apart from the vocabulary."""
        return [name for name in _SIZES if hasattr(self, name)]

    def __post_init__(self) -> None:
        self.filled: set[str] = set()
        self.preset = self.preset_called(self.preset)
        self._fill({**self.defaults, **self.presets.get(self.preset or "", {})})  # checks tell an unknown preset

    @classmethod
    def preset_called(cls, given: str | None) -> str | None:
        """Return the name of a preset as it is written here; capital and small letters are alike in what is given."""
        return next((name for name in cls.presets if name.lower() == str(given).lower()), given)

    def _fill(self, values: Preset) -> None:
        for name in (name for name in values if getattr(self, name) is None):
            setattr(self, name, values[name])
            self.filled.add(name)

    @rule
    def _has_sizes(self, others: Any) -> Iterator[str]:
        if self.preset is not None and self.preset not in self.presets:
            yield f"model.preset={self.preset}: no such preset. {did_you_mean(self.preset, self.presets)}"
            return
        missing = [f"model.{name}" for name in self.size_names() if getattr(self, name) is None]
        if missing:
            yield f"{', '.join(missing)}: no value. Give one, or take a model.preset: {', '.join(self.presets)}."
        yield from self.head_problems()

    @rule
    def _reads_tokens(self, others: Any) -> Iterator[str]:
        if isinstance(others.data, RegressionConfig):
            yield "data=regression: a language model trains on tokens. Give data=stdlib, text, tokens or documents."

    def head_problems(self) -> Iterator[str]:
        """Problems of the heads; those of a given width need not be as wide as the stream together."""
        given = getattr(self, "head_width", None) is not None
        if not given and self.width is not None and self.heads is not None and self.width % self.heads:
            hint = nearest_divisor(self.width, self.heads)
            yield f"model.heads={self.heads}: must divide model.width={self.width}. {hint}"

    def required_sizes(self) -> tuple[int, ...]:
        """Numbers of `size_names`, then the vocabulary. Raises ConfigError for an unknown preset or impossible size."""
        problems = [*self._has_sizes(None), *(["model.vocabulary: no value."] if self.vocabulary is None else [])]
        if problems:
            raise ConfigError(problems)
        return tuple(int(getattr(self, name)) for name in (*self.size_names(), "vocabulary"))


@dataclass
class DecoderConfig(TransformerConfig):
    """Switches that the decoders of GPT and Llama have in common. All are off unless they are given."""

    qk_norm: bool | None = option(
        None, "RMS norm of each query and key head, before rotation; null is the preset's, else false", changes="shape"
    )
    zero_init: bool = option(False, "start the output projections of both branches at zero", changes="nothing")
    logit_cap: float | None = option(None, "replace logits by cap tanh(logits / cap); null does not", above=0)
    value_embeddings: bool = option(False, "add a token embedding to all values, scaled per feature", changes="shape")
    future_weight: float = option(
        0.0,
        "weight of a second loss: an extra layer predicts the token after the next (Gloeckle et al., 2024); 0 is off",
        minimum=0,
        changes="loss",
    )
    parametrization: str = option(
        "standard", "mup: base_width's best rate holds for any width (Yang et al., 2022)", choices=("standard", "mup")
    )
    base_width: int | None = option(None, "mup: width at which mup changes nothing", minimum=1)
    base_head_width: int | None = option(None, "mup: head width at base_width; null is base_width / heads", minimum=1)

    @property
    def width_ratio(self) -> float:
        """The width relative to the base; 1 without mup."""
        if self.parametrization != "mup" or not self.width or not self.base_width:
            return 1.0
        return self.width / self.base_width

    def attention_scale(self, head_width: int) -> float | None:
        """Factor of the scores; None: 1 / sqrt(head width). With mup sqrt(head width of the base) / head width."""
        if self.parametrization != "mup":
            return None
        together = head_width * (self.heads or 1) == self.width  # heads that are as wide as the stream grow with it
        base = self.base_head_width or (head_width / self.width_ratio if together else head_width)
        return math.sqrt(base) / head_width

    def head_problems(self) -> Iterator[str]:
        """Problems of the heads, and of the width that learning rates were tuned at."""
        yield from super().head_problems()
        if (self.parametrization == "mup") != (self.base_width is not None):
            yield (
                f"model.parametrization={self.parametrization}, model.base_width={self.base_width}: mup needs the "
                "width that learning rates were tuned at. Give both, or none."
            )

    def switched_on(self) -> list[str]:
        """Keys of the switches that change what weights compute, which no form of another library holds."""
        names = {"value_embeddings": False, "future_weight": 0.0, "parametrization": "standard"} | (
            {"qk_norm": None, "logit_cap": None} if self.name == "gpt" else {"shared_experts": 0, "router": "softmax"}
        )
        return [f"model.{key}={getattr(self, key)}" for key, off in names.items() if (getattr(self, key) or off) != off]


@dataclass
class GPTConfig(DecoderConfig):
    """A decoder-only transformer: learned positions, pre-norm blocks, causal attention."""

    presets = PUBLISHED["presets"]["gpt"]

    name: str = option("gpt", "registered name of the model")
    bias: bool = option(True, "give linear layers and layer norms a bias", changes="shape")
    dropout: float = option(0.0, "dropout of embedding, attention and branches", minimum=0, below=1, changes="nothing")
    activation: str = option("gelu_tanh", "function inside the feed-forward branch", choices=ACTIVATIONS)
    tied: bool = option(True, "share the token embedding's weight with the output head")


@dataclass
class LlamaConfig(DecoderConfig):
    """The decoder of Llama, Mistral, Qwen2, Qwen3, SmolLM2 and others: rotary positions, RMS norms, a gated branch.

    Heads of keys and values may be fewer than those of queries, and any width. With `experts` it is Qwen3-MoE's.
    """

    presets = PUBLISHED["presets"]["llama"]
    defaults = {
        "tied": True, "norm_eps": 1e-5, "qkv_bias": False, "qk_norm": False, "rotary_base": 1e4,
        "rotary_scaling": "none",
    }  # fmt: skip

    name: str = option("llama", "registered name of the model")
    context: int | None = option(None, "longest sequence, and length of training sequences", minimum=1, changes="loss")
    max_context: int | None = option(
        None, "longest sequence that an export states, over context; null is model.from's", minimum=1, changes="nothing"
    )
    heads: int | None = option(None, "attention heads per block; must divide width without head_width", minimum=1)
    hidden: int | None = option(None, "features inside the feed-forward branch", minimum=1, changes="shape")
    kv_heads: int | None = option(
        None,
        "heads of keys and values (Ainslie et al., 2023); null takes the preset's if heads is null too, else heads",
        minimum=1,
        changes="shape",
    )
    head_width: int | None = option(
        None,
        "features of a head; null takes the preset's if heads and width are null too, else width / heads",
        minimum=1,
        changes="shape",
    )
    activation: str = option("silu", "gate of the feed-forward; silu is SwiGLU, gelu is GeGLU", choices=ACTIVATIONS)
    tied: bool | None = option(None, "share the embedding's weight with the head; null takes the preset's, else true")
    qkv_bias: bool | None = option(
        None, "give queries, keys and values a bias; null takes the preset's, else false", changes="shape"
    )
    projection_bias: bool = option(False, "give the attention's output projection a bias", changes="shape")
    feed_forward_bias: bool = option(False, "give the layers of the feed-forward branch a bias", changes="shape")
    norm_eps: float | None = option(None, "added to mean squares in norms; null is the preset's, else 1e-5", minimum=0)
    window: int | None = option(None, "tokens that a token sees, with itself; null is all earlier tokens", minimum=1)
    rotary_base: float | None = option(None, "base of rotary wavelengths; null takes the preset's, else 10000", above=0)
    rotary_share: float = option(1.0, "share of each head's first features that is rotated", above=0, maximum=1)
    rotary_scaling: str | None = option(
        None,
        "stretching of rotary wavelengths by rotary_factor: of all (linear), or of long ones (llama3); null takes "
        "the preset's, else none",
        choices=("none", "linear", "llama3"),
    )
    rotary_factor: float = option(32.0, "factor of rotary_scaling", minimum=1)
    rotary_low: float = option(1.0, "llama3: wavelengths above rotary_context / rotary_low are stretched", above=0)
    rotary_high: float = option(
        4.0, "llama3: wavelengths below rotary_context / rotary_high are not stretched, those between partly", above=0
    )
    rotary_context: int = option(8192, "llama3: context in tokens that the model was first trained on", minimum=1)
    dropout: float = option(0.0, "dropout of attention weights", minimum=0, below=1, changes="nothing")
    experts: int | None = option(
        None, "experts of a feed-forward branch; null takes the preset's, else none, as 0", minimum=0, changes="shape"
    )
    experts_per_token: int | None = option(None, "experts that each token is sent to; null is the preset's", minimum=1)
    expert_width: int | None = option(None, "features of an expert; null is the preset's", minimum=1, changes="shape")
    expert_step: int = option(1, "the last of every so many layers has experts", minimum=1, changes="shape")
    shared_experts: int = option(0, "experts for every token besides, unweighted", minimum=0, changes="shape")
    router: str = option(
        "softmax",
        "scores of experts; biased is sigmoid with a trained bias for the choice alone (Wang et al., 2024)",
        choices=("softmax", "sigmoid", "biased"),
    )
    router_normalised: bool | None = option(
        None, "divide a token's weights by their sum; null is the preset's, else true"
    )
    balance_weight: float = option(
        0.01, "weight of the load balance loss (Fedus et al., 2022)", minimum=0, changes="loss"
    )
    router_z_weight: float = option(0.0, "weight of the router z loss (Zoph et al., 2022)", minimum=0, changes="loss")

    @property
    def balances(self) -> bool:
        """True if the loads of experts count for the loss."""
        return bool(self.experts and self.balance_weight)

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer, counted from 0, has experts in the place of its feed-forward branch."""
        return bool(self.experts) and (layer + 1) % self.expert_step == 0

    @rule
    def _routes(self, others: Any) -> Iterator[str]:
        yield from self.expert_problems()
        if self.experts and others.objective.name != "next_token" and (self.balance_weight or self.router_z_weight):
            told = f"objective={others.objective.name} does not add what balances experts to its loss"
            yield f"model.experts={self.experts}: {told}. Give model.balance_weight=0 and model.router_z_weight=0."

    def expert_problems(self) -> Iterator[str]:
        """Problems of a mixture of experts by itself."""
        needed = "experts_per_token", "expert_width"
        if not self.experts:
            spare = [f"model.{key}={getattr(self, key)}" for key in (*needed, "shared_experts") if getattr(self, key)]
            if spare:
                yield f"{', '.join(spare)}: the model has no experts. Give model.experts, or leave it out."
            return
        missing = [f"model.{key}" for key in needed if getattr(self, key) is None]
        if missing:
            yield f"{', '.join(missing)}: no value for model.experts={self.experts}. Give it, or take a model.preset."
        elif (self.experts_per_token or 0) > self.experts:
            told = f"must be at most model.experts={self.experts}"
            yield f"model.experts_per_token={self.experts_per_token}: {told}. Give fewer."
        if self.layers and self.expert_step > self.layers:
            yield f"model.expert_step={self.expert_step}: none of model.layers={self.layers} has experts. Give less."
        if self.feed_forward_bias:
            yield "model.feed_forward_bias=true: experts have no biases. Leave it out."
        if self.parametrization == "mup":
            yield f"model.parametrization=mup: not known for model.experts={self.experts}. Give standard."

    def __post_init__(self) -> None:
        """Take as many heads of keys as of queries, together as wide as the stream, where nothing is said.

        What a preset says of heads goes with its own heads and width.
        """
        of_preset = {"kv_heads": self.heads is None, "head_width": self.heads is self.width is None}
        super().__post_init__()
        for name in (name for name, holds in of_preset.items() if name in self.filled and not holds):
            setattr(self, name, None)
        width, heads = self.width or 0, self.heads or 1
        each = width // heads if width and width % heads == 0 else None
        self._fill({"kv_heads": self.heads, "head_width": each, "router_normalised": bool(self.experts) or None})

    def required_sizes(self) -> tuple[int, ...]:
        if problems := [*self.expert_problems()]:
            raise ConfigError(problems)
        return super().required_sizes()

    def head_problems(self) -> Iterator[str]:
        yield from super().head_problems()
        if self.heads is not None and self.kv_heads is not None and self.heads % self.kv_heads:
            hint = nearest_divisor(self.heads, self.kv_heads)
            yield f"model.kv_heads={self.kv_heads}: must divide model.heads={self.heads}. {hint}"


@dataclass
class AGILLMConfig(TransformerConfig):
    """AGILLM-3: one core under two objectives, next token (AR) and next pair of tokens (SAT)."""

    presets = PUBLISHED["presets"]["agillm"]

    name: str = option("agillm", "registered name of the model")
    rank: int | None = option(None, "columns of each rank matrix; any number", minimum=1, changes="shape")
    context: int | None = option(1122, "longest sequence, and length of training sequences", minimum=1, changes="shape")
    objective: str = option(
        "joint", "joint trains both heads, ar_only AR at half the work", choices=("joint", "ar_only"), changes="shape"
    )
    tied: bool = option(False, "share the token embedding's weight with the AR head, which then has no bias")
    dropout: float = option(0.1, "dropout after the attention's projection", minimum=0, below=1, changes="nothing")
    fold: str = option(
        "auto",
        "on multiplies queries by U U^T, off queries and keys by U, with the same results; auto is on if rank "
        "exceeds head width",
        choices=("auto", "on", "off"),
        changes="nothing",
    )
    alibi: str = option(
        "agillm3",
        "position bias; agillm3, the original's, counts the distance to later tokens only; standard both ways "
        "(Press et al., 2022)",
        choices=("agillm3", "standard"),
    )
    label_smoothing: float = option(
        0.1, "share of a target that is spread over the vocabulary, in both losses", minimum=0, below=1, changes="loss"
    )
    sat_target: str = option(
        "future_window",
        "targets of a window of two positions: the next two tokens; with legacy the last window gets tokens 1 and 2",
        choices=("future_window", "legacy"),
        changes="loss",
    )
    sat_stride: int = option(1, "positions between the starts of two SAT windows", minimum=1, changes="loss")
    sat_max_windows: int = option(0, "most SAT windows of a sequence, evenly spaced; 0: all", minimum=0, changes="loss")
    gate_weight: float = option(0.1, "factor of the gate's cross-entropy in the loss", minimum=0, changes="loss")
    pad_vocabulary: int | None = option(
        None,
        "multiple to which the vocabulary is rounded up while running; added ids have no probability; null takes "
        "the device's padding",
        minimum=1,
        changes="nothing",
    )
