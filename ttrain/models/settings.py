"""Small config of each model. A model sees this and nothing else of the config tree."""

from __future__ import annotations

from dataclasses import dataclass

from ttrain.core.options import option

ACTIVATIONS = ("gelu_tanh", "gelu", "relu", "tanh")


@dataclass
class MLPConfig:
    """A stack of linear layers with an activation between them, trained on mean squared error."""

    name: str = option("mlp", "registered name of the model")
    inputs: int | None = option(None, "features per example; null takes width", minimum=1)
    outputs: int | None = option(None, "targets per example; null takes width", minimum=1)
    layers: int = option(2, "number of linear layers", minimum=1)
    width: int = option(64, "features of every hidden layer", minimum=1)
    activation: str = option("relu", "function between two layers", choices=ACTIVATIONS)
    bias: bool = option(True, "whether linear layers have a bias")


@dataclass
class GPTConfig:
    """A decoder-only transformer: learned positions, pre-norm blocks, causal attention."""

    name: str = option("gpt", "registered name of the model")
    preset: str | None = option(None, "named size whose numbers fill every field left null")
    layers: int | None = option(None, "number of transformer blocks", minimum=1)
    heads: int | None = option(None, "attention heads per block; must divide width", minimum=1)
    width: int | None = option(None, "features of the residual stream", minimum=1)
    context: int | None = option(
        None, "longest sequence in tokens; training uses sequences of exactly this length", minimum=1
    )
    vocabulary: int | None = option(None, "number of token ids; null takes the tokenizer's", minimum=1)
    bias: bool = option(True, "whether linear layers and layer norms have a bias")
    dropout: float = option(
        0.0, "probability of zeroing after embedding, attention weights and each branch", minimum=0, below=1
    )
    activation: str = option("gelu_tanh", "function inside the feed-forward branch", choices=ACTIVATIONS)
    tied: bool = option(True, "whether the output head shares the token embedding's weight")
    recompute: str = option("none", "what backward computes again instead of keeping", choices=("none", "block"))
